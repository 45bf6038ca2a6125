"""A program that nobody changed works on a task: from its prompt to its patch, and to the reward by hidden tests."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_core.client.local import WorkerThread, choose_runner
from agl_core.config.models import UntrainedConfig
from agl_core.errors import AgentError
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Say
from agl_core.types import Ending, Task
from agl_core.wire import Assignment
from agl_harnesses import grading
from agl_harnesses.harness import CommandOptions, command_harness, prompt_of
from agl_server.testing import running_stack

PROGRAM = """
import json, os, sys, urllib.request

model, prompt, _ = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60)
code = json.load(reply)["choices"][0]["message"]["content"]
with open("shop.py", "w") as file:
    file.write(code)
with open(os.path.join(os.environ["HOME"], "settings")) as file:
    print("wrote shop.py in", sys.argv[3], os.environ["GREETING"], file.read())
assert os.path.samefile(sys.argv[3], os.getcwd())
"""
TESTS = "import shop\n\ndef test_total():\n    assert shop.total([2, 3]) == 5\n"
RIGHT = "def total(prices):\n    return sum(prices)\n"

bubblewrap = pytest.param(
    "bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
)


@pytest.mark.parametrize("runner", ["plain", bubblewrap])
async def test_a_program_solves_a_task_in_its_workspace(runner: str, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "shop.py").write_text("def total(prices):\n    return 0\n")
    options = {
        "command": [sys.executable, "-c", PROGRAM, "{model}", "{prompt}", "{workspace}"],
        "files": {"settings": "{model} at {origin}"},
    }
    variables = {"GREETING": "hi", "HOME": "/nowhere"}
    workspace = {"folder": "shop", "runner": runner, "variables": variables}
    if runner == "bubblewrap":
        workspace["mount"] = "/app"
    agent = {"harness": "command", "options": options}
    tables: dict[str, Any] = {"folder": tmp_path, "agent": agent, "workspace": workspace}
    config = UntrainedConfig.model_validate({"config_version": 1, **tables})
    metadata = {"tests": {"files": {"test_shop.py": TESTS}, "fail_to_pass": ["test_shop.py::test_total"]}}
    task = Task("t", {"prompt": "Repair {key}: -total", "workspace": {"folder": "shop"}}, metadata=metadata)
    async with running_stack(timeout=120) as stack:
        stack.upstream.script(Say(RIGHT))
        server = stack.server
        await server.queue.enqueue([make.rollout("r", task=task)])
        runs = choose_runner(config, Plugins.load(), server.base_url)
        assert 4 <= runs.default_concurrency <= 4 * (os.cpu_count() or 1), "four for each core that it may use"
        worker = WorkerThread(runs, base_url=server.base_url, worker_key=server.worker_key, concurrency=1)
        worker.begin()
        [rollout] = await server.queue.done(["r"])
        await worker.stop()
        [attempt] = await stack.store.attempts("r")
        [call] = await stack.calls(attempt.key)
    assert (attempt.ending, attempt.error) == (Ending.FINISHED, None)
    place, _, settings = attempt.result["text"].removeprefix("wrote shop.py in ").partition(" hi ")
    assert (place == "/app") == (runner == "bubblewrap")
    assert settings == f"agl at {server.base_url}/rollout/r/attempt/0"
    assert call.request["messages"] == [{"role": "user", "content": "Repair {key}: -total"}]
    assert "+    return sum(prices)" in attempt.result["diff"]
    episode = make.episode(result=attempt.result, task=rollout.task)
    rule: Any = grading.tests_pass(grading.TestsPassOptions(), config)
    [reward] = await rule(episode)
    assert reward.value == 1.0


@pytest.mark.parametrize("runner", [bubblewrap])
async def test_a_program_finds_its_interpreter_in_the_sandbox(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As node lies elsewhere than what npm installs, and neither in /usr."""
    for folder in ("node", "npm", "attempt"):
        (tmp_path / folder / "bin").mkdir(parents=True)
    shutil.copy(str(shutil.which("sh")), tmp_path / "node" / "bin" / "node-like")
    program = tmp_path / "npm" / "bin" / "program"
    program.write_text("#!/usr/bin/env node-like\necho started by $0\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'npm/bin'}:{tmp_path / 'node/bin'}:{os.environ['PATH']}")
    tables: Any = {"workspace": {"runner": runner}}
    config = UntrainedConfig.model_validate({"config_version": 1, "folder": tmp_path, **tables})
    harness = command_harness(CommandOptions(command=("program",)), config)
    fields: Any = {"mode": "train", "path": "/r", "key": "K", "task_split": "train", "task_id": "t", "task_input": ""}
    assignment = Assignment.model_validate({"rollout": "r", "attempt": 0, **fields})
    async with harness.launch(assignment, "http://127.0.0.1:9999", tmp_path / "attempt") as launch:
        process = await asyncio.create_subprocess_exec(*launch.command, cwd=launch.folder, stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
    assert printed.decode() == f"started by {program}\n"


def test_a_prompt_is_a_text_or_is_missed_by_name() -> None:
    assert prompt_of("Fix it.") == prompt_of({"prompt": "Fix it.", "more": 1}) == "Fix it."
    for wrong in ({"question": "2 + 2?"}, " ", {"prompt": 5}, None, "nul\0"):
        with pytest.raises(AgentError, match="an object with 'prompt'"):
            prompt_of(wrong)


def test_a_program_that_is_not_installed_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    config = UntrainedConfig.model_validate({"config_version": 1, "agent": {"harness": "mini-swe-agent"}})
    with pytest.raises(AgentError, match=r"no program 'mini' to run\. Install it: pipx install mini"):
        choose_runner(config, Plugins.load(), "http://127.0.0.1:1")
