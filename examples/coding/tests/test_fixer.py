"""The fixer: what its tools say and change, and a bug that it repairs in the sandbox and is rewarded for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fixer import DONE

from agl_core.client.local import WorkerThread, choose_runner
from agl_core.config.load import load
from agl_core.learning.rewards import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.testing.scripts import CallTools
from agl_core.types import Ending
from agl_server.testing import running_stack

FILE = Path(__file__).parents[1] / "train.toml"


@pytest.mark.parametrize(
    ("label", "new", "line"),
    [
        ("L1", "<=", "L1 if a <= 10:"),
        ("L1", "11", "L1 if a < 11:"),
        ("L2", "*", "L2 return b[1] * max(c, 2) - 3"),
        ("L2", "min", "L2 return b[1] + min(c, 2) - 3"),
        ("L1", "+", ""),
        ("L1", "!", ""),
        ("L1", "<", ""),
        ("L9", "+", ""),
        ("L0", "+", ""),
        ("L", "+", ""),
    ],
)
def test_an_edit_takes_the_place_of_the_first_of_its_kind_or_is_refused(
    label: str, new: str, line: str, tmp_path: Path
) -> None:
    (tmp_path / "module.py").write_text(text := "if a < 10:\n    return b[1] + max(c, 2) - 3\n")
    command = [sys.executable, FILE.with_name("edit.py"), label, new]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode == 0, done.stdout.strip()) == (bool(line), line)
    assert ((tmp_path / "module.py").read_text() == text) is not bool(line)


async def test_a_bug_is_found_repaired_and_rewarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = load(FILE)
    source = config.tasks["eval"].build(config.config.folder, 0)
    task = next(task for task in map(source.task, range(12)) if "points > 70" in str(task.input))
    commands = ["python3 check.py", "python3 edit.py L10 '>='", "python3 check.py", f"echo {DONE}"]
    async with running_stack(timeout=60) as stack:
        stack.upstream.script(*(CallTools([("bash", json.dumps({"command": command}))]) for command in commands))
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
