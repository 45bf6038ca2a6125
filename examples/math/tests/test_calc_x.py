"""The loader of Calc-X, on rows in its own format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins

EXAMPLES = Path(__file__).parents[2]
ROWS = Path(__file__).parent / "data" / "calc_x.jsonl"


def tasks(file: Path) -> Any:
    component = Plugins.load([EXAMPLES / "calc_x.py"]).component(kinds.TASK_SOURCE, "calc-x", "[tasks]")
    return component.build(component.options.model_validate({"path": str(file)}), EXAMPLES, 0)


def test_rows_are_read_in_their_own_format() -> None:
    """A number, a fraction, an option's letter, and a subset without ids and `result_float`."""
    source = tasks(ROWS)
    rows = [source.task(index) for index in range(source.size)]
    assert [task.metadata["result"] for task in rows] == ["66", "0.375", "12", "3000"]
    assert [task.id for task in rows] == ["gsm8k__a1", "ape210k__b2", "math_qa__c3", "3"]
    assert all(task.input.keys() == {"question"} for task in rows)


def test_parquet_is_read_as_it_is_published(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    published, source = tasks(tmp_path / "train.parquet"), tasks(ROWS)
    assert [published.task(index) for index in range(published.size)] == [
        source.task(index) for index in range(source.size)
    ]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('{"question": "2+3?"}', "row 0: has no 'result'"),
        ('{"question": "2+3?", "result": "B"}', "row 0: the result 'B' is no number"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_row_in_another_format_is_named(tmp_path: Path, row: str, error: str) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError, match=error):
        tasks(tmp_path / "rows.jsonl")
