"""The planted bugs: which there are, and that repairing one earns the reward and nothing else does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from bugs import HELD_OUT, MODULES, outcomes
from made import edits

from agl_core.kinds import TASK_SOURCE
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Task
from agl_harnesses import grading
from agl_harnesses.workspace import Workspaces, WorkspaceSection, task_source

FILE = Path(__file__).parents[1] / "bugs.py"


@pytest.fixture(scope="module")
def tasks() -> dict[str, list[Task]]:
    component = Plugins.load([FILE]).component(TASK_SOURCE, "bugs", "the test")
    sources = {part: component.build(component.options(part=part), Path(), 0) for part in ("train", "eval")}
    return {part: [source.task(n) for n in range(source.size)] for part, source in sources.items()}


def module_of(task: Task) -> str:
    return task.id.rpartition("-")[0]


def test_there_are_forty_and_held_out_modules_are_not_trained_on(tasks: dict[str, list[Task]]) -> None:
    assert {part: len(of_part) for part, of_part in tasks.items()} == {"train": 28, "eval": 12}
    assert {module_of(task) for task in tasks["eval"]} == set(HELD_OUT)
    assert {module_of(task) for task in tasks["train"]} == MODULES.keys() - set(HELD_OUT)


def test_each_module_is_right_and_each_mistake_is_seen(tasks: dict[str, list[Task]]) -> None:
    assert all(all(outcomes(code, tests).values()) for code, tests in MODULES.values())
    for task in (task for of_part in tasks.values() for task in of_part):
        module, tests = module_of(task), task.metadata["tests"]
        mistaken = task.input["workspace"]["files"][f"{module}.py"]
        passed = outcomes(mistaken, MODULES[module][1])
        ids = {f"test_{module}.py::{name}": was for name, was in passed.items()}
        assert [id for id, was in ids.items() if not was] == tests["fail_to_pass"] != []
        assert [id for id, was in ids.items() if was] == tests["pass_to_pass"] != []
        shown = re.findall(r"def (test_\w+)", task.input["workspace"]["files"]["check.py"])
        assert [f"test_{module}.py::{name}" for name in shown] == tests["fail_to_pass"]


def test_made_up_bugs_break_what_others_are_told_and_one_edit_repairs_them() -> None:
    source = Plugins.load([FILE.with_name("made.py")]).component(TASK_SOURCE, "made_up", "the test")
    made = source.build(source.options(modules=3), Path(), 0)
    for task in (made.task(n) for n in range(made.size)):
        [(file, tests)] = task.metadata["tests"]["files"].items()
        module = file.removeprefix("test_")
        mistaken, checks = task.input["workspace"]["files"][module], tests.partition("\n\n")[2]
        failing = [f"{file}::{name}" for name, passed in outcomes(mistaken, checks).items() if not passed]
        assert failing == task.metadata["tests"]["fail_to_pass"] != []
        assert any(all(outcomes(text, checks).values()) for text, *_ in edits(mistaken) if compiles(text))


def compiles(text: str) -> bool:
    try:
        compile(text, "module", "exec")
    except SyntaxError:
        return False
    return True


async def test_a_repair_earns_one_and_nothing_earns_nothing(
    tasks: dict[str, list[Task]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rule: Any = grading.tests_pass(grading.TestsPassOptions(), None)
    task = tasks["eval"][0]
    for code, expected in ((None, 0.0), (MODULES[module_of(task)][0], 1.0)):
        made = Workspaces(WorkspaceSection(), tmp_path).create(task_source(task.input), tmp_path / str(expected))
        if code is not None:
            (made.path / f"{module_of(task)}.py").write_text(code)
        [reward] = await rule(make.episode(result={"text": "", "diff": made.diff()}, task=task))
        assert reward.value == expected
