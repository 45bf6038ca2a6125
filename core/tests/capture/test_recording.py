"""An attempt's recording: its bounds, and how tool results become reports."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import subprocess
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
    Recording,
    guarded,
    jsonable,
    record_tool_result,
    report_problem,
    running,
    status_of,
    tool_result_report,
)
from agl_core.errors import AgentError
from agl_core.types import ToolStatus


def attempt(recording: Recording | None = None) -> AttemptContext:
    return AttemptContext("r1", 0, "http://127.0.0.1:8000", "key", recording or Recording())


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

    assert tool_result_report("1", "t", AwkwardError()).error == "AwkwardError"


def test_an_tool_result_counts_once_and_the_first_report_stays() -> None:
    recording = Recording()
    recording.tool_result(tool_result_report("1", "add", 3))
    recording.tool_result(tool_result_report("1", "add", 4))
    recording.tool_result(tool_result_report("2", "add", 5))
    assert [tool_result.result for tool_result in recording.tool_results] == [3, 5]


def test_a_flood_of_problems_is_not_kept() -> None:
    recording = Recording()
    news = [recording.problem(f"{number} {'x' * 5000}") for number in range(1000)]
    assert sum(news) == len(recording.problems) == 100
    assert {len(text) for text in recording.problems} == {2000}


def test_what_comes_after_the_end_is_not_kept() -> None:
    recording = Recording()
    with running(attempt(recording)):
        recording.close()
        recording.close()
        agl_core.reward(1.0)
        record_tool_result(tool_result_report("1", "add", 3))
    assert (recording.tool_results, recording.rewards) == ((), ())


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
