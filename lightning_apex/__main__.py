"""``python -m lightning_apex``: the same as ``lightning-apex``."""

import sys

from lightning_apex.cli.program import main

if __name__ == "__main__":
    sys.exit(main())
