"""Where attempts run: as tasks or in processes; and an agent for which that is the wrong place."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from agl_core.config.models import AgentSection, UntrainedConfig, WorkerSection
from agl_core.plugins import Plugins
from agl_core.testing.server import until
from agl_core.types import Ending
from agl_core.worker.agent import TaskPerAttempt
from agl_core.worker.commands import CommandPerAttempt
from agl_core.worker.processes import ProcessPerAttempt
from agl_core.worker.worker import Runner, choose_runner

AGENTS = """
import os, time
from pathlib import Path
import openai

async def solve(task, context):
    async with openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key) as client:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    while task and not Path(task).exists():
        time.sleep(0.02)
    return os.getpid()

def solve_slowly(task):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some_agents.py").write_text(AGENTS)
    return tmp_path


async def test_an_agent_that_blocks_the_event_loop_is_told_once_with_what_to_set(
    workplace: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = folder / "go on"
    config = UntrainedConfig(config_version=1, folder=folder, agent=AgentSection(entry="some_agents:solve"))
    runner = choose_runner(config, Plugins(), workplace.stack.server.base_url)
    with caplog.at_level(logging.WARNING):
        worker = workplace.start_runner(runner, concurrency=1)
        finishing = asyncio.create_task(workplace.finish(worker, [str(flag), ""]))
        await asyncio.sleep(4)
        flag.touch()
        ended = await finishing
        await until(lambda: "blocked the worker's event loop" in caplog.text)

    assert [rollout.ending for rollout, _ in ended.values()] == [Ending.FINISHED] * 2
    assert [attempt.result for _, attempt in ended.values()] == [os.getpid()] * 2, "nothing moves by itself"
    [warning] = [message for message in caplog.messages if "blocked the worker's event loop" in message]
    assert "set [workers] isolation = 'process'" in warning


@pytest.mark.parametrize(
    ("agent", "workers", "runner"),
    [
        ({"entry": "some_agents:solve"}, {}, TaskPerAttempt),
        ({"entry": "some_agents:solve"}, {"isolation": "process"}, ProcessPerAttempt),
        ({"entry": "some_agents:solve"}, {"memory_mib": 512}, ProcessPerAttempt),
        ({"entry": "some_agents:solve_slowly"}, {}, ProcessPerAttempt),
        ({"command": "python agent.py"}, {}, CommandPerAttempt),
    ],
)
def test_only_async_agents_without_a_limit_of_memory_are_tasks(
    folder: Path, agent: Any, workers: Any, runner: type[Runner]
) -> None:
    sections = {"agent": AgentSection(**agent), "workers": WorkerSection(**workers)}
    config = UntrainedConfig(config_version=1, folder=folder, **sections)
    assert type(choose_runner(config, Plugins(), "http://127.0.0.1:9")) is runner
