"""An agent may leave behind more than a report can carry: its attempt ends all the same, typed."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core.capture import Recording, record_tool_result, tool_result_report
from agl_core.types import Ending, Mode, ToolResult, ToolStatus
from agl_core.wire import MAX_BODY, MAX_DEPTH, MAX_RESULT, CloseRequest, Lease, RewardReport
from agl_core.worker.agent import AgentContext, Ended, closing, crashed
from agl_core.worker.client import LightningClient, RefusedError

from .road import ask

PATIENT = pytest.mark.parametrize("workplace", [{"timeout": 250.0}], indirect=True)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def tool_result(id: str, result: Any, **fields: Any) -> ToolResult:
    defaults = {"rollout": "", "attempt": 0, "tool": "read", "status": ToolStatus.OK, "result": result}
    return ToolResult(**{"id": id, **defaults, **fields})


def recording_of(*tool_results: ToolResult) -> Recording:
    recording = Recording()
    for tool_result in tool_results:
        recording.tool_result(tool_result)
    return recording


def taken(request: CloseRequest) -> CloseRequest:
    """The report as the server reads it."""
    body = request.model_dump_json().encode()
    assert len(body) <= MAX_BODY
    return CloseRequest.model_validate_json(body)


@PATIENT
async def test_a_result_that_is_too_large_or_too_deep_is_a_crash_that_names_the_limit(workplace: Any) -> None:
    async def agent(task_input: Any, context: AgentContext) -> Any:
        await ask(context)
        return {
            "large": "x" * (9 << 20),
            "deep": nested(210),
            "deeper": nested(400),
            "no JSON": {"object": object()},
            "most": nested(MAX_DEPTH),
            "half a surrogate pair": {"a\ud83c": ["🌍", "\ud83c"]},
        }[task_input]

    ended = await workplace.run(agent, ["large", "deep", "deeper", "no JSON", "most", "half a surrogate pair"])
    assert [rollout.ending for rollout, _ in ended.values()] == [*[Ending.CRASHED] * 4, *[Ending.FINISHED] * 2]
    assert {attempt.attempt for _, attempt in ended.values()} == {0}, "none was tried again"
    large, deep, deeper, no_json, most, half = (attempt for _, attempt in ended.values())
    assert f"{(9 << 20) + 2} bytes of JSON, and {MAX_RESULT} are the limit" in large.error
    assert f"nested 210 deep, and {MAX_DEPTH} is the limit" in deep.error
    assert f"nested 400 deep, and {MAX_DEPTH} is the limit" in deeper.error
    assert "what is not JSON (Object of type object is not JSON serializable); return a string" in no_json.error
    assert half.result == {"a\ufffd": ["🌍", "\ufffd"]}
    assert most.result == nested(MAX_DEPTH)


@PATIENT
async def test_many_tool_results_are_all_recorded_the_large_ones_cut(workplace: Any) -> None:
    async def agent(task_input: Any, context: AgentContext) -> Any:
        await ask(context)
        for number in range(200):
            record_tool_result(tool_result(f"o{number}", f"{number} " + "x" * 50_000))
        record_tool_result(tool_result_report("small", "read", "as it is", tool_call_id="c1"))
        return 0.5

    worker = workplace.start(agent)
    rollout, attempt = (await workplace.finish(worker, [0]))[0]
    assert (rollout.ending, attempt.attempt, attempt.result) == (Ending.FINISHED, 0, 0.5)
    *large, small = await workplace.stack.store.tool_results([attempt.key])
    assert (small.result, small.tool_call_id) == ("as it is", "c1")
    assert [result.id for result in large] == [f"o{number}" for number in range(200)]
    assert all(result.result.startswith(f"{number} x") for number, result in enumerate(large))
    assert all(result.result.endswith(" more characters)") for result in large)
    assert [reward.value for reward in await workplace.stack.store.rewards([attempt.key])] == [0.5]
    assert any("the largest values were cut" in problem for problem in worker.worker.problems)


async def test_a_client_says_so_before_it_sends_what_the_server_would_not_read() -> None:
    lease = Lease(
        rollout="r", attempt=0, task_id="t", task_input=None, task_split="train", mode=Mode.TRAIN, path="", key="k",
        secret="s", timeout=9, heartbeat=1, expires=9,
    )  # fmt: skip
    async with LightningClient("http://127.0.0.1:9", "key") as client:
        with pytest.raises(RefusedError, match=r"are the limit") as refused:
            await client.close_attempt(lease, CloseRequest(ending=Ending.LOST, error="x" * MAX_BODY))
    assert refused.value.status == 413


@pytest.mark.parametrize(
    "hard",
    [
        tool_result("a", nested(198)),
        tool_result("a", nested(240), arguments=nested(230)),
        tool_result("a", "\ud800"),
        tool_result("a", {"\ud800": ["\ud800"]}),
        tool_result("a", 1, tool="\ud800", agent="\ud800", error="\ud800"),
        tool_result("a", 1, error="\x01" * (9 << 20)),
        tool_result("a", 1, tool="t" * (9 << 20)),
        tool_result("a", list(range(2_000_000))),
        tool_result("a", {str(number): nested(12) for number in range(50_000)}),
    ],
    ids=range(9),
)
def test_whatever_an_tool_result_has_in_it_the_others_are_reported_with_it(hard: ToolResult) -> None:
    request = taken(
        closing(
            Ended(Ending.FINISHED, "done"), recording_of(tool_result("first", 1), hard, tool_result("last", {"b": 2}))
        )
    )
    assert (request.ending, request.result) == (Ending.FINISHED, "done")
    assert [result.id for result in request.tool_results] == ["first", "a", "last"]
    assert [result.result for result in request.tool_results[::2]] == [1, {"b": 2}]


def test_what_has_no_room_at_all_is_left_out_and_counted_as_a_problem() -> None:
    recording = recording_of(*(tool_result(f"{number} {'n' * 2000}", "x" * 1000) for number in range(9_000)))
    for number in range(9_000):
        recording.reward(RewardReport(name=f"{number} {'n' * 2000}", value=1))
    request = taken(closing(Ended(Ending.FINISHED, 1.0), recording))
    for kept in (request.tool_results, request.rewards):
        assert 1000 < len(kept) < 9_000
        assert [(getattr(report, "id", None) or report.name).partition(" ")[0] for report in kept] == [
            str(number) for number in range(len(kept))
        ]
    assert any("only the first ones are kept" in problem for problem in recording.problems)


def test_errors_are_reported_whatever_they_say() -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    for error in (ValueError("\ud800" + "e" * (9 << 20)), OddError()):
        request = taken(closing(crashed(error), Recording()))
        assert request.ending is Ending.CRASHED
        assert request.error.startswith(f"{type(error).__name__}: ")
        assert len(request.error) < 70_000
    request = taken(closing(Ended(Ending.LOST, error="\x01" * (9 << 20)), Recording()))
    assert "more characters" in (request.error or "")
