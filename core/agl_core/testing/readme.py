"""A page's examples, to be run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def blocks(page: Path, language: str = "") -> list[str]:
    """The page's code blocks that are marked with this language; without one, those that show what is printed."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for each, text in found if each == language]


def run_snippets(page: Path) -> dict[str, Any]:
    """Run the page's Python blocks one after the other, in one namespace: its names afterwards."""
    names: dict[str, Any] = {}
    for snippet in blocks(page, "python"):
        exec(compile(snippet, page.name, "exec"), names)
    return names
