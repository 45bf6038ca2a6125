"""An attempt's recording, and attempt, identity and state, which follow the code that runs."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import contextvars
import dataclasses
import json
import math
import random
import re
import subprocess
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import agl_core
from agl_core.capture import (
    AttemptContext,
    Identity,
    Recording,
    current_attempt,
    current_identity,
    enter_identity,
    guarded,
    identify,
    jsonable,
    record_tool_result,
    report_problem,
    running,
    status_of,
    unpack_variables,
)
from agl_core.capture.context import packed_variables
from agl_core.errors import AgentError
from agl_core.types import ToolStatus
from agl_server.testing import Stack


def attempt(recording: Recording | None = None, rollout: str = "r1") -> AttemptContext:
    return AttemptContext(rollout, 0, "http://127.0.0.1:8000", "key", recording or Recording())


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("result", "status"),
    [
        (None, ToolStatus.EMPTY),
        ("", ToolStatus.EMPTY),
        ([], ToolStatus.EMPTY),
        ({}, ToolStatus.EMPTY),
        ((), ToolStatus.EMPTY),
        (set(), ToolStatus.EMPTY),
        (b"", ToolStatus.EMPTY),
        (0, ToolStatus.OK),
        (False, ToolStatus.OK),
        ("0", ToolStatus.OK),
        ([None], ToolStatus.OK),
        (ValueError("x"), ToolStatus.ERROR),
        (KeyboardInterrupt(), ToolStatus.ERROR),
        (TimeoutError(), ToolStatus.TIMEOUT),
        (httpx.ReadTimeout("x"), ToolStatus.TIMEOUT),
        (subprocess.TimeoutExpired("ls", 1), ToolStatus.TIMEOUT),
        (caused(RuntimeError("tool failed"), httpx.ConnectTimeout("x")), ToolStatus.TIMEOUT),
        (caused(RuntimeError("tool failed"), KeyError("x")), ToolStatus.ERROR),
    ],
)
def test_status(result: Any, status: ToolStatus) -> None:
    assert status_of(result).status is status


def test_an_exception_whose_text_raises_is_still_reported() -> None:
    class AwkwardError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    recording = Recording()
    record_tool_result("1", "t", AwkwardError(), recording=recording)
    assert recording.tool_results[0].error == "AwkwardError"


def test_a_flood_of_problems_is_not_kept() -> None:
    recording = Recording()
    news = [recording.problem(f"{number} {'x' * 5000}") for number in range(1000)]
    assert sum(news) == len(recording.problems) == 100
    assert {len(text) for text in recording.problems} == {2000}


def test_a_tool_result_counts_once_the_first_report_stays_and_after_the_end_none_is_kept() -> None:
    recording = Recording()
    with running(attempt(recording)):
        for id, result in (("1", 3), ("1", 4), ("2", 5)):
            record_tool_result(id, "add", result)
        recording.close()
        recording.close()
        agl_core.reward(1.0)
        record_tool_result("3", "add", 6)
    assert [tool_result.result for tool_result in recording.tool_results] == [3, 5]
    assert recording.rewards == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, [1.0], 10**400])
@pytest.mark.parametrize("inside", [False, True])
def test_a_reward_that_is_no_number_is_refused_inside_a_rollout_and_outside(value: Any, inside: bool) -> None:
    active = attempt()
    context = running(active) if inside else contextlib.nullcontext()
    with context, pytest.raises(AgentError, match="not a finite number"):
        agl_core.reward(value)
    assert active.recording.rewards == ()


def test_what_an_adapter_raises_becomes_a_problem(caplog: pytest.LogCaptureFixture) -> None:
    @guarded
    def on_tool_end(run: str) -> None:
        raise KeyError(run)

    active = attempt()
    with running(active):
        on_tool_end("run-1")
        on_tool_end("run-1")
        report_problem("Reading the trace", OSError("gone"))
    first, second = active.recording.problems
    assert "on_tool_end failed: KeyError: 'run-1'" in first
    assert second == "Reading the trace failed: OSError: gone"
    assert caplog.text.count("run-1") == 1


class Point(BaseModel):
    x: int
    tags: set[str] = set()


@dataclasses.dataclass
class Box:
    at: Point
    note: object = None


def test_models_and_dataclasses_are_their_fields() -> None:
    assert jsonable(Box(Point(x=1, tags={"a"}))) == {"at": {"x": 1, "tags": ["a"]}, "note": None}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=40,
)


@given(anything, st.integers(0, 2000))
def test_anything_becomes_json_of_bounded_size(value: Any, limit: int) -> None:
    converted = jsonable(value, limit)
    assert len(orjson.dumps(converted)) <= 8 * limit + 1000
    if limit == 2000 and isinstance(value, str | bool | None) and "\ud800" not in str(value):
        assert converted == value or len(str(value)) > limit


# Attempt and identity follow the code that runs, into tasks, threads and pools.


def here() -> tuple[str | None, str | None]:
    """The rollout and the agent of the code that calls this."""
    active, identity = current_attempt(), current_identity()
    return (active.rollout if active else None, identity.agent if identity else None)


def test_identities_nest_and_the_name_is_inherited() -> None:
    with identify("outer", span="s1"):
        with identify(parent_span="s1"):
            assert current_identity() == Identity("outer", None, "s1")
        with identify("inner"):
            assert here() == (None, "inner")
        assert current_identity() == Identity("outer", "s1")
    assert current_identity() is None


async def test_an_identity_closed_in_another_task_ends_here_too() -> None:
    scope = enter_identity(Identity("solver"))

    async def end() -> None:
        scope.close()

    await asyncio.create_task(end())
    assert current_identity() is None


def test_a_thread_has_the_attempt_that_started_it_and_other_variables_as_python_has_them(attached: None) -> None:
    theirs = contextvars.ContextVar("theirs", default="default")
    theirs.set("set")
    seen = []
    with running(attempt()), identify("solver"):
        thread = threading.Thread(target=lambda: seen.append((here(), theirs.get())))
        thread.start()
        thread.join()
    assert seen == [(("r1", "solver"), "default")]


def test_a_pool_shared_by_attempts_works_for_whoever_submits(attached: None) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        with running(attempt(rollout="r1")), identify("a"):
            assert pool.submit(here).result() == ("r1", "a")
        with running(attempt(rollout="r2")):
            assert pool.submit(here).result() == ("r2", None)
            assert list(pool.map(lambda _: here(), range(2))) == [("r2", None)] * 2
        assert pool.submit(here).result() == (None, None)


# The state that an agent's code sets travels with each call, as a header.


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=30) | st.binary(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(str.isidentifier), values, max_size=4))
def test_any_state_travels_as_a_header(variables: dict[str, Any]) -> None:
    with running(AttemptContext("r", 0, "http://127.0.0.1:9", "no key", Recording())):
        agl_core.state(**variables)
        packed = packed_variables()
    assert (packed is None) == (not variables)
    assert (unpack_variables(packed) or {}) == {name: jsonable(value) for name, value in variables.items()}


async def test_state_is_that_of_the_call_and_bounded(attached: None, stack: Stack) -> None:
    noise = "".join(chr(c) for c in random.Random(1).choices(range(0x4E00, 0x9FFF), k=40_000))
    attempt = await stack.attempt()
    client = stack.client(attempt.key)

    async def ask(text: str) -> None:
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}])

    async def agent(name: str) -> None:
        agl_core.state(who=name, draft=["a"])
        await ask(name)
        agl_core.state(draft=None)
        await ask(name)

    with attempt.running():
        await ask("before")
        await asyncio.gather(agent("x"), agent("y"))
        agl_core.state(who="nobody", noise=noise, after="kept", **dict.fromkeys("abc", noise))
        await ask("noise")
    calls = await attempt.calls()
    states = {name: [c.state for c in calls if c.request["messages"][-1]["content"] == name] for name in "xy"}
    assert calls[0].state is None
    for name, of_agent in states.items():
        assert of_agent == [{"who": name, "draft": ["a"]}, {"who": name, "draft": None}]
    [cut] = [c.state for c in calls if c.request["messages"][-1]["content"] == "noise"]
    assert len(json.dumps(cut, ensure_ascii=False).encode()) <= 16_384
    assert re.fullmatch(r".{100,}… \(\d+ more characters\)", cut["noise"])
    assert cut["noise"][:100] == noise[:100]
    assert (cut["who"], cut["after"]) == ("nobody", "kept")


BOMB = base64.urlsafe_b64encode(zlib.compress(b'{"a": "' + b"x" * (1 << 26) + b'"}')).decode()


@pytest.mark.parametrize("header", ["", "%%%", "AAAA", "eJyLBgABFwC5", "x" * 100, BOMB], ids=range(6))
def test_a_state_header_that_is_none_or_swells_is_passed_over(header: str) -> None:
    assert unpack_variables(header) is None
