"""A page that a script generates: written, or with `--check` compared with what is there."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, text: str) -> int:
    """Write the page; with `--check` among the arguments, 1 if it differs. Returns the exit status."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    if page.read_text() != text:
        sys.stderr.write(f"{page.name} is not up to date: make docs\n")
        return 1
    return 0
