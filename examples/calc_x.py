"""The Calc-X datasets (arXiv 2305.15017) from a local file, as a plugin: `[tasks.train] source = "calc-x"`.

Their format: a row is a problem, with `question`, `result` (a number, a fraction, or an option's letter as text),
and in most of them `id` and `result_float` (the result as a number). Other columns, such as `chain` with the worked
solution, are not read.

    plugins = ["../calc_x.py"]

    [tasks.train]
    source = "calc-x"
    path = "/data/calc-gsm8k/train-00000-of-00001.parquet"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import agl_core
from agl_core.errors import ConfigError
from agl_core.types import Task

COLUMNS = ("id", "question", "result", "result_float")
_SEPARATORS = str.maketrans("", "", "_,")
"""Between thousands."""


@agl_core.task_source(name="calc-x")
def calc_x(*, path: Path) -> Iterator[Task]:
    """The problems of a file in the format of Calc-X, .parquet as it is published (needs pyarrow) or .jsonl.

    A problem's result is metadata, which the agent does not see. ConfigError names the row that is not in the format.
    """
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The tasks {path} cannot be read: {error}") from error
    for number, row in enumerate(rows):
        yield _task(row, number, f"{path}, row {number}")


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"To read {path}: pip install pyarrow. Or write it as .jsonl, one JSON object per row."
        ) from None
    held = parquet.read_schema(path).names
    rows: list[dict[str, Any]] = parquet.read_table(
        path, columns=[column for column in COLUMNS if column in held]
    ).to_pylist()
    return rows


def _json_lines(path: Path) -> Iterable[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _task(row: Mapping[str, Any], number: int, where: str) -> Task:
    missing = [column for column in ("question", "result") if row.get(column) is None]
    if missing:
        raise ConfigError(f"{where}: has no '{missing[0]}'. A row of Calc-X has {', '.join(COLUMNS)}.")
    result = row.get("result_float")
    try:
        result = float(Fraction(str(row["result"]).translate(_SEPARATORS))) if result is None else result
    except (ValueError, ZeroDivisionError):
        raise ConfigError(
            f"{where}: the result {row['result']!r} is no number, and there is no result_float."
        ) from None
    return Task(
        id=str(row.get("id") or number), input={"question": row["question"]}, metadata={"result": f"{result:.12g}"}
    )
