"""Which files Docker takes into the build context: the rules of `.dockerignore` (moby/patternmatcher)."""

from __future__ import annotations

import re
from pathlib import Path


class BuildContext:
    """Reads an ignore file as Docker does: the last pattern that matches a path, or a folder above it, decides."""

    def __init__(self, file: Path) -> None:
        lines = [line.strip() for line in file.read_text().splitlines() if not line.startswith("#")]
        self._rules = [(_compiled(line.removeprefix("!")), line.startswith("!")) for line in lines if line]

    def has(self, path: str) -> bool:
        parts = path.split("/")
        above = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
        included = True
        for pattern, includes in self._rules:
            if any(pattern.fullmatch(each) for each in above):
                included = includes
        return included


def _compiled(pattern: str) -> re.Pattern[str]:
    found = ""
    at = 0
    text = pattern.strip("/")
    while at < len(text):
        if text.startswith("**/", at):
            found, at = found + "(?:.*/)?", at + 3
        elif text.startswith("**", at):
            found, at = found + ".*", at + 2
        else:
            found += {"*": "[^/]*", "?": "[^/]"}.get(text[at], re.escape(text[at]))
            at += 1
    return re.compile(found)
