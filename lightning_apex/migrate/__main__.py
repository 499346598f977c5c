"""``python -m lightning_apex.migrate``."""

import sys

from lightning_apex.migrate.program import main

if __name__ == "__main__":
    sys.exit(main())
