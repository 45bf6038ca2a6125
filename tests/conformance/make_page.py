"""Writes docs/conformance.md from the scenarios and what the drivers declare.

`python -m tests.conformance.make_page` writes it, `--check` fails if it is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from .apart import APART
from .drivers import DRIVERS
from .page import render

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "conformance.md"


def main() -> int:
    page = render(DRIVERS, APART, Path(__file__).with_name("example_driver.py").read_text())
    if "--check" not in sys.argv[1:]:
        OUT.write_text(page)
        return 0
    if not OUT.exists() or OUT.read_text() != page:
        sys.stderr.write(f"{OUT.name} is not up to date: make docs\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
