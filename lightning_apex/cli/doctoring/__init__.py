"""What ``lightning-apex doctor`` is made of."""
