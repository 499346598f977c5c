"""What ``lightning-apex compare`` is made of: runs in child processes, a judgement, and a report."""
