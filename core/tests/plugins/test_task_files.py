"""Tasks of files, data sets and mixtures: what is read, and what is said about rows and parts that are not right."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load, store_config
from agl_core.config.models import MixtureOptions
from agl_core.config.resolve import ChosenComponent
from agl_core.errors import ConfigError
from agl_core.kinds import Component, NoOptions
from agl_core.plugins import Plugins
from agl_core.protocols import RecordedTasks, TaskSource
from agl_core.testing import episodes as make
from agl_core.types import Task
from agl_server.builtin.tasks import Mixture
from agl_server.health.rollouts import episode_metrics

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


class Numbers:
    def __init__(self, size: int | None) -> None:
        self.size = size

    def task(self, index: int) -> Task:
        return Task(str(index), index, metadata={"number": index})


def mixture(seed: int = 0, **parts: tuple[float, Any]) -> Mixture:
    """A mixture of these sources by these weights."""
    options = MixtureOptions.model_validate(
        {"parts": {name: {"source": "x", "weight": w} for name, (w, _) in parts.items()}}
    )
    chosen = {
        name: ChosenComponent(Component("", kinds.TASK_SOURCE, "x", lambda *_, source=source: source), NoOptions())
        for name, (_, source) in parts.items()
    }
    return Mixture(options, Path(), seed, chosen)


@given(weights=st.lists(st.integers(1, 20), min_size=1, max_size=5), start=st.integers(0, 3000), seed=st.integers(0, 3))
def test_each_part_has_its_share_of_every_stretch(weights: list[int], start: int, seed: int) -> None:
    names = "abcde"[: len(weights)]
    tasks = mixture(seed, **{name: (w, Numbers(None)) for name, w in zip(names, weights, strict=True)})
    length = 60
    drawn = Counter(tasks.task(index).metadata["part"] for index in range(start, start + length))
    for name, weight in zip(names, weights, strict=True):
        # Turns of one part are equally far apart, so a stretch has as many as its share, or one more or less. Weights
        # are rounded to a thousandth.
        assert abs(drawn[name] - length * weight / sum(weights)) < 1.1


@given(size=st.integers(1, 12), seed=st.integers(0, 3))
def test_parts_go_on_by_themselves_and_finite_ones_begin_anew(size: int, seed: int) -> None:
    tasks = mixture(seed, few=(0.25, Numbers(size)), many=(0.75, Numbers(None)))
    drawn = [tasks.task(index) for index in range(8 * size)]
    few = [task.id for task in drawn if task.metadata["part"] == "few"]
    many = [task.id for task in drawn if task.metadata["part"] == "many"]
    assert sorted(few[:size]) == sorted(few[size:]) == sorted(f"few/{index}" for index in range(size))
    assert many == [f"many/{index}" for index in range(6 * size)]
    assert drawn[0].metadata["number"] == drawn[0].input
    assert drawn == [
        mixture(seed, few=(0.25, Numbers(size)), many=(0.75, Numbers(None))).task(i) for i in range(8 * size)
    ]


def test_rewards_are_also_by_part() -> None:
    tasks = mixture(easy=(1, Numbers(None)), hard=(1, Numbers(None)))
    episodes = [make.episode(task=tasks.task(index), terminal=index / 2) for index in range(4)]
    metrics = episode_metrics([*episodes, make.episode(task=Task("t", "", metadata={"part": "other"}), terminal=1.0)])
    by_part = {key: value for key, value in metrics.items() if key.startswith("reward/part/")}
    assert by_part == {"reward/part/easy": 0.5, "reward/part/hard": 1.0}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (Numbers(0), "The part 'b' of a mixture has no tasks"),
        (mock.Mock(spec=RecordedTasks), "The part 'b' of a mixture is of recorded rollouts"),
        (mock.Mock(spec=Numbers(None), task=mock.Mock(side_effect=ConfigError("no such data"))), "no such data"),
    ],
    ids=["empty", "recorded", "not there"],
)
def test_a_part_that_cannot_be_mixed_is_named(source: TaskSource, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        mixture(a=(1, Numbers(2)), b=(1, source))


def loaded(folder: Path, parts: Mapping[str, Any]) -> LoadedConfig:
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(json.dumps({"id": "1", "question": f"What is {name}?"}) + "\n")
    config = {
        "config_version": 1,
        "agent": {"entry": "my_agent:solve"},
        "policies": {"default": {"model": {"path": "."}}},
        "tasks": {"train": {"source": "mixture", "parts": parts}},
    }
    (folder / "train.toml").write_text(tomli_w.dumps(config))
    return load(folder / "train.toml")


PART = {"source": "jsonl", "path": "a.jsonl", "columns": COLUMNS}


def test_a_file_names_the_parts_with_the_settings_of_their_sources(tmp_path: Path) -> None:
    run = loaded(tmp_path, {"a": PART, "b": {**PART, "path": "b.jsonl", "weight": 3}})
    tasks = run.tasks["train"].build(run.config.folder, 0)
    assert Counter(tasks.task(index).input for index in range(40)) == {"What is a?": 10, "What is b?": 30}

    (tmp_path / "stored").mkdir()
    store_config(run.config, tmp_path / "stored")
    again = load(tmp_path / "stored" / CONFIG_FILE)
    assert again.config.tasks == run.config.tasks
    assert again.tasks["train"].build(again.config.folder, 0).task(0) == tasks.task(0)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"source": "jsnl"}, "[tasks.train.parts.a] source: there is no task source 'jsnl'. Did you mean 'jsonl'?"),
        ({"pth": "x"}, "[tasks.train.parts.a] pth: task source 'jsonl'"),
        ({"weight": 0}, "[tasks.train.parts.a] weight: must be greater than 0, not 0"),
        ({"source": None}, "[tasks.train.parts.a] source: is missing"),
    ],
)
def test_what_is_wrong_with_a_part_is_said_with_its_place(part: dict[str, Any], problem: str, tmp_path: Path) -> None:
    section = {key: value for key, value in {**PART, **part}.items() if value is not None}
    with pytest.raises(ConfigError) as error:
        loaded(tmp_path, {"a": section, "b": PART})
    assert problem in str(error.value)
