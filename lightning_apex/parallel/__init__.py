"""Training with many processes and large batches."""

from lightning_apex.parallel.larc import LARC

__all__ = ["LARC"]
