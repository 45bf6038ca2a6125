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

from agl_core.capture import Recording
from agl_core.client.agent import AgentContext, AttemptEnd, TaskPerAttempt, closing, crashed
from agl_core.client.local import choose_runner
from agl_core.client.processes import CommandPerAttempt, ProcessPerAttempt
from agl_core.client.worker import LightningClient, RefusedError, Runner
from agl_core.config.models import AgentSection, UntrainedConfig, WorkerSection
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Ending, Mode, Task, ToolResult
from agl_core.wire import (
    CLOSE,
    MAX_BODY,
    MAX_DEPTH,
    MAX_RESULT,
    MAX_VALUES,
    CloseRequest,
    Lease,
    RewardReport,
)
from agl_server.testing import until

from .road import as_tasks, ask

HERE = Path(__file__).parent


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
    for (ending, error), (rollout, attempt) in zip(expected.values(), ended, strict=True):
        assert (rollout.ending, attempt.attempt) == (ending, 0)
        assert error in attempt.error
    assert "context.base_url" in ended[1][1].error, "the other way out of it"


@pytest.mark.timing
@pytest.mark.parametrize("workplace", [{"timeout": 6.0, "attempts": 1}], indirect=True)
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
    assert "did not end when cancelled and was abandoned." in caplog.text
    release.set()
    assert await asyncio.to_thread(refused.wait, 20)
    [stuck] = await workplace.stack.store.attempts("stuck")
    calls = await workplace.stack.store.calls([stuck.key])
    assert [c.request["messages"][0]["content"] for c in calls if not c.late] == ["hi"]


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


async def test_an_agent_that_has_ended_is_not_cancelled_any_more(workplace: Any) -> None:
    ended = asyncio.Event()

    async def agent(task_input: Any, context: AgentContext) -> str:
        ended.set()
        return "done"

    running = asyncio.create_task(as_tasks(agent).run(await workplace.lease(), "", Recording()))
    await ended.wait()
    running.cancel()
    assert await running == AttemptEnd(Ending.FINISHED, "done")


# Attempts run as tasks or in processes; an agent for which that is the wrong place is named.


@pytest.mark.parametrize("is_busy", [False, True], ids=["it blocks", "the machine is busy"])
async def test_an_agent_that_blocks_the_event_loop_is_told_once_with_what_to_set(
    workplace: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    flag = tmp_path / "go on"
    monkeypatch.setattr("agl_core.client.agent._MAX_BLOCKED", 0.2)
    if is_busy:  # All time that passes, others had the CPU.
        monkeypatch.setattr("agl_core.client.agent._seconds_without_cpu", time.monotonic)
    config = UntrainedConfig(config_version=1, folder=HERE, agent=AgentSection(entry="isolated_agents:block"))
    runner = choose_runner(config, Plugins(), workplace.stack.server.base_url)
    with caplog.at_level(logging.WARNING):
        worker = workplace.start(runner, concurrency=1)
        finishing = asyncio.create_task(workplace.finish(worker, [str(flag), ""]))
        await asyncio.sleep(1)
        flag.touch()
        ended = await finishing
        if not is_busy:
            await until(lambda: "blocked the worker's event loop" in caplog.text)

    assert [rollout.ending for rollout, _ in ended] == [Ending.FINISHED] * 2
    assert [attempt.result for _, attempt in ended] == [os.getpid()] * 2, "nothing moves by itself"
    warnings = [message for message in caplog.messages if "blocked the worker's event loop" in message]
    assert ["set [workers] isolation = 'process'" in warning for warning in warnings] == [True] * (not is_busy)


@pytest.mark.parametrize(
    ("agent", "workers", "runner"),
    [
        ({"entry": "isolated_agents:block"}, {}, TaskPerAttempt),
        ({"entry": "isolated_agents:block"}, {"isolation": "process"}, ProcessPerAttempt),
        ({"entry": "isolated_agents:block"}, {"memory_mib": 512}, ProcessPerAttempt),
        ({"entry": "isolated_agents:solve"}, {}, ProcessPerAttempt),
        ({"command": "python agent.py"}, {}, CommandPerAttempt),
    ],
)
def test_only_async_agents_without_a_limit_of_memory_are_tasks(agent: Any, workers: Any, runner: type[Runner]) -> None:
    sections = {"agent": AgentSection(**agent), "workers": WorkerSection(**workers)}
    config = UntrainedConfig(config_version=1, folder=HERE, **sections)
    assert type(choose_runner(config, Plugins(), "http://127.0.0.1:9")) is runner


# An agent may leave behind more than a report can carry: its attempt ends all the same.


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def recording_of(*tool_results: ToolResult) -> Recording:
    recording = Recording()
    for tool_result in tool_results:
        recording.tool_result(tool_result)
    return recording


def as_the_server_reads(request: CloseRequest) -> CloseRequest:
    """The report as the server reads it."""
    body = request.model_dump_json().encode()
    assert len(body) <= MAX_BODY
    return CloseRequest.model_validate_json(body)


@pytest.mark.parametrize("workplace", [{"timeout": 250.0}], indirect=True)
async def test_a_result_that_is_too_large_or_too_deep_is_a_crash_that_names_the_limit(workplace: Any) -> None:
    async def agent(task_input: Any, context: AgentContext) -> Any:
        await ask(context)
        return {
            "large": "x" * (9 << 20),
            "many": [0] * (MAX_VALUES // 2 + 1),
            "deep": nested(210),
            "deeper": nested(400),
            "no JSON": {"object": object()},
            "most": nested(MAX_DEPTH),
            "half a surrogate pair": {"a\ud83c": ["🌍", "\ud83c"]},
        }[task_input]

    ended = await workplace.run(agent, ["large", "many", "deep", "deeper", "no JSON", "most", "half a surrogate pair"])
    assert [rollout.ending for rollout, _ in ended] == [*[Ending.CRASHED] * 5, *[Ending.FINISHED] * 2]
    assert {attempt.attempt for _, attempt in ended} == {0}, "none was tried again"
    large, many, deep, deeper, no_json, most, half = (attempt for _, attempt in ended)
    assert f"{(9 << 20) + 2} bytes of JSON, and {MAX_RESULT} are the limit" in large.error
    assert f"{MAX_VALUES // 2 + 1} JSON values, and {MAX_VALUES // 2} are the limit" in many.error
    assert f"nested 210 deep, and {MAX_DEPTH} is the limit" in deep.error
    assert f"nested 400 deep, and {MAX_DEPTH} is the limit" in deeper.error
    assert "what is not JSON (Object of type object is not JSON serializable); return a string" in no_json.error
    assert half.result == {"a\ufffd": ["🌍", "\ufffd"]}
    assert most.result == nested(MAX_DEPTH)


async def test_a_client_says_so_before_it_sends_what_the_server_would_not_read() -> None:
    lease = Lease(
        rollout="r", attempt=0, task_id="t", task_input=None, task_split="train", mode=Mode.TRAIN, path="", key="k",
        secret="s", timeout=9, heartbeat=1,
    )  # fmt: skip
    async with LightningClient("http://127.0.0.1:9", "key") as client:
        with pytest.raises(RefusedError, match=r"are the limit"):
            await client.ask(CLOSE, CloseRequest(ending=Ending.LOST, error="x" * MAX_BODY), lease)


@pytest.mark.parametrize(
    "hard",
    [
        make.tool_result("a", result=nested(198)),
        make.tool_result("a", result=nested(240), arguments=nested(230)),
        make.tool_result("a", result="\ud800"),
        make.tool_result("a", result={"\ud800": ["\ud800"]}),
        make.tool_result("a", result=1, tool="\ud800", agent="\ud800", error="\ud800"),
        make.tool_result("a", result=1, error="\x01" * (9 << 20)),
        make.tool_result("a", result=1, tool="t" * (9 << 20)),
        make.tool_result("a", result=list(range(2_000_000))),
        make.tool_result("a", result={str(number): nested(12) for number in range(50_000)}),
    ],
    ids=range(9),
)
def test_whatever_an_tool_result_has_in_it_the_others_are_reported_with_it(hard: ToolResult) -> None:
    request = as_the_server_reads(
        closing(
            AttemptEnd(Ending.FINISHED, "done"),
            recording_of(make.tool_result("first", result=1), hard, make.tool_result("last", result={"b": 2})),
        )
    )
    assert (request.ending, request.result) == (Ending.FINISHED, "done")
    assert [result.id for result in request.tool_results] == ["first", "a", "last"]
    assert [result.result for result in request.tool_results[::2]] == [1, {"b": 2}]


def test_the_largest_of_many_tool_results_are_cut() -> None:
    many = [make.tool_result(f"o{number}", result=f"{number} " + "x" * 50_000) for number in range(200)]
    recording = recording_of(*many, make.tool_result("small", "c1", result="as it is"))
    request = as_the_server_reads(closing(AttemptEnd(Ending.FINISHED), recording))
    *large, small = request.tool_results
    assert (small.id, small.result, small.tool_call_id) == ("small", "as it is", "c1")
    assert [result.id for result in large] == [f"o{number}" for number in range(200)]
    assert all(result.result.startswith(f"{number} x") for number, result in enumerate(large))
    assert all(result.result.endswith(" more characters)") for result in large)
    assert any("the largest values were cut" in problem for problem in recording.problems)


def test_what_has_no_room_at_all_is_left_out_and_counted_as_a_problem() -> None:
    names = dict.fromkeys(
        ("tool_call_id", "tool", "agent", "span", "parent_span", "adapter", "status_rule"), "n" * 2000
    )
    recording = recording_of(*(make.tool_result(str(number), **names) for number in range(1_500)))
    for number in range(1_500):
        recording.reward(RewardReport(name=str(number), value=1))
    request = as_the_server_reads(closing(AttemptEnd(Ending.FINISHED, 1.0), recording))
    kept = [str(number) for number in range(len(request.rewards))]
    assert 300 < len(kept) < 1_500
    assert [report.id for report in request.tool_results] == [report.name for report in request.rewards] == kept
    assert any("only the first ones are kept" in problem for problem in recording.problems)


def test_errors_are_reported_whatever_they_say() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    for error in (ValueError("\ud800" + "e" * (9 << 20)), OddError()):
        request = as_the_server_reads(closing(crashed(error), Recording()))
        assert request.ending is Ending.CRASHED
        assert request.error.startswith(f"{type(error).__name__}: ")
        assert len(request.error) < 70_000
    request = as_the_server_reads(closing(AttemptEnd(Ending.LOST, error="\x01" * (9 << 20)), Recording()))
    assert "more characters" in (request.error or "")
