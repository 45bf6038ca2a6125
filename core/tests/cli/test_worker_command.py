"""`agl worker` where there is nothing but the agent: no engine, no algorithm, no rewards, no weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from running_servers import run_worker
from typer.testing import CliRunner

from agl_core.cli import app
from agl_core.errors import ConfigError
from agl_core.testing import episodes as make
from agl_core.testing.scripts import Say
from agl_core.testing.server import running_stack
from agl_core.types import Ending, Task
from agl_core.wire import WORKER_KEY

AGENT = """
import json, os
import httpx

def solve(task_input):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = {"model": "m", "messages": [{"role": "user", "content": task_input["question"]}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=60, trust_env=False).raise_for_status().json()
    return answer["choices"][0]["message"]["content"]

if __name__ == "__main__":
    print(json.dumps(solve(json.loads(os.environ["AGL_TASK"]))))
"""

CONFIG: dict[str, Any] = {
    "config_version": 1,
    "agent": {"entry": "an_agent:solve"},
    "tasks": {"train": {"source": "absent"}},
    "policies": {"default": {"model": {"path": "./absent"}}},
    "rewards": {"absent": {"weight": 1.0}},
    "credit": {"name": "absent"},
    "algorithm": {"name": "absent", "absent": {"epochs": 2}},
    "engine": {"name": "absent"},
    "trackers": {"absent": {}},
}
"""Of a run whose plugins and weights are on the trainer's machine alone."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["train.toml"],
        ["train.toml", "--command", f"{sys.executable} an_agent.py"],
        ["--command", f"{sys.executable} an_agent.py", "--concurrency", "2"],
        ["--entry", "an_agent:solve"],
    ],
    ids=["of a configuration", "another than the configuration's", "a command alone", "an entry alone"],
)
async def test_a_worker_needs_the_agent_and_nothing_that_trains(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "an_agent.py").write_text(AGENT)
    (tmp_path / "train.toml").write_text(tomli_w.dumps(CONFIG))
    async with running_stack() as stack:
        stack.upstream.script(Say("four"))
        rollout = make.rollout("r", task=Task("t", {"question": "2 + 2?"}))
        key = {WORKER_KEY: stack.server.worker_key}
        attempt = await run_worker(stack, rollout, tmp_path, *arguments, **key)
        [call] = await stack.calls(attempt.key)
    assert (attempt.ending, attempt.result) == (Ending.FINISHED, "four")
    assert call.request["messages"][0]["content"] == "2 + 2?"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "Name the run's configuration or its folder"),
        (["--server", "http://127.0.0.1:1"], "either --entry or --command"),
        (["--entry", "a:b"], "Only with --server"),
        (["--server", "http://127.0.0.1:1", "--entry", "a:b", "--set", "seed=1"], "without --set"),
        (["--server", "http://127.0.0.1:1", "--entry", "a:b", "--command", "c"], "--entry or --command.*not both"),
        (["--server", "http://127.0.0.1:1", "--entry", "ab"], "--entry or --command.*'module:function'"),
    ],
)
def test_what_a_worker_lacks_is_said(arguments: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        CliRunner().invoke(app, ["worker", *arguments], catch_exceptions=False)
