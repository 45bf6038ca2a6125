"""The fixer: what its tools say and change, and a bug that it repairs in the sandbox and is rewarded for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fixer import edited

from agl_core.client.local import WorkerThread, choose_runner
from agl_core.config.load import load
from agl_core.learning.rewards import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Ending
from agl_server.testing import running_stack

FILE = Path(__file__).parents[1] / "train.toml"


@pytest.mark.parametrize(
    ("line", "old", "new", "answer"),
    [
        (1, "<", "<=", "L1 if a <= 10:"),
        (1, "10", "11", "L1 if a < 11:"),
        (1, "1", "2", "error: L1 has no 1"),
        (1, "=", "!", "error: L1 has no ="),
        (2, "", "x", "error: L2 has no "),
        (9, "a", "b", "error: L9 has no a"),
    ],
)
def test_an_edit_replaces_a_whole_word_or_operator_or_is_an_error(line: int, old: str, new: str, answer: str) -> None:
    text = "if a < 10:\n    return b[1] >= 2\n"
    changed, said = edited(text, line, old, new)
    assert said == answer
    assert (changed == text) is answer.startswith("error")


async def test_a_bug_is_found_repaired_and_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load(FILE)
    source = config.tasks["eval"].build(config.config.folder, 0)
    task = next(task for task in map(source.task, range(12)) if "points > 70" in str(task.input))
    edit = json.dumps({"line": "L10", "old": ">", "new": ">="})
    async with running_stack(timeout=60) as stack:
        tools = [CallTools([(name, arguments)]) for name, arguments in (("test", "{}"), ("edit", edit), ("test", "{}"))]
        stack.upstream.script(*tools, Say("Done."))
        server = stack.server
        await server.queue.enqueue([make.rollout("r", task=task)])
        runs = choose_runner(config.config, Plugins.load(), server.base_url)
        worker = WorkerThread(runs, base_url=server.base_url, worker_key=server.worker_key, concurrency=1)
        worker.begin()
        await server.queue.done(["r"])
        await worker.stop()
        [attempt] = await stack.store.attempts("r")
        calls = await stack.calls(attempt.key)
    assert (attempt.ending, attempt.error) == (Ending.FINISHED, None)
    said = [message["content"] for message in calls[-1].request["messages"] if message["role"] == "tool"]
    failure = "\n".join(
        [
            'error: assert grade(70) == "B" and grade(69) == "C"',
            "L8 if points >= 90:",
            "L10 if points > 70:",
            "L12 return 'C'",
        ]
    )
    assert said == [failure, "L10 if points >= 70:", "all tests pass"]
    rules = [ScoringRule(name, chosen.build(config.config), 1.0) for name, chosen in config.rewards.items()]
    scored, errors = await score(make.episode(result=attempt.result, task=task), rules, {Ending.FINISHED: "score"})
    assert (scored.terminal, errors) == (1.0, [])
