"""Puts the examples' own modules on the path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("calc", "trip")]
