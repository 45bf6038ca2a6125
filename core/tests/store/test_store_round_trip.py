"""What is put comes back exactly."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_core.errors import StoreError
from agl_core.store.sqlite import SqliteStore
from agl_core.types import (
    Attempt,
    AttemptKey,
    Call,
    Choice,
    Ending,
    FinishReason,
    Mode,
    Outcome,
    OutcomeStatus,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Task,
    Use,
)

any_text = st.text(st.characters(exclude_categories=()), max_size=8)
"""Lone surrogates and NUL included: models and exceptions produce them."""
key_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
whole = st.integers(0, 2**40)
finite = st.floats(allow_nan=False, allow_infinity=False)
real = finite.map(lambda value: value + 0.0)
"""Without -0.0: SQLite's REAL columns do not keep that sign (JSON and arrays do)."""
any_real = st.floats().map(lambda value: value + 0.0)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=8,
)
json_objects = st.dictionaries(any_text, json_values, max_size=4)


def drawn(dtype: Any) -> st.SearchStrategy[Any]:
    """Arrays of any bits, drawn as a length and a seed: element by element would take long."""
    lengths = st.integers(0, 20) | st.sampled_from([255, 256, 257, 512, 1100])
    data = st.builds(lambda n, seed: np.random.default_rng(seed).bytes(4 * n), lengths, st.integers(0, 9))
    if dtype is np.bool_:
        return data.map(lambda drawn: np.frombuffer(drawn, np.uint8) > 99)
    return data.map(lambda drawn: np.frombuffer(drawn, dtype))


tokens, logprobs, masks = drawn(np.int32), drawn(np.float32), drawn(np.bool_)
samplings = st.builds(Sampling, st.none() | finite, st.none() | finite, st.none() | whole, st.none() | st.integers())
choices = st.builds(
    Choice,
    st.integers(0, 5),
    json_objects,
    st.sampled_from(FinishReason),
    st.none() | tokens,
    st.none() | logprobs,
    st.none() | masks,
    st.none() | any_text,
)
requests = st.builds(
    lambda plain, lists: {**plain, **lists},
    json_objects,
    st.dictionaries(
        st.sampled_from(["messages", "tools", "input"]),
        st.builds(lambda first, rest: [first, *rest], json_objects, st.lists(json_values, max_size=3)),
    ),
)
calls = st.builds(
    Call,
    id=key_text,
    rollout=key_text,
    attempt=whole,
    sequence=whole,
    policy=key_text,
    version=st.none() | whole,
    request=requests,
    choices=st.lists(choices, max_size=3).map(tuple),
    started=real,
    ended=real,
    api=key_text,
    agent=st.none() | any_text,
    parent_span=st.none() | any_text,
    prompt_ids=st.none() | tokens,
    requested=samplings,
    effective=samplings,
    prefix_broken=st.booleans(),
    prefilled=whole,
    reused=whole,
    late=st.booleans(),
    retry_of=st.none() | any_text,
)
rollouts = st.builds(
    Rollout,
    key_text,
    key_text,
    whole,
    key_text,
    st.builds(Task, any_text, json_values, any_text, json_objects),
    st.sampled_from(Mode),
    whole,
    whole,
    st.sampled_from(RolloutState),
    st.none() | whole,
    st.none() | st.sampled_from(Ending),
)
attempts = st.builds(
    Attempt,
    key_text,
    whole,
    key_text,
    real,
    st.none() | real,
    st.none() | st.sampled_from(Ending),
    json_values,
    st.none() | any_text,
)
outcomes = st.builds(
    Outcome,
    key_text,
    key_text,
    whole,
    any_text,
    st.sampled_from(OutcomeStatus),
    st.none() | any_text,
    json_values,
    json_values,
    st.none() | any_text,
    st.none() | any_text,
    st.none() | any_text,
    st.none() | any_text,
    st.none() | real,
    st.none() | real,
)
rewards = st.builds(Reward, key_text, whole, key_text, any_real, key_text, st.none() | key_text, whole)
uses = st.builds(
    Use,
    key_text,
    whole,
    key_text,
    whole,
    whole,
    st.none() | any_real,
    st.none() | any_real,
    any_real,
    st.none() | key_text,
)
runs = st.builds(Run, key_text, whole, real, json_values, st.none() | whole)

few = settings(max_examples=25, deadline=None)


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


@few
@given(st.lists(calls, max_size=3, unique_by=lambda call: (call.rollout, call.attempt)))
def test_calls(exactly: Any, records: list[Call]) -> None:
    assert exactly(through_the_store(records, lambda s: s.calls(by_attempt(records)))) == exactly(records)


@few
@given(st.lists(rollouts, max_size=3, unique_by=lambda rollout: rollout.id))
def test_rollouts(exactly: Any, records: list[Rollout]) -> None:
    assert exactly(through_the_store(records, lambda s: s.rollouts())) == exactly(records)


@few
@given(attempts)
def test_attempts(exactly: Any, record: Attempt) -> None:
    assert exactly(through_the_store([record], lambda s: s.attempts(record.rollout))) == exactly([record])


@few
@given(st.lists(outcomes, max_size=3, unique_by=lambda outcome: outcome.id))
def test_outcomes(exactly: Any, records: list[Outcome]) -> None:
    assert exactly(through_the_store(records, lambda s: s.outcomes(by_attempt(records)))) == exactly(records)


@few
@given(
    st.lists(rewards, max_size=4, unique_by=lambda r: (r.rollout, r.attempt, r.name, r.source, r.call, r.choice)),
)
def test_rewards(exactly: Any, records: list[Reward]) -> None:
    assert exactly(through_the_store(records, lambda s: s.rewards(by_attempt(records)))) == exactly(records)


@few
@given(st.lists(uses, max_size=4, unique_by=lambda use: use.key))
def test_uses(exactly: Any, records: list[Use]) -> None:
    assert exactly(through_the_store(records, lambda s: s.uses(by_attempt(records)))) == exactly(records)


@few
@given(st.lists(runs, max_size=3, unique_by=lambda run: (run.id, run.incarnation)))
def test_runs(exactly: Any, records: list[Run]) -> None:
    assert exactly(through_the_store(records, lambda s: s.runs())) == exactly(records)


async def test_logprobs_that_are_not_finite(store: SqliteStore, make_call: Any, calls_of: Any) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    choice = Choice(0, {}, FinishReason.LENGTH, np.arange(4, dtype=np.int32), values)
    await store.put(make_call("c", choices=(choice,)))
    read = (await calls_of(store, "r"))["c"].choices[0].logprobs
    assert read.tobytes() == values.tobytes()


async def test_the_tuples_of_json_become_lists_and_its_nan_null(store: SqliteStore, make_attempt: Any) -> None:
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
    store: SqliteStore, make_call: Any, calls_of: Any, field: str, array: Any
) -> None:
    choice = Choice(0, {}, FinishReason.STOP, **{field: array})
    with pytest.raises(StoreError, match=r"Call \(rollout 'r'.*id 'c'.*numpy array of"):
        await store.put(make_call("c", choices=(choice,)))
    assert not await calls_of(store, "r")


async def test_numpy_scalars_are_numbers(store: SqliteStore, make_call: Any, calls_of: Any) -> None:
    use = Use("r", np.int64(0), "c", np.int32(1), np.int64(2), np.float32(0.5), np.float64(0.25), np.float32(1))  # type: ignore[arg-type]
    await store.put(use, make_call("c", version=np.int64(7), requested=Sampling(temperature=np.float64(0.5))))
    assert await store.uses([AttemptKey("r", 0)]) == [Use("r", 0, "c", 1, 2, 0.5, 0.25, 1.0)]
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
