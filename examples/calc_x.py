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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

import agl_core
from agl_core.errors import ConfigError
from agl_core.registering import RegisterTaskSource
from agl_core.types import Task

COLUMNS = ("id", "question", "result", "result_float")
_SEPARATORS = str.maketrans("", "", "_,")
"""Between thousands."""


class CalcXOptions(BaseModel):
    """What `[tasks.…]` may say beside `source = "calc-x"`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(
        description="A file of the dataset, .parquet as it is published (needs pyarrow) or .jsonl, relative to the "
        "configuration file."
    )


@dataclass(frozen=True)
class CalcXTasks:
    """The problems of one file, in its order."""

    tasks: tuple[Task, ...]

    @property
    def size(self) -> int:
        return len(self.tasks)

    def task(self, index: int) -> Task:
        """The problem at this index; its result is metadata, which the agent does not see."""
        return self.tasks[index]


def build(options: CalcXOptions, folder: Path, seed: int) -> CalcXTasks:
    """The problems of a file in the format of Calc-X. ConfigError names the row that is not in it."""
    del seed  # a file is the same for every seed
    path = folder / options.path.expanduser()
    try:
        rows = _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"The tasks {path} cannot be read: {error}") from error
    return CalcXTasks(tuple(_task(row, number, f"{path}, row {number}") for number, row in enumerate(rows)))


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            f"To read {path}: pip install pyarrow. Or write it as .jsonl, one JSON object per row."
        ) from None
    held = parquet.read_schema(path).names
    rows: list[dict[str, Any]] = parquet.read_table(
        path, columns=[each for each in COLUMNS if each in held]
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


@agl_core.hookimpl
def register_task_sources(register: RegisterTaskSource) -> None:
    register("calc-x", build, options=CalcXOptions)
