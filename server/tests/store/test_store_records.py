"""Records come back exactly, once, as the filters say; a put that cannot be kept exactly is refused as a whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import struct
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agl_core
from agl_core.errors import EpisodesError, StoreError
from agl_core.store import Store
from agl_core.testing import episodes as make
from agl_core.types import (
    Annotation,
    Attempt,
    AttemptKey,
    Call,
    Choice,
    Episode,
    FinishReason,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Source,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)
from agl_server.store import queries
from agl_server.store.connections import connect_reader
from agl_server.store.sqlite import SqliteStore

from .any_records import calls_of, exactly, make_call, records

KEY = AttemptKey("r", 0)


def keys(stored: list[Any]) -> list[AttemptKey]:
    return [AttemptKey(record.rollout, record.attempt) for record in stored]


READ: dict[type, tuple[Callable[[Any], Any], Callable[[SqliteStore, list[Any]], Any]]] = {
    Run: (lambda r: (r.id, r.restart), lambda store, _: store.runs()),
    Rollout: (lambda r: r.id, lambda store, _: store.rollouts()),
    Attempt: (lambda r: r.rollout, lambda store, stored: store.attempts(*(r.rollout for r in stored))),
    Call: (lambda r: (r.rollout, r.attempt), lambda store, stored: store.calls(keys(stored))),
    ToolResult: (lambda r: r.id, lambda store, stored: store.tool_results(keys(stored))),
    Reward: (
        lambda r: (r.rollout, r.attempt, r.name, r.source, r.call, r.choice),
        lambda store, stored: store.rewards(keys(stored)),
    ),
    TrainingRecord: (lambda r: r.key, lambda store, stored: store.training_records(keys(stored))),
    Annotation: (lambda r: r.id, lambda store, stored: store.annotations(keys(stored))),
}
"""The key of each kind of record, and how to read it."""


@settings(max_examples=2 * settings.default.max_examples)
@given(st.sampled_from(list(READ)).flatmap(lambda type_: st.lists(records(type_), min_size=1, max_size=3)))
def test_any_records_come_back_exactly_though_they_are_written_twice(stored: list[Any]) -> None:
    key, read = READ[type(stored[0])]
    stored = list({key(record): record for record in stored}.values())

    async def round_trip() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            async with SqliteStore(Path(folder) / "store.sqlite") as store:
                await store.put(*stored)
                await asyncio.gather(store.put(*stored), store.put(*stored))
                return await read(store, stored)

    assert exactly(asyncio.run(round_trip())) == exactly(stored)


async def test_values_that_other_types_hold(store: Store) -> None:
    """Not-finite log-probabilities keep their bits, JSON's NaN is null, and numpy's scalars are numbers."""
    values = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    choice = Choice(0, {}, FinishReason.LENGTH, np.arange(4, dtype=np.int32), values)
    numbers: Any = (np.int64(0), "c", np.int32(1), np.int64(2), np.float32(0.5), np.float64(0.25), np.float32(1))
    await store.put(
        make_call("c", choices=(choice,), version=np.int64(7), requested=Sampling(temperature=np.float64(0.5))),
        make.attempt("r", result={"pair": (1, 2), "bad": float("nan"), "big": 2**80}),
        TrainingRecord("r", *numbers),
    )
    call = (await calls_of(store, "r"))["c"]
    assert call.choices[0].logprobs.tobytes() == values.tobytes()
    assert (call.version, call.requested.temperature) == (7, 0.5)
    assert await store.training_records([KEY]) == [TrainingRecord("r", 0, "c", 1, 2, 0.5, 0.25, 1.0)]
    [attempt] = await store.attempts("r")
    assert attempt.result == {"pair": [1, 2], "bad": None, "big": 2**80}


@pytest.mark.parametrize(
    ("field", "array"),
    [
        ("response_ids", np.array([1, 2], np.int64)),
        ("response_ids", np.array([[1, 2]], np.int32)),
        ("response_ids", [1, 2]),
        ("logprobs", np.array([0.1], np.float64)),
        ("mask", np.array([1, 0], np.int32)),
        ("prompt_ids", np.array([1, 2], np.int64)),
    ],
)
async def test_arrays_of_another_type_are_refused_not_rounded(store: Store, field: str, array: Any) -> None:
    of_call = {field: array} if field == "prompt_ids" else {}
    choice = Choice(0, {}, FinishReason.STOP, **{} if of_call else {field: array})
    with pytest.raises(StoreError, match=rf"Call \(rollout 'r'.*id 'c'.*{field}: it must be a numpy array of"):
        await store.put(make_call("c", choices=(choice,), **of_call))
    assert await store.calls([KEY]) == []


BAD: dict[str, dict[str, Any] | None] = {
    "no JSON": {"result": object()},
    "no UTF-8 in a key": {"rollout": "bad\ud800"},
    "a NUL in a key": {"rollout": "bad\0"},
    "beyond 64 bits": {"attempt": 2**70},
    "no integer": {"attempt": 0.5},
    "no start": {"started": None},
    "no text": {"worker": 5},
    "no record": None,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_bad_record_fails_its_own_put_as_a_whole_and_no_other(store: Store, bad: Any) -> None:
    record: Any = {"rollout": "bad"} if bad is None else replace(make.attempt("bad"), **bad)
    good = [store.put(make.attempt("r", number), make_call(f"c{number}")) for number in range(20)]
    together = store.put(make.attempt("r", 100), make_call("companion"), record, make.attempt("r", 101))
    results = await asyncio.gather(*good[:10], together, *good[10:], return_exceptions=True)
    [error] = [result for result in results if result is not None]
    assert isinstance(error, StoreError)
    assert re.search(r"Attempt \(rollout '(r|bad)|not dict", str(error))
    assert [attempt.attempt for attempt in await store.attempts("r")] == list(range(20))
    assert len(await store.calls([KEY])) == 20
    # The pieces of the refused put are written by the next one that has them.
    await store.put(make_call("companion"))
    assert "companion" in {call.id for call in await store.calls([KEY])}


async def test_a_record_replaces_the_one_with_its_key_and_keeps_its_place(store: Store) -> None:
    await store.put(make.rollout("b"), make.rollout("a"))
    done = make.rollout("b", state=RolloutState.DONE, counted_attempt=0)
    await store.put(make.rollout("b", state=RolloutState.RUNNING), done)
    assert await store.rollouts() == [done, make.rollout("a")]

    three = make_call("c", choices=tuple(Choice(n, {"content": str(n)}, FinishReason.STOP) for n in range(3)))
    last = replace(three, choices=(Choice(0, {"content": "new"}, FinishReason.STOP),), late=True)
    await store.put(three, replace(three, id="equal content", sequence=1))
    await asyncio.gather(store.put(three), store.put(last))
    call, other = await store.calls([KEY])
    assert (call.late, [choice.message for choice in call.choices]) == (True, [{"content": "new"}])
    assert (other.id, len(other.choices)) == ("equal content", 3)


async def test_the_first_tool_result_of_an_id_stands_and_only_what_it_left_open_is_added(store: SqliteStore) -> None:
    first = ToolResult("1:2", "r", 0, "add", ToolStatus.ERROR, error="no", parent_span="s", source=Source.SPAN)
    later = ToolResult(
        *("1:2", "r", 0, "mul", ToolStatus.OK, "c1", {"a": 1}, 3, None, "solver", "x", "y", 1.0, 2.0),
        source=Source.SPAN,
    )
    own, elsewhere = replace(later, source=Source.ADAPTER), replace(later, rollout="s")
    await store.put(first, elsewhere)
    await store.put(later, own)
    await store.put(replace(later, tool_call_id="c2", agent="another"))
    kept = replace(first, tool_call_id="c1", agent="solver")
    # In the order in which they were recorded.
    assert await store.tool_results([AttemptKey("s", 0), KEY]) == [kept, elsewhere, own]
    annotation = Annotation("r", 0, "f", 1.0, {"reward": 0.5}, call="c")
    await store.put(annotation)
    await store.put(replace(annotation, received=2.0, said={}))
    assert await store.annotations([KEY]) == [annotation]


async def test_a_long_episode_takes_linear_space(path: Path) -> None:
    """Another process may have written the first half."""
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
    for half in (calls[: turns // 2], calls[turns // 2 :]):
        async with SqliteStore(path) as store:
            for call in half:
                await store.put(call)
    async with SqliteStore(path, read_only=True) as store:
        assert exactly(await store.calls([KEY])) == exactly(calls)
    new_per_turn = words + ids * 4
    assert path.stat().st_size < 4 * turns * new_per_turn


async def test_conversations_that_go_on_otherwise_come_back_exactly(store: SqliteStore) -> None:
    texts: list[Any] = ["a", "ab", 2**70, {"b": "ab"}, "a,"]
    ids = np.arange(1000, dtype=np.int32)
    lists = [
        [{"content": text} for text in chosen] for n in range(4) for chosen in itertools.product(texts, repeat=n) if n
    ]
    calls = [
        make_call(str(n), sequence=n, agent=f"a{n % 2}", prompt_ids=np.roll(ids, n // 5)[: 9 * n],
                  request={"messages": messages, "tools": messages[:1]})
        for n, messages in enumerate([*lists, *reversed(lists)])
    ]  # fmt: skip
    for start in range(0, len(calls), 40):
        await store.put(*calls[start : start + 40])
        await store.erase(["another"])
    assert exactly(await store.calls([KEY])) == exactly(calls)


def commits_in_log(path: Path) -> int:
    """The number of transactions in a write-ahead log, by SQLite's file format: a commit's last frame is marked."""
    log = path.with_name(path.name + "-wal").read_bytes()
    page_size = struct.unpack(">I", log[8:12])[0]
    salt = log[16:24]
    frames = (log[start : start + 24] for start in range(32, len(log), page_size + 24))
    return sum(1 for frame in frames if frame[8:16] == salt and struct.unpack(">I", frame[4:8])[0] > 0)


async def test_concurrent_puts_are_committed_together_and_seen_by_reads(store: SqliteStore, path: Path) -> None:
    before = commits_in_log(path)
    await asyncio.gather(*(store.put(make_call(f"c{number}")) for number in range(300)))
    assert 1 <= commits_in_log(path) - before <= 3
    assert len(await calls_of(store, "r")) == 300

    async def write_then_read(number: int) -> None:
        await store.put(make_call(f"c{number}", f"r{number}"))
        assert f"c{number}" in await calls_of(store, f"r{number}")

    await asyncio.gather(*(write_then_read(number) for number in range(100)))
    many = [make.attempt("r", number) for number in range(777)]  # more than one statement has
    await store.put(*many)
    assert await store.attempts("r") == many


async def test_a_cancelled_put_disturbs_no_other_and_close_finishes_what_was_accepted(path: Path) -> None:
    store = SqliteStore(path)
    await store.open()
    puts = [asyncio.create_task(store.put(make_call(f"c{number}"))) for number in range(10)]
    await asyncio.sleep(0)
    puts[3].cancel()
    await store.close()
    results = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(result) for result in results if result is not None] == [asyncio.CancelledError]
    async with SqliteStore(path, read_only=True) as reader:
        assert {f"c{number}" for number in range(10) if number != 3} <= set(await calls_of(reader, "r"))
        with pytest.raises(StoreError, match="opened to read only"):
            await reader.put(make_call("c"))


async def test_a_store_that_is_not_open_says_so(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    for _ in range(2):
        for method in (store.put(make_call("c")), store.runs()):
            with pytest.raises(StoreError, match="not open"):
                await method
        async with store:
            with pytest.raises(StoreError, match="open already"):
                await store.open()
            await store.put()
        await store.close()
    assert (tmp_path / "store.sqlite").is_file()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({}, "dcba"),
        ({"limit": 2}, "dc"),
        ({"limit": 0}, ""),
        ({"newest": 2}, "ba"),
        ({"newest": 3, "limit": 1}, "c"),
        ({"newest": 9, "run": "one"}, "dcb"),
        ({"after": "c"}, "ba"),
        ({"after": "d", "limit": 2, "step": 1}, "cb"),
        ({"after": "unknown"}, ""),
        ({"before": "a", "newest": 1}, "b"),
        ({"step": 0}, "da"),
        ({"mode": Mode.TRAIN}, "dca"),
        ({"state": RolloutState.QUEUED}, "cba"),
        ({"run": "one", "step": 1, "mode": Mode.TRAIN, "state": RolloutState.QUEUED, "group": "g2"}, "c"),
        ({"run": "none"}, ""),
    ],
)
async def test_rollouts_by(store: Store, wanted: dict[str, Any], expected: str) -> None:
    await store.put(
        make.rollout("d", run="one", step=0, group="g1", state=RolloutState.DONE),
        make.rollout("c", run="one", step=1, group="g2"),
        make.rollout("b", run="one", step=1, group="g2", mode=Mode.EVAL_GREEDY),
        make.rollout("a", run="two", step=0, group="g3"),
    )
    assert "".join(rollout.id for rollout in await store.rollouts(**wanted)) == expected


async def test_a_rollout_by_the_start_of_its_id(store: Store, path: Path) -> None:
    await store.put(*(make.rollout(id) for id in ("ab1", "ab10", "b%_", "ü\U0010ffff")))
    for prefix, expected in {"ab10": "ab10", "ab1": "ab1", "b": "b%_", "b%_": "b%_", "ü": "ü\U0010ffff"}.items():
        assert (await store.rollout(prefix)).id == expected
    with pytest.raises(StoreError, match=r"ab1, ab10\. Name one"):
        await store.rollout("ab")
    for missing in ("AB", "b_", "%", "zz"):
        with pytest.raises(StoreError, match=rf"No rollout in {re.escape(str(path))}.*`agl rollouts`"):
            await store.rollout(missing)


async def test_attempts_and_calls_come_as_asked_then_in_order(store: Store) -> None:
    await store.put(make.attempt("r", 1), make.attempt("other", 0), make.attempt("r", 0))
    assert await store.attempts("r", "none") == [make.attempt("r", 0), make.attempt("r", 1)]
    rollouts = [f"r{number}" for number in range(1500)]
    await store.put(
        *(make_call(f"{rollout}-{sequence}", rollout, sequence=sequence) for rollout in rollouts for sequence in (1, 0))
    )
    read = await store.calls(AttemptKey(rollout, 0) for rollout in ("r5", "r3", "none", "r5"))
    assert [call.id for call in read] == ["r5-0", "r5-1", "r3-0", "r3-1"]
    assert len(await store.calls([AttemptKey(rollout, 0) for rollout in rollouts])) == 3000
    assert await store.calls([AttemptKey("r5", 1)]) == await store.calls([]) == []


async def test_no_query_by_key_scans_a_table(store: Store, path: Path) -> None:
    await store.put(make.rollout("r"), make_call("c", "r"))
    attempts = [AttemptKey("r", 0), AttemptKey("s", 1)]
    statements: list[str] = []
    connection = connect_reader(path, unchanging=False)
    connection.set_trace_callback(statements.append)
    queries.rollout(connection, "r", "here")
    for wanted in ({"run": "run", "step": 0}, {"group": "group"}, {"state": "queued"}):
        queries.rollouts(connection, **wanted)
    queries.attempts(connection, "r")
    queries.calls(connection, attempts)
    queries.recorded(connection, attempts, Reward)
    connection.set_trace_callback(None)
    # A query that calls json_each() is traced a second time, as the comment that SQLite makes of the inner one.
    statements = [statement for statement in statements if not statement.startswith("--")]
    assert len(statements) == 8
    for statement in statements:
        plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}")]
        assert not [step for step in plan if step.startswith("SCAN") and "asked" not in step], (statement, plan)
    connection.close()


# Episodes in a file: every one comes back exactly, and a line that is none is named.


@settings(max_examples=25)
@given(st.lists(records(Episode), max_size=2))
def test_every_episode_comes_back_exactly(tmp_path_factory: pytest.TempPathFactory, episodes: list[Episode]) -> None:
    path = tmp_path_factory.mktemp("episodes") / "episodes.jsonl"
    agl_core.save_episodes(path, episodes)

    assert exactly(agl_core.load_episodes(path)) == exactly(episodes)
    strict = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert [line["rollout"] for line in strict] == [episode.rollout for episode in episodes]


MINIMAL: dict[str, Any] = {
    "rollout": "r",
    "attempt": 0,
    "group": "g",
    "member": 0,
    "task": {"id": "t", "input": "2 + 2"},
    "mode": "train",
    "ending": "finished",
    "transitions": [],
}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("[]", "it must be an object (Episode), not []"),
        (json.dumps({**MINIMAL, "mode": "training"}), "mode must be one of train, eval-greedy, eval-sampled"),
        (json.dumps({**MINIMAL, "terminal": True}), "terminal must be a number, not True"),
        (json.dumps({**MINIMAL, "member": "0"}), "member must be an integer, not '0'"),
        (json.dumps({**MINIMAL, "reward": 1.0}), "Episode has no field 'reward'"),
        (json.dumps({**MINIMAL, "transitions": [{"key": {}}]}), "transitions[0] lacks the field 'agent'"),
        (json.dumps({**MINIMAL, "task": {"id": "t", "input": 1, "metadata": []}}), "task.metadata must be an object"),
    ],
)
def test_a_line_that_is_no_episode_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(MINIMAL) + "\n\n" + line + "\n")

    with pytest.raises(EpisodesError) as raised:
        agl_core.load_episodes(path)

    assert str(raised.value).startswith(f"{path}, line 3, is no episode: ")
    assert problem in str(raised.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(EpisodesError, match=r"nothing\.jsonl cannot be read: .*No such file"):
        agl_core.load_episodes(tmp_path / "nothing.jsonl")
