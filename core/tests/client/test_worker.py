"""Workers run agents of every kind and temper, each in its place, and each attempt ends as a typed record."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from agl_core.capture import Recording, record_tool_result, reward, tool_result_report
from agl_core.config.models import AgentSection, UntrainedConfig, WorkerSection
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.testing.server import until
from agl_core.types import Ending, Mode, Task, ToolStatus
from agl_core.wire import Assignment
from agl_core.worker.agent import Agent, AgentContext, Ended, TaskPerAttempt
from agl_core.worker.commands import CommandPerAttempt
from agl_core.worker.processes import ProcessPerAttempt
from agl_core.worker.worker import Runner, choose_runner

from .road import ask

QUICK = pytest.mark.parametrize("workplace", [{"timeout": 6.0, "attempts": 1}], indirect=True)


async def test_whatever_an_agent_does_ends_its_attempt_with_a_type_and_is_not_tried_again(workplace: Any) -> None:
    results = {"an object": object(), "no number": float("nan")}

    async def agent(task_input: Any, context: AgentContext) -> Any:
        if task_input != "no call":
            await ask(context)
        if task_input == "an error":
            raise KeyError("city")
        return results.get(task_input)

    expected = {
        "an error": (Ending.CRASHED, "KeyError: 'city' (test_worker.py:"),
        "no call": (Ending.NO_CALL, "OPENAI_BASE_URL"),
        **dict.fromkeys(results, (Ending.CRASHED, "the agent returned")),
    }
    ended = await workplace.run(agent, list(expected))
    for (ending, error), (rollout, attempt) in zip(expected.values(), ended.values(), strict=True):
        assert (rollout.ending, attempt.attempt) == (ending, 0)
        assert error in attempt.error


@pytest.mark.timing
@QUICK
async def test_agents_whose_time_is_up_are_cancelled_and_others_go_on(
    workplace: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot be ended is named in the log, and its late call refused."""
    cancelled, release, refused = threading.Event(), threading.Event(), threading.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        answer = await ask(context)
        if task_input == "slow":
            try:
                await asyncio.sleep(3600)
            finally:
                cancelled.set()
        while task_input == "stuck" and not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)
        if task_input == "stuck":
            try:
                await ask(context, "too late")
            except openai.APIStatusError:
                refused.set()
        return answer

    queue = workplace.stack.server.queue
    workplace.start(agent)
    names = ["slow", "stuck", "quick"]
    await queue.enqueue([make.rollout(name, task=Task(name, name)) for name in names])
    done = [rollout for name in names for rollout in await queue.done([name])]
    assert [rollout.ending for rollout in done] == [Ending.TIMED_OUT, Ending.TIMED_OUT, Ending.FINISHED]
    assert cancelled.is_set()
    assert "did not end when cancelled and was abandoned (1 so far)" in caplog.text
    release.set()
    assert await asyncio.to_thread(refused.wait, 20)
    [stuck] = await workplace.stack.store.attempts("stuck")
    calls = await workplace.stack.store.calls([stuck.key])
    assert [c.request["messages"][0]["content"] for c in calls if not c.late] == ["hi"]


async def test_rewards_and_tool_results_come_with_the_attempt_that_reported_them(workplace: Any) -> None:
    async def agent(task_input: Any, context: AgentContext) -> float:
        await ask(context)
        reward(task_input, name="style")
        record_tool_result(tool_result_report("o1", "lookup", ValueError(task_input), tool_call_id="call_1"))
        await asyncio.sleep(0)
        return task_input / 2

    ended = await workplace.run(agent, [1.0, 2.0, 3.0])
    for i, (_, attempt) in ended.items():
        rewards = await workplace.stack.store.rewards([attempt.key])
        assert {(r.name, r.value, r.source) for r in rewards} == {
            ("style", i + 1.0, "agent"),
            ("result", (i + 1.0) / 2, "agent"),
        }
        [tool_result] = await workplace.stack.store.tool_results([attempt.key])
        assert (tool_result.tool, tool_result.tool_call_id) == ("lookup", "call_1")
        assert (tool_result.status, tool_result.error) == (ToolStatus.ERROR, f"ValueError: {i + 1.0}")


async def test_stopping_a_worker_cancels_what_it_runs(workplace: Any) -> None:
    started = threading.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        await ask(context)
        started.set()
        await asyncio.sleep(3600)
        return "never"

    worker = workplace.start(agent)
    await workplace.stack.server.queue.enqueue([make.rollout("w0")])
    assert await asyncio.to_thread(started.wait, 20)
    begun = time.monotonic()
    await worker.stop()
    assert not worker.alive
    assert time.monotonic() - begun < 20
    [rollout] = await workplace.stack.server.queue.done(["w0"])
    assert rollout.ending is Ending.CANCELLED


async def test_an_agent_that_has_ended_is_not_cancelled_any_more() -> None:
    ended = asyncio.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        ended.set()
        return "done"

    assignment = Assignment(
        rollout="w0", attempt=0, task_id="t", task_input=None, task_split="train", mode=Mode.TRAIN, path="", key=""
    )
    running = asyncio.create_task(
        TaskPerAttempt(Agent("test:agent", agent, True, True)).run(assignment, "", Recording())
    )
    await ended.wait()
    running.cancel()
    assert await running == Ended(Ending.FINISHED, "done")


# Attempts run as tasks or in processes; an agent for which that is the wrong place is named.


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
