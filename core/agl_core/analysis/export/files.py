"""Writing tables, row by row, in each format; and making what was written appear whole or not at all."""

from __future__ import annotations

import csv
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson

from agl_core.analysis.export.tables import Column, Row
from agl_core.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

_BATCH_BYTES = 8 << 20
"""Rows are kept until they take so much memory, and are then written together."""

Columns = Mapping[str, Column]


class TableFile(Protocol):
    """One table that is being written."""

    def write(self, rows: Sequence[Row]) -> None: ...

    def close(self) -> None: ...


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A place beside `target` to write to, which becomes `target` when the block ends well, and is removed if not.

    ConfigError if there is something at `target` already.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} exists already, and nothing is overwritten. Name another place, or remove it.")
    if not target.parent.is_dir():
        raise ConfigError(f"There is no folder {target.parent} to write {target.name} to. Make it first.")
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as part:
        made = Path(part) / target.name
        yield made
        os.rename(made, target)


class JsonlFile:
    """One JSON object a line; lists and objects are what they are."""

    def __init__(self, path: Path, columns: Columns | None) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._columns = columns

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            whole = row if self._columns is None else {name: row.get(name) for name in self._columns}
            self._file.write(_json(whole) + "\n")

    def close(self) -> None:
        self._file.close()


class CsvFile:
    """Comma-separated values with a header; lists and JSON values as JSON text, what is missing as nothing."""

    def __init__(self, path: Path, columns: Columns) -> None:
        self._file = path.open("w", encoding="utf-8", errors="replace", newline="")
        self._columns = columns
        self._writer = csv.writer(self._file)
        self._writer.writerow(columns)

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._writer.writerow([self._cell(kind, row.get(name)) for name, kind in self._columns.items()])

    def close(self) -> None:
        self._file.close()

    @staticmethod
    def _cell(kind: Column, value: Any) -> Any:
        if value is None or kind in (Column.TEXT, Column.INTEGER, Column.NUMBER):
            return value
        return _json(value)


class _ArrowFile:
    """Rows as Arrow tables of some size, which a subclass's writer takes."""

    _writer: Any

    def __init__(self, columns: Columns) -> None:
        import pyarrow as pa

        kinds = {
            Column.TEXT: pa.string(),
            Column.INTEGER: pa.int64(),
            Column.NUMBER: pa.float64(),
            Column.TRUTH: pa.bool_(),
            Column.JSON: pa.string(),
            Column.INTEGERS: pa.list_(pa.int32()),
            Column.NUMBERS: pa.list_(pa.float32()),
            Column.TRUTHS: pa.list_(pa.bool_()),
        }
        self._columns = columns
        self._schema = pa.schema([(name, kinds[kind]) for name, kind in columns.items()])
        self._waiting: list[pa.RecordBatch] = []
        self._bytes = 0

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        if rows:
            arrays = [
                pa.array([_in_arrow(kind, row.get(name)) for row in rows], self._schema.field(name).type)
                for name, kind in self._columns.items()
            ]
            self._waiting.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            self._bytes += self._waiting[-1].nbytes
        if self._bytes >= _BATCH_BYTES:
            self._write_waiting()

    def close(self) -> None:
        self._write_waiting()
        self._writer.close()

    def _write_waiting(self) -> None:
        import pyarrow as pa

        if self._waiting:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
            self._writer.write_table(pa.Table.from_batches(waiting, self._schema).combine_chunks())


class ParquetFile(_ArrowFile):
    """Apache Parquet: JSON values as JSON text, tokens and log-probabilities as lists of numbers."""

    def __init__(self, path: Path, columns: Columns) -> None:
        import pyarrow.parquet

        super().__init__(columns)
        self._writer = pyarrow.parquet.ParquetWriter(path, self._schema, compression="zstd")


class DatasetFolder(_ArrowFile):
    """A folder of Hugging Face `datasets`, for `load_from_disk` and `load_dataset`."""

    def __init__(self, path: Path, columns: Columns) -> None:
        import datasets  # noqa: F401  # That it is not installed is said before anything is written.
        import pyarrow as pa

        super().__init__(columns)
        self._path, self._stream = path, path.with_name(f".{path.name}.arrow")
        self._file = pa.OSFile(str(self._stream), "wb")
        self._writer = pa.ipc.new_stream(self._file, self._schema)

    def close(self) -> None:
        from datasets import Dataset, disable_progress_bars

        super().close()
        self._file.close()
        disable_progress_bars()
        Dataset.from_file(str(self._stream)).save_to_disk(self._path)
        self._stream.unlink()


def _in_arrow(kind: Column, value: Any) -> Any:
    if value is None:
        return None
    if kind is Column.JSON:
        return _json(value)
    return value.encode("utf-8", "replace").decode() if kind is Column.TEXT else value


def _json(value: Any) -> str:
    """JSON on one line; a number that JSON lacks is null, and what is no UTF-8 is escaped."""
    try:
        return orjson.dumps(value, dict, orjson.OPT_SERIALIZE_NUMPY).decode()
    except TypeError:
        return json.dumps(_without_arrays(value), default=dict)


def _without_arrays(value: Any) -> Any:
    """A row or a value as the standard library can write it, which is slower and can write more."""
    if isinstance(value, Mapping):
        return {str(key): _without_arrays(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return _without_arrays(value.tolist())
    if isinstance(value, list | tuple):
        return [_without_arrays(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
