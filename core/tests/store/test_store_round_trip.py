"""What is put comes back exactly."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.errors import StoreError
from agl_core.store.interface import Store
from agl_core.store.sqlite import SqliteStore
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Choice,
    FinishReason,
    Reward,
    Rollout,
    Run,
    Sampling,
    ToolResult,
    TrainingRecord,
)

from .any_records import attempts, calls, rewards, rollouts, runs, tool_results, training_records


def through_the_store(records: list[Any], read: Callable[[SqliteStore], Any]) -> Any:
    async def round_trip() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            async with SqliteStore(Path(folder) / "store.sqlite") as store:
                await store.put(*records)
                await store.put(*records)
                return await read(store)

    return asyncio.run(round_trip())


def size_of(path: Path) -> int:
    return path.stat().st_size


def by_attempt(records: list[Any]) -> list[AttemptKey]:
    return [AttemptKey(record.rollout, record.attempt) for record in records]


@given(st.lists(calls, max_size=3, unique_by=lambda call: (call.rollout, call.attempt)))
def test_calls(exactly: Any, records: list[Call]) -> None:
    assert exactly(through_the_store(records, lambda s: s.calls(by_attempt(records)))) == exactly(records)


@given(st.lists(rollouts, max_size=3, unique_by=lambda rollout: rollout.id))
def test_rollouts(exactly: Any, records: list[Rollout]) -> None:
    assert exactly(through_the_store(records, lambda s: s.rollouts())) == exactly(records)


@given(attempts)
def test_attempts(exactly: Any, record: Attempt) -> None:
    assert exactly(through_the_store([record], lambda s: s.attempts(record.rollout))) == exactly([record])


@given(st.lists(tool_results, max_size=3, unique_by=lambda tool_result: tool_result.id))
def test_tool_results(exactly: Any, records: list[ToolResult]) -> None:
    assert exactly(through_the_store(records, lambda s: s.tool_results(by_attempt(records)))) == exactly(records)


@given(
    st.lists(rewards, max_size=4, unique_by=lambda r: (r.rollout, r.attempt, r.name, r.source, r.call, r.choice)),
)
def test_rewards(exactly: Any, records: list[Reward]) -> None:
    assert exactly(through_the_store(records, lambda s: s.rewards(by_attempt(records)))) == exactly(records)


@given(st.lists(training_records, max_size=4, unique_by=lambda record: record.key))
def test_uses(exactly: Any, records: list[TrainingRecord]) -> None:
    assert exactly(through_the_store(records, lambda s: s.training_records(by_attempt(records)))) == exactly(records)


@given(st.lists(runs, max_size=3, unique_by=lambda run: (run.id, run.restart)))
def test_runs(exactly: Any, records: list[Run]) -> None:
    assert exactly(through_the_store(records, lambda s: s.runs())) == exactly(records)


async def test_logprobs_that_are_not_finite(store: Store, make_call: Any, calls_of: Any) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    choice = Choice(0, {}, FinishReason.LENGTH, np.arange(4, dtype=np.int32), values)
    await store.put(make_call("c", choices=(choice,)))
    read = (await calls_of(store, "r"))["c"].choices[0].logprobs
    assert read.tobytes() == values.tobytes()


async def test_the_tuples_of_json_become_lists_and_its_nan_null(store: Store, make_attempt: Any) -> None:
    await store.put(make_attempt("r", result={"pair": (1, 2), "bad": float("nan"), "big": 2**80}))
    (attempt,) = await store.attempts("r")
    assert attempt.result == {"pair": [1, 2], "bad": None, "big": 2**80}


@pytest.mark.parametrize(
    ("field", "array"),
    [
        ("response_ids", np.array([1, 2], np.int64)),
        ("response_ids", np.array([[1, 2]], np.int32)),
        ("response_ids", [1, 2]),
        ("logprobs", np.array([0.1], np.float64)),
        ("mask", np.array([1, 0], np.int32)),
    ],
)
async def test_arrays_of_another_type_are_refused_not_rounded(
    store: Store, make_call: Any, calls_of: Any, field: str, array: Any
) -> None:
    choice = Choice(0, {}, FinishReason.STOP, **{field: array})
    with pytest.raises(StoreError, match=r"Call \(rollout 'r'.*id 'c'.*numpy array of"):
        await store.put(make_call("c", choices=(choice,)))
    assert not await calls_of(store, "r")


async def test_numpy_scalars_are_numbers(store: Store, make_call: Any, calls_of: Any) -> None:
    record = TrainingRecord(
        "r", np.int64(0), "c", np.int32(1), np.int64(2), np.float32(0.5), np.float64(0.25), np.float32(1)
    )  # type: ignore[arg-type]
    await store.put(record, make_call("c", version=np.int64(7), requested=Sampling(temperature=np.float64(0.5))))
    assert await store.training_records([AttemptKey("r", 0)]) == [TrainingRecord("r", 0, "c", 1, 2, 0.5, 0.25, 1.0)]
    call = (await calls_of(store, "r"))["c"]
    assert (call.version, call.requested.temperature) == (7, 0.5)


async def test_a_long_episode_takes_linear_space(path: Path, make_call: Any, exactly: Any) -> None:
    turns, words, ids = 30, 2_000, 500
    messages: list[Any] = []
    prompt = np.zeros(0, np.int32)
    generator = np.random.default_rng(0)
    calls = []
    for turn in range(turns):
        messages = [*messages, {"role": "user", "content": generator.bytes(words // 2).hex()}]
        prompt = np.concatenate([prompt, generator.integers(0, 2**31, ids, dtype=np.int32)])
        request = {"messages": messages, "tools": [{"name": "t" * words}]}
        calls.append(make_call(f"c{turn}", sequence=turn, request=request, prompt_ids=prompt))
    async with SqliteStore(path) as store:
        for call in calls:
            await store.put(call)
        assert exactly(await store.calls([AttemptKey("r", 0)])) == exactly(calls)
    new_per_turn = words + ids * 4
    assert size_of(path) < 3 * turns * new_per_turn
    assert sum(words * (turn + 1) + ids * 4 * (turn + 1) for turn in range(turns)) > 15 * turns * new_per_turn
