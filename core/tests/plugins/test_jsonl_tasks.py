"""The task source "jsonl": what it reads, and what it says about files that are not right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import kinds
from agl_core.builtin.tasks import JsonlOptions, JsonlTasks
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins
from agl_core.types import Task


def tasks(folder: Path, text: str, **options: Any) -> JsonlTasks:
    (folder / "tasks.jsonl").write_text(text)
    source = Plugins.load().component(kinds.TASK_SOURCE, "jsonl", "[tasks.train] source")
    built: JsonlTasks = source.build(source.options(path="tasks.jsonl", **options), folder, 0)
    return built


def test_input_id_and_metadata(tmp_path: Path) -> None:
    source = tasks(tmp_path, '{"id": "a", "input": "2 + 3?", "result": "5"}\n\n{"input": {"x": [1]}}\n')

    assert source.size == 2
    assert source.task(0) == Task("a", "2 + 3?", metadata={"result": "5"})
    assert source.task(1) == Task("3", {"x": [1]}, metadata={})


def test_fields_can_have_other_names(tmp_path: Path) -> None:
    source = tasks(
        tmp_path, '{"number": 7, "question": "2 + 3?", "id": "kept"}', input_field="question", id_field="number"
    )

    assert source.task(0) == Task("7", "2 + 3?", metadata={"id": "kept"})


def test_windows_line_ends_and_a_last_line_without_one(tmp_path: Path) -> None:
    assert tasks(tmp_path, '{"input": 1}\r\n{"input": 2}').size == 2


@given(st.lists(st.one_of(st.text(), st.integers(-(2**53), 2**53), st.dictionaries(st.text(), st.text())), min_size=1))
def test_any_json_input_comes_back(tmp_path_factory: pytest.TempPathFactory, inputs: list[Any]) -> None:
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    file.write_text("\n".join(json.dumps({"input": each}) for each in inputs))

    source = JsonlTasks(JsonlOptions(path=file), file.parent)

    assert [source.task(index).input for index in range(source.size)] == inputs


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "tasks.jsonl has no tasks"),
        ("\n \n", "tasks.jsonl has no tasks"),
        ('{"input": 1}\n{"input": ', "tasks.jsonl:2: not a JSON object"),
        ('\n{"input": NaN}', "tasks.jsonl:2: not a JSON object"),
        ("[1]", "tasks.jsonl:1: must be a JSON object, not list"),
        ('{"inputs": 1}', "tasks.jsonl:1: has no 'input' for the task's input. Did you mean 'inputs'?"),
        ('{"input": 1, "id": "a"}\n\n{"input": 2, "id": "a"}', "tasks.jsonl:3: the id 'a' is that of line 1 too"),
        ('{"input": 1, "id": "2"}\n{"input": 2}', "tasks.jsonl:2: the id '2' is that of line 1 too"),
        ('{"input": 1, "id": {}}', "tasks.jsonl:1: 'id' must be a text or an integer"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        tasks(tmp_path, text)

    assert said in str(error.value)


@pytest.mark.parametrize(
    ("content", "place"),
    [(b'{"input": 1}\n{"input": "caf\xe9"}', ":2: byte 15 of the line is 0xe9"), (b"\xff\xfe{\0", ":1: byte 1 of")],
)
def test_a_file_that_is_not_utf8_is_told_with_its_place_and_a_remedy(
    tmp_path: Path, content: bytes, place: str
) -> None:
    (tmp_path / "tasks.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        JsonlTasks(JsonlOptions(path=Path("tasks.jsonl")), tmp_path)
    assert f"{tmp_path / 'tasks.jsonl'}{place}" in str(error.value)
    assert "which is not UTF-8. Save the file as UTF-8, for instance: iconv" in str(error.value)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"input": "é"}', encoding="utf-8-sig")
    assert JsonlTasks(JsonlOptions(path=Path("tasks.jsonl")), tmp_path).task(0).input == "é"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    source = Plugins.load().component(kinds.TASK_SOURCE, "jsonl", "[tasks.train] source")

    with pytest.raises(ConfigError, match=r"gone\.jsonl do not exist. Paths are relative to the configuration file"):
        source.build(source.options(path="gone.jsonl"), tmp_path, 0)
    with pytest.raises(ConfigError, match="cannot be read"):
        source.build(source.options(path="."), tmp_path, 0)
