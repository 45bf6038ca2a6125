"""Tasks of files and data sets: what is read, and what is said about rows that are not right."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins
from agl_core.protocols import TaskSource
from agl_core.types import Task

ROWS = [{"id": "a", "question": "2 + 3?", "result": "5"}, {"id": "b", "question": "1 + 1?", "result": "2"}]
KINDS = ("jsonl", "csv", "parquet", "hf")
COLUMNS = {"input": "question"}


def source(kind: str, folder: Path, **options: Any) -> TaskSource:
    name = "hf" if kind == "parquet" else kind
    component = Plugins.load().component(kinds.TASK_SOURCE, name, "[tasks.train] source")
    file = "tasks" if kind == "hf" else f"tasks.{kind}"
    location = {"dataset" if name == "hf" else "path": file}
    built: TaskSource = component.build(component.options(**(location | options)), folder, 0)
    return built


def write(kind: str, folder: Path, rows: list[dict[str, Any]]) -> None:
    if kind == "hf":
        datasets.Dataset(pa.Table.from_pylist(rows)).save_to_disk(folder / "tasks")
    elif kind == "parquet":
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "tasks.parquet")
    elif kind == "jsonl":
        (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [list(rows[0]), *(list(row.values()) for row in rows)]
        (folder / "tasks.csv").write_text("".join(",".join(map(str, line)) + "\n" for line in lines))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_a_task(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path, ROWS)
    tasks = source(kind, tmp_path, columns=COLUMNS)
    assert tasks.size == 2
    assert tasks.task(1) == Task("b", "1 + 1?", metadata={"result": "2"})

    mapped = source(kind, tmp_path, columns={"input": ("question",), "answer": "result", "id": "no"})
    assert mapped.task(0) == Task("1", {"question": "2 + 3?"}, metadata={"id": "a", "answer": "5"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({}, "has no 'input'. Known: id, question, result"),
        ({"input": "qestion"}, "has no 'qestion'. Did you mean 'question'?"),
        ({**COLUMNS, "answer": "reslt"}, "has no 'reslt'. Did you mean 'result'?"),
    ],
)
def test_a_column_that_is_not_there(kind: str, columns: Any, problem: str, tmp_path: Path) -> None:
    write(kind, tmp_path, ROWS)
    with pytest.raises(ConfigError) as error:
        source(kind, tmp_path, columns=columns)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("sum", decimal.Decimal("1.5"), "row 1: 'sum' is a Decimal"),
        ("question", b"\xff", "row 1: 'question' is a bytes"),
        ("id", 1.5, "row 1: 'id' must be a text or an integer"),
        ("id", None, "row 1: 'id' must be a text or an integer"),
    ],
)
def test_a_column_of_a_type_that_tasks_do_not_have(column: str, value: Any, problem: str, tmp_path: Path) -> None:
    write("hf", tmp_path, [{**ROWS[0], column: value}])
    with pytest.raises(ConfigError) as error:
        source("hf", tmp_path, columns=COLUMNS)
    assert problem in str(error.value)


def test_a_date_is_its_text(tmp_path: Path) -> None:
    write("parquet", tmp_path, [{"input": "x", "day": datetime.date(2026, 1, 2)}])
    assert source("parquet", tmp_path).task(0).metadata == {"day": "2026-01-02"}


@pytest.mark.parametrize("kind", KINDS)
def test_two_rows_with_one_id(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path, [ROWS[0], ROWS[0]])
    with pytest.raises(ConfigError, match=r"(row|line) 2: the id 'a' is also that of .*(row|line) 1\."):
        source(kind, tmp_path, columns=COLUMNS)


@given(st.lists(st.one_of(st.text(), st.integers(-(2**53), 2**53), st.dictionaries(st.text(), st.text())), min_size=1))
def test_any_json_input_comes_back(tmp_path_factory: pytest.TempPathFactory, inputs: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("tasks")
    write("jsonl", folder, [{"input": value} for value in inputs])
    tasks = source("jsonl", folder)
    assert [tasks.task(index).input for index in range(len(inputs))] == inputs


def test_blank_lines_windows_line_ends_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes('\ufeff{"input": "é"}\r\n\r\n{"input": {"x": [1]}}'.encode())
    tasks = source("jsonl", tmp_path)
    assert [tasks.task(index) for index in range(tasks.size or 0)] == [Task("1", "é"), Task("3", {"x": [1]})]


def test_an_array_and_what_gzip_compressed_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(gzip.compress(json.dumps([{"input": "x"}, {"input": "y"}]).encode()))
    assert source("jsonl", tmp_path).task(1) == Task("2", "y")


@pytest.mark.parametrize(
    ("kind", "content", "problem"),
    [
        ("jsonl", b"\n \n", "tasks.jsonl has no tasks"),
        ("jsonl", b'{"input": 1}\n{"input": ', "tasks.jsonl, line 2: not a JSON object"),
        ("jsonl", b'\n{"input": NaN}', "tasks.jsonl, line 2: not a JSON object"),
        ("jsonl", b"[1]", "tasks.jsonl, item 1: must be a JSON object, not int"),
        ("jsonl", b'{"input": 1, "id": "2"}\n{"input": 2}', "tasks.jsonl, line 2: the id '2' is also that of"),
        ("jsonl", b'{"input": 1, "id": {}}', "tasks.jsonl, line 1: 'id' must be a text or an integer"),
        ("jsonl", b'{"input": 1}\n{"input": "caf\xe9"}', r"tasks.jsonl, line 2: byte 15 of the line is 0xe9.*iconv"),
        ("jsonl", None, "do not exist. Paths are relative to the configuration file"),
        ("csv", b"input,id\n", "has no tasks"),
        ("csv", b"", "has no tasks"),
        ("csv", b"input,id\nx\n", "row 1: has more or fewer values"),
        ("csv", b"input\nx,y\n", "row 1: has more or fewer values"),
        ("csv", b"input\n\xff\xfe\n", "tasks.csv, line 2: byte 1 of the line is 0xff, which is not UTF-8"),
        ("parquet", b"input\n", "cannot be loaded"),
        ("parquet", None, "cannot be loaded"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_place(
    kind: str, content: bytes | None, problem: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / f"tasks.{kind}").write_bytes(content)
    with pytest.raises(ConfigError, match=problem):
        source(kind, tmp_path)


def test_a_split_of_a_saved_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "tasks")
    tasks = source("hf", tmp_path, split="test", columns=COLUMNS)
    assert (tasks.size, tasks.task(0).id) == (1, "b")
    with pytest.raises(ConfigError, match="split 'dev', cannot be loaded"):
        source("hf", tmp_path, split="dev", columns=COLUMNS)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'nowhere', split 'train', cannot be loaded"):
        source("hf", tmp_path, dataset="nowhere")


def test_a_subset_of_a_folder_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    configs = "configs:\n"
    for number, subset in enumerate(("first", "second")):
        (tmp_path / "tasks").mkdir(exist_ok=True)
        datasets.Dataset.from_list(ROWS[number:]).to_parquet(tmp_path / "tasks" / f"{subset}.parquet")
        configs += f"- config_name: {subset}\n  data_files: {subset}.parquet\n"
    (tmp_path / "tasks" / "README.md").write_text(f"---\n{configs}---\n")
    first, second = (source("hf", tmp_path, subset=subset, columns=COLUMNS) for subset in ("first", "second"))
    assert (first.size, second.size) == (len(ROWS), len(ROWS) - 1)
