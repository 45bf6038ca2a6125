"""A run of one training step as it was recorded, worked out by hand, and `agl` as a user runs it: in real processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from agl_command import agl_in_process, working_folder  # noqa: F401
from testing_aids import write_store
from typer.testing import CliRunner, Result

from agl_core.learning.transitions import build_episode
from agl_core.store import Record
from agl_core.testing import episodes as make
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import (
    Attempt,
    Call,
    Ending,
    Episode,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Task,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)
from agl_server.store.sqlite import SqliteStore

RULES = '''
import agl_core
from agl_core.types import Reward

@agl_core.reward_rule
def right(episode, *, bonus: float = 0.0):
    """1 if the answer is right."""
    return float(episode.result == episode.task.metadata["answer"]) + bonus

@agl_core.reward_rule
def tools(episode, *, worth: float = 0.25):
    """Rewards of tool results."""
    return [
        Reward(episode.rollout, episode.attempt, o.tool, worth if o.status == "ok" else -worth, "", t.key.call)
        for t in episode.transitions for o in t.tool_results
    ]

@agl_core.reward_rule
def shaky(episode):
    """Fails on one rollout."""
    if episode.member == 1:
        raise KeyError("score")
    return 0.0

@agl_core.group_reward_rule
def shortest(episodes):
    """1 for the shortest answer of the group."""
    least = min(len(episode.result) for episode in episodes)
    return [float(len(episode.result) == least) for episode in episodes]

@agl_core.credit_rule(kind=agl_core.CreditKind.RETURN)
def torn(episodes):
    """Fails."""
    raise IndexError("no such place")

@agl_core.hookimpl
def register_components(register):
    takes = {agl_core.CreditKind.RETURN, agl_core.CreditKind.ADVANTAGE}
    register(agl_core.kinds.ALGORITHM, "plain", lambda options: None, takes=takes)
    register(agl_core.kinds.ENGINE, "idle", lambda options, context: None, provides={agl_core.Capability.TOKEN_IDS})
'''

CONFIG: dict[str, Any] = {
    "config_version": 1,
    "name": "calc",
    "plugins": ["trial_rules.py"],
    "agent": {"entry": "my_agent:solve"},
    "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
    "policies": {"default": {"model": {"path": "weights"}}},
    "algorithm": {"name": "plain"},
    "engine": {"name": "idle"},
    "rewards": {"right": {}, "tools": {"worth": 0.25}},
}

ENDS = {"m0": ("42", "ok", 1.0, 0.25), "m1": ("7", "error", 0.0, -0.25), "m2": ("42", "error", 1.0, -0.25)}
"""The answer of each member, what its tool did, and its two rewards."""


@dataclass(frozen=True)
class RecordedRun:
    """A folder with `train.toml` and the run `runs/calc`."""

    folder: Path

    @property
    def store(self) -> Path:
        return self.folder / "runs" / "calc" / "store.sqlite"

    def write(self, name: str, **changes: Any) -> str:
        (self.folder / name).write_text(tomli_w.dumps({**CONFIG, **changes}))
        return name

    def planned(self, step: int, member: str, **changes: Any) -> Rollout:
        task = Task("t1", "6 * 7", metadata={"answer": "42"})
        rollout = Rollout(f"s{step}-g0-{member}", "calc", 0, f"s{step}-g0", task, Mode.TRAIN, step, int(member[1:]))
        return replace(rollout, **changes)

    def trained(self, step: int, member: str) -> list[Record]:
        """One rollout of two calls with a tool between them, and what training made of it (credit rule: identical)."""
        answer, status, right, tools = ENDS[member]
        rollout = self.planned(step, member, state=RolloutState.DONE, counted_attempt=0, ending=Ending.FINISHED)
        key = rollout.id
        function = {"name": "look", "arguments": "{}"}
        fields = {"tool_calls": [{"id": f"{key}-t", "type": "function", "function": function}]}
        return [
            rollout,
            Attempt(key, 0, "w", 0.0, 1.0, Ending.FINISHED, result=answer),
            call(key, 0, {"role": "assistant", "content": None, **fields}, prompt=[1, 2, 3]),
            # What the prompt of the second call says depends on what the tool did.
            call(key, 1, {"role": "assistant", "content": answer}, prompt=[1, 2, 3, 4 if answer == "42" else 5]),
            ToolResult(f"{key}-o", key, 0, "look", ToolStatus(status), f"{key}-t"),
            Reward(key, 0, "right", right, "right"),
            Reward(key, 0, "look", tools, "tools", call=f"{key}-c0"),
            *(TrainingRecord(key, 0, f"{key}-c{n}", 0, step, right + tools, 0.0, 1.0) for n in (0, 1)),
        ]

    def put(self, *records: Record, to: Path | None = None) -> None:
        write_store(to or self.store, *records)

    def agl(self, *arguments: str) -> Result:
        """Run a command here; errors that agl raises on purpose are the result's exception."""
        from agl_core.cli import app

        return CliRunner(env={"COLUMNS": "160"}).invoke(app, list(arguments))


@dataclass
class Bench:
    """`agl run` as a user runs it: a real process, in a folder of its own, in front of a scripted upstream."""

    folder: Path
    upstream: ScriptedUpstream

    def script(self, name: str, code: str) -> Path:
        file = self.folder / name
        file.write_text(textwrap.dedent(code))
        return file

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "OTEL_", "AGL_"))}
        return {**kept, "OPENAI_AGENTS_DISABLE_TRACING": "1", **variables}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-c", "from agl_core.cli import main; main()", *arguments]

    def agl(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            cwd=self.folder,
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """agl run --upstream … -- COMMAND"""
        return self.agl("run", "--upstream", self.upstream.url, "--", *command, **variables)

    def recorded(self, name: str = "capture") -> tuple[Rollout, Attempt, Episode]:
        """The one rollout of a run."""

        async def read() -> tuple[Rollout, Attempt, Episode]:
            async with SqliteStore(self.folder / "runs" / name / "store.sqlite", read_only=True) as store:
                [rollout] = await store.rollouts()
                [attempt] = await store.attempts(rollout.id)
                keys = [attempt.key]
                episode = build_episode(
                    rollout, attempt, await store.calls(keys), await store.tool_results(keys), await store.rewards(keys)
                )
                return rollout, attempt, episode

        return asyncio.run(read())


@pytest.fixture
def running(working_folder: Path) -> Iterator[Bench]:  # noqa: F811
    with ScriptedUpstream() as upstream:
        yield Bench(working_folder, upstream)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    recorded = RecordedRun(tmp_path)
    (tmp_path / "trial_rules.py").write_text(RULES)
    (tmp_path / "tasks.jsonl").write_text('{"input": "6 * 7"}\n')
    (tmp_path / "weights").mkdir()
    (tmp_path / "runs" / "calc").mkdir(parents=True)
    recorded.write("train.toml")
    recorded.write("runs/calc/config.toml", folder=str(tmp_path))
    monkeypatch.chdir(tmp_path)
    recorded.put(
        Run("calc", 0, 0.0, {**CONFIG, "rewards": {"right": {"weight": 1.0}, "tools": {"weight": 1.0}}}),
        *(record for member in ENDS for record in recorded.trained(1, member)),
    )
    return recorded


def call(rollout: str, sequence: int, message: dict[str, Any], prompt: list[int]) -> Call:
    ids, logprobs = np.array([7, 8], np.int32), np.array([-0.5, -0.5], np.float32)
    return make.call(
        sequence,
        make.choice(message=message, response_ids=ids, logprobs=logprobs),
        rollout=rollout,
        version=0,
        request={"messages": [{"role": "user", "content": "6 * 7"}]},
        started=0.0,
        ended=1.0,
        agent="solver",
        prompt_ids=np.array(prompt, np.int32),
        effective=Sampling(temperature=1.0),
    )
