"""The type checker finds a builder that does not have the signature of its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

mypy = pytest.importorskip("mypy.api")

CODE = """
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

import agl_core
from agl_core import kinds
from agl_core.kinds import NoOptions, Register
from agl_core.protocols import Buffer, Engine, EngineContext, GroupRewardRule, TaskSource, Tracker
from agl_core.store.interface import Store
from agl_core.types import Episode, Task

class Options(BaseModel):
    size: int = 1

def need(options: Options) -> set[agl_core.Capability]: return set()
def brevity(episode: Episode) -> float: return 0.0
def credit(episodes: Sequence[Episode]) -> list[list[float]]: return []
def group(episodes: Sequence[Episode]) -> list[float]: return []

def engine(options: Options, context: EngineContext) -> Engine: ...
def store(options: NoOptions, folder: Path, read_only: bool = False) -> Store: ...
def source(options: NoOptions, folder: Path, seed: int) -> TaskSource: ...
def tracker(options: NoOptions, run_dir: Path) -> Tracker: ...
def buffer(options: Options) -> Buffer: ...
def number(options: NoOptions) -> int: ...

def right(register: Register) -> None:
    register(kinds.ENGINE, "a", engine, options=Options, needs=need, provides={agl_core.Capability.TOKEN_IDS})
    register(kinds.STORE, "a", store)
    register(kinds.TASK_SOURCE, "a", source)
    register(kinds.TRACKER, "a", tracker)
    register(kinds.BUFFER, "a", buffer, options=Options)
    register(kinds.REWARD, "a", lambda options: brevity)
    register(kinds.REWARD, "b", lambda options: GroupRewardRule(group))
    register(kinds.CREDIT, "a", lambda options: credit, yields=agl_core.CreditKind.RETURN)

def wrong(register: Register) -> None:
    register(kinds.ENGINE, "a", tracker)  # no context
    register(kinds.ENGINE, "a", engine)  # its options are not named
    register(kinds.ENGINE, "a", engine, options=NoOptions)  # other options
    register(kinds.STORE, "a", tracker)  # no `read_only`
    register(kinds.TASK_SOURCE, "a", store)  # not a source
    register(kinds.TRACKER, "a", number)  # no folder
    register(kinds.BUFFER, "a", number)  # not a buffer
    register(kinds.REWARD, "a", lambda options: credit)  # a credit rule
    register(kinds.ALGORITHM, "a", number)  # not an algorithm
    register(kinds.ADAPTER, "a", number)  # not an adapter

@agl_core.reward_rule
def text(episode: Episode) -> str: return ""  # not a reward

@agl_core.task_source
def inputs() -> list[str]: return []  # no tasks

@agl_core.endless_task_source()
def drawn(index: int, seed: int) -> str: return ""  # no task
"""


@pytest.mark.storm
def test_a_wrong_builder_of_any_kind_is_found(tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text(CODE)
    config = Path(__file__).parents[3] / "pyproject.toml"

    found, errors, _ = mypy.run(
        ["--config-file", str(config), "--no-error-summary", "--disable-error-code=empty-body", str(file)]
    )

    lines = CODE.splitlines()
    expected = {
        n
        for n, line in enumerate(lines, 1)
        if n > lines.index("def wrong(register: Register) -> None:") + 1 and "  # " in line
    }
    decorated = {n - 1 for n in expected if lines[n - 1].startswith("def ")}
    reported = {int(line.split(":")[1]) for line in found.splitlines() if ": error:" in line}
    assert errors == ""
    assert {n + 1 if n in decorated else n for n in reported} == expected, found
