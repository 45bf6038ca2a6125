"""The digests of a checkpoint's files: written once all is on the disk, verified before it is used."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agl_core.errors import CheckpointError
from agl_core.training.checkpoints.state import instead_of

_SUMS = "SHA256SUMS"
"""One line for each file of a checkpoint, which `sha256sum --check` reads too."""


def seal(folder: Path) -> None:
    """Sync everything below a folder to the disk, and write a digest of each file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(_digest, files))
        sums = folder / _SUMS
        lines = (
            f"{digest}  {file.relative_to(folder).as_posix()}\n" for digest, file in zip(digests, files, strict=True)
        )
        sums.write_text("".join(lines), encoding="utf-8")
        folders = (path for path in folder.rglob("*") if path.is_dir())
        list(pool.map(sync, (*files, sums, *folders, folder)))


def verify(checkpoint: Path) -> bool:
    """CheckpointError if a file of a checkpoint differs from what was written; False if it has no digests.

    This reads every file once.
    """
    sums = checkpoint / _SUMS
    if not sums.exists():
        return False
    try:
        lines = sums.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{sums} cannot be read: {error}. {instead_of(checkpoint)}") from error
    expected = {checkpoint / name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    with ThreadPoolExecutor() as pool:
        for (file, digest), found in zip(expected.items(), pool.map(_digest_if_readable, expected), strict=True):
            if found != digest:
                raise CheckpointError(
                    f"{file} is damaged: its SHA-256 was {digest} when the checkpoint was written, and is {found} now. "
                    f"{instead_of(checkpoint)}"
                )
    return True


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest_if_readable(file: Path) -> str:
    try:
        return _digest(file)
    except OSError as error:
        return f"unknown ({error.strerror})"
