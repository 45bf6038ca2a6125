"""The task sources "csv", "parquet" and "hf": what they read, and what they say about tables that are not right."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins
from agl_core.protocols import TaskSource
from agl_core.types import Task

ROWS = [{"id": "a", "question": "2 + 3?", "result": "5"}, {"id": "b", "question": "1 + 1?", "result": "2"}]


def source(kind: str, folder: Path, **options: Any) -> TaskSource:
    component = Plugins.load().component(kinds.TASK_SOURCE, kind, "[tasks.train] source")
    built: TaskSource = component.build(component.options(**options), folder, 0)
    return built


def written(kind: str, folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A table in a folder, and the setting that names it."""
    table = pa.Table.from_pylist(rows)
    if kind == "hf":
        datasets.Dataset(table).save_to_disk(folder / "tasks")
        return {"dataset": "tasks"}
    if kind == "parquet":
        pyarrow.parquet.write_table(table, folder / "tasks.parquet")
    else:
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        (folder / "tasks.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return {"path": f"tasks.{kind}"}


@pytest.mark.parametrize("kind", ["csv", "parquet", "hf"])
def test_a_row_is_a_task(kind: str, tmp_path: Path) -> None:
    place = written(kind, tmp_path, ROWS)

    tasks = source(kind, tmp_path, **place, input_field="question")
    assert tasks.size == 2
    assert tasks.task(1) == Task("b", "1 + 1?", metadata={"result": "2"})

    mapped = source(kind, tmp_path, **place, input_field=("question",), columns={"answer": "result"}, id_field="no")
    assert mapped.task(0) == Task("1", {"question": "2 + 3?"}, metadata={"id": "a", "answer": "5"})


@pytest.mark.parametrize("kind", ["csv", "parquet", "hf"])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({}, "has no column 'input'. Known: id, question, result"),
        ({"input_field": "qestion"}, "Did you mean 'question'?"),
        ({"input_field": "question", "columns": {"answer": "reslt"}}, "has no column 'reslt'. Did you mean 'result'?"),
    ],
)
def test_a_column_that_is_not_there(kind: str, options: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        source(kind, tmp_path, **written(kind, tmp_path, ROWS), **options)
    assert what in str(error.value)


@pytest.mark.parametrize("kind", ["parquet", "hf"])
@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("sum", decimal.Decimal("1.5"), "row 1: 'sum' is a Decimal"),
        ("question", b"\xff", "row 1: 'question' is a bytes"),
        ("id", 1.5, "row 1: 'id' must be a text or an integer"),
        ("id", None, "row 1: 'id' must be a text or an integer"),
    ],
)
def test_a_column_of_a_type_that_tasks_do_not_have(
    kind: str, column: str, value: Any, what: str, tmp_path: Path
) -> None:
    place = written(kind, tmp_path, [{**ROWS[0], column: value}])
    with pytest.raises(ConfigError) as error:
        source(kind, tmp_path, **place, input_field="question")
    assert what in str(error.value)


def test_a_date_is_its_text(tmp_path: Path) -> None:
    place = written("parquet", tmp_path, [{"input": "x", "day": datetime.date(2026, 1, 2)}])
    assert source("parquet", tmp_path, **place).task(0).metadata == {"day": "2026-01-02"}


def test_two_rows_with_one_id(tmp_path: Path) -> None:
    place = written("csv", tmp_path, [ROWS[0], ROWS[0]])
    with pytest.raises(ConfigError, match="row 2: the id 'a' is that of row 1 too"):
        source("csv", tmp_path, **place, input_field="question")


@pytest.mark.parametrize(
    ("kind", "content", "what"),
    [
        ("csv", b"input,id\n", "has no rows"),
        ("csv", b"", "has no rows"),
        ("csv", b"input,id\nx\n", "row 1: has more or fewer values"),
        ("csv", b"input\nx,y\n", "row 1: has more or fewer values"),
        ("csv", b"input\n\xff\xfe\n", "tasks.csv:2: byte 1 of the line is 0xff, which is not UTF-8"),
        ("parquet", b"input\n", "cannot be read as Parquet"),
        ("parquet", None, "do not exist"),
    ],
)
def test_what_is_no_table(kind: str, content: bytes | None, what: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / f"tasks.{kind}").write_bytes(content)
    with pytest.raises(ConfigError, match=what):
        source(kind, tmp_path, path=f"tasks.{kind}")


def test_a_dataset_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'nowhere', split 'train', cannot be loaded"):
        source("hf", tmp_path, dataset="nowhere")


def test_a_split_of_a_saved_dictionary(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": made, "test": made.select([1])}).save_to_disk(tmp_path / "tasks")

    tasks = source("hf", tmp_path, dataset="tasks", split="test", input_field="question")
    assert (tasks.size, tasks.task(0).id) == (1, "b")
    with pytest.raises(ConfigError, match="split 'dev', cannot be loaded"):
        source("hf", tmp_path, dataset="tasks", split="dev", input_field="question")
