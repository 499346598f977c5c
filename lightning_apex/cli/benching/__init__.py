"""Times of optimizers, batch norm and whole steps beside others'; the repository's ``benchmarks/`` stand on it."""
