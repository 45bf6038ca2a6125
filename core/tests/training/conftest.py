"""The helpers beside this file, and the server's, are importable from the tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "server")]
