"""Rows of files and data sets, each with its place: the one reader of tasks and of what was recorded elsewhere."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agl_core.errors import EpisodesError

_NO_TEXT = {
    b"BZh": "bzip2; unpack it first",
    b"\xfd7zXZ": "xz; unpack it first",
    b"\x28\xb5\x2f\xfd": "zstd; unpack it first",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
}
"""Kinds of files that are not read, by their first bytes."""
_TABLES = (".parquet", ".pq", ".arrow")


def is_recording(path: Path) -> bool:
    """True for a file, and for the folder of a saved Hugging Face dataset."""
    return path.is_file() or any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read_rows(path: Path, *, is_csv: bool | None = None) -> Iterator[tuple[str, Any]]:
    """The rows of JSON Lines, a JSON array or object, CSV or TSV (by its suffix, unless `is_csv` says it), each perhaps
    compressed by gzip; of Parquet or Arrow; or of a saved Hugging Face dataset. Each has its place: `line 3`, `row 3`
    or `item 3`.

    A row of JSON Lines is the text of its line. EpisodesError if the file cannot be read at all.
    """
    try:
        if path.is_dir() or path.suffix.lower() in _TABLES:
            yield from _dataset_rows(path)
            return
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) if raw.peek(2).startswith(b"\x1f\x8b") else raw as file:
            head = file.peek(1 << 10)
            if kind := next((kind for magic, kind in _NO_TEXT.items() if head.startswith(magic)), None):
                raise EpisodesError(f"{path} is {kind}.")
            suffix = Path(path.name.lower().removesuffix(".gz")).suffix
            if is_csv or (is_csv is None and suffix in (".csv", ".tsv")):
                yield from _csv_rows(path, file, "\t" if suffix == ".tsv" else ",")
                return
            lines: Iterable[bytes] = file
            if re.match(rb"\[|\{\s*\n", head.removeprefix(b"\xef\xbb\xbf").lstrip()):
                whole = file.read()
                try:
                    items = json.loads(whole)
                    rows = items if isinstance(items, list) else [items]
                    yield from ((f"item {n}", row) for n, row in enumerate(rows, 1))
                    return
                except ValueError:
                    lines = io.BytesIO(whole)
            for number, line in enumerate(_texts(path, lines), 1):
                if not line.isspace():
                    yield f"line {number}", line
    except EpisodesError:
        raise
    except (OSError, EOFError, zlib.error, csv.Error, ValueError) as error:
        raise EpisodesError(f"{path} cannot be read: {error}.") from error


def load_dataset(path: Path, name: str, subset: str | None = None, split: str | None = None) -> Any:
    """The dataset at a path, else what the Hugging Face hub has by this name; ValueError says why it cannot load."""
    import datasets

    try:
        if path.suffix.lower() == ".arrow":
            return datasets.Dataset.from_file(str(path))
        if path.suffix.lower() in _TABLES:
            return datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
        if path.is_dir() and is_recording(path):
            saved = datasets.load_from_disk(path)
            return saved[split] if split is not None and isinstance(saved, datasets.DatasetDict) else saved
        return datasets.load_dataset(str(path) if path.exists() else name, subset, split=split)
    except Exception as error:  # Its class depends on the kind of dataset.
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _dataset_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Rows of several splits say which one is theirs."""
    dataset = load_dataset(path, str(path))
    if isinstance(dataset, dict):
        for split, rows in dataset.items():
            yield from ((f"{split}, row {n}", {"split": split, **row}) for n, row in enumerate(rows, 1))
    else:
        yield from ((f"row {n}", row) for n, row in enumerate(dataset, 1))


def _csv_rows(path: Path, file: Iterable[bytes], delimiter: str) -> Iterator[tuple[str, Any]]:
    """Rows as the header names their values, which are texts."""
    csv.field_size_limit(sys.maxsize)
    for number, row in enumerate(csv.DictReader(_texts(path, file), strict=True, delimiter=delimiter), 1):
        if None in row or None in row.values():
            raise EpisodesError(f"{path}, row {number}: has more or fewer values than the header has columns.")
        yield f"row {number}", row


def _texts(path: Path, lines: Iterable[bytes]) -> Iterator[str]:
    """The lines as text. EpisodesError names a byte that is none."""
    for number, line in enumerate(lines, 1):
        try:
            yield line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").decode()
        except UnicodeDecodeError as error:
            raise EpisodesError(
                f"{path}, line {number}: byte {error.start + 1} of the line is 0x{line[error.start]:02x}, which is not "
                f"UTF-8. If it is a text, save it as UTF-8: iconv -f ITS-ENCODING -t UTF-8"
            ) from None
