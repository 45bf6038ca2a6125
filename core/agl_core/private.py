"""Files that their owner alone may read: a run holds expected answers and keys.

The umask stays as it is, because it is also that of the agents, whose files are theirs.
"""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder for its owner alone (0700), and usual ones around it; one that is there becomes such a one."""
    path.mkdir(parents=True, exist_ok=exist_ok)
    path.chmod(0o700)


def opener(path: str, flags: int) -> int:
    """Open a file as one for its owner alone (0600): `open(path, "ab", opener=opener)`."""
    file = os.open(path, flags, 0o600)
    os.fchmod(file, 0o600)
    return file


def write(path: Path, content: bytes | str) -> None:
    """Write a file for its owner alone."""
    with open(path, "wb", opener=opener) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def replace(path: Path, content: bytes | str) -> None:
    """Write such a file whole: a reader finds what was there before, or all of the new."""
    part = path.with_name(f".{path.name}.part")
    write(part, content)
    os.replace(part, path)
