"""What ``lightning-apex ranges`` is made of."""
