"""Writes docs/conformance.md from the scenarios, what the drivers declare, and what the capture benchmark measured.

`python -m tests.conformance.make_page` writes it, `--check` fails if it is not up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from .apart import APART
from .drivers import DRIVERS
from .page import render

ROOT = Path(__file__).parents[2]
OUT, MEASURED = ROOT / "docs" / "conformance.md", ROOT / "docs" / "capture.json"


def main() -> int:
    measured = json.loads(MEASURED.read_text())
    page = render(DRIVERS, APART, Path(__file__).with_name("example_driver.py").read_text(), measured)
    if "--check" not in sys.argv[1:]:
        OUT.write_text(page)
        return 0
    if not OUT.exists() or OUT.read_text() != page:
        sys.stderr.write(f"{OUT.name} is not up to date: make docs\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
