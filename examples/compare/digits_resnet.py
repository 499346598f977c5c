"""The small ResNet of examples/digits.py, for `lightning-apex compare --config examples/compare/digits_resnet.yaml`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from digits_model import DigitsClassifier, DigitsData

__all__ = ["DigitsClassifier", "DigitsData"]
