"""A page that a script generates: written, or with `--check` compared with what is there."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def check_apps() -> None:
    """End with an error where an app is not installed: the page would be made without its commands and settings."""
    for folder in sorted((Path(__file__).parents[1] / "apps").iterdir()):
        try:
            version(f"agl-{folder.name}")
        except PackageNotFoundError:
            sys.exit(f"agl-{folder.name} is not installed: {sys.executable} -m pip install --no-deps -e {folder}")


def write_or_check(page: Path, text: str) -> int:
    """Write the page; with `--check` among the arguments, 1 if it differs. Returns the exit status."""
    if "--check" not in sys.argv[1:]:
        page.write_text(text)
        return 0
    if page.read_text() != text:
        sys.stderr.write(f"{page.name} is not up to date: make docs\n")
        return 1
    return 0
