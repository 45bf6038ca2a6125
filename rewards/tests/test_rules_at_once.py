"""Rules that keep something between episodes, or work in threads, when several rollouts are judged at once."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agl_core import kinds
from agl_core.learning import ScoringRule, score
from agl_core.types import DropReason, Ending
from agl_rewards import Judge, JudgeError


async def test_siblings_that_answer_alike_share_one_request(make: Any, endpoint: Any, tmp_path: Path) -> None:
    endpoint.delay = 0.05
    rule = endpoint.judge(make, max_calls=2, cache=str(tmp_path / "cache"))
    answers = ["a"] * 8 + ["b"] * 8
    assert await asyncio.gather(*(rule(make.episode(result=each)) for each in answers)) == [0.7] * 16
    assert len(endpoint.requests) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 2


async def test_the_budget_is_never_exceeded(make: Any, endpoint: Any) -> None:
    endpoint.delay = 0.02
    rule = endpoint.judge(make, max_calls=5)
    found = await asyncio.gather(*(rule(make.episode(result=n)) for n in range(12)), return_exceptions=True)
    assert [each for each in found if not isinstance(each, JudgeError)] == [0.7] * 5
    assert len(endpoint.requests) == 5


async def test_no_more_requests_than_eight_are_under_way(make: Any, endpoint: Any) -> None:
    most = 8
    endpoint.may_answer.clear()
    rule = endpoint.judge(make)
    judging = asyncio.gather(*(rule(make.episode(result=n)) for n in range(2 * most + 2)))
    for _ in range(most):
        assert await asyncio.to_thread(endpoint.came.acquire, timeout=30)
    await asyncio.sleep(0.2)
    endpoint.may_answer.set()
    assert await judging == [0.7] * (2 * most + 2)
    assert endpoint.most_at_once == most


async def test_a_request_that_fails_fails_for_all_who_wait_and_is_then_forgotten(make: Any, endpoint: Any) -> None:
    endpoint.status, endpoint.delay = 500, 0.05
    rule = endpoint.judge(make)
    episodes = [make.episode(result="a") for _ in range(4)]
    scored = await asyncio.gather(
        *(score(each, [ScoringRule("judge", rule)], dict.fromkeys(Ending, "score")) for each in episodes)
    )
    assert [episode.dropped for episode, _ in scored] == [DropReason.REWARD_FAILED] * 4
    errors = [error for _, [error] in scored]
    assert len({id(error) for error in errors}) == 4
    assert [len(error.__notes__) for error in errors] == [1] * 4  # Whose it is, and no one else's.
    assert len(endpoint.requests) == 1
    endpoint.status = 200
    assert await rule(episodes[0]) == 0.7


async def test_one_who_is_cancelled_does_not_take_the_score_from_the_others(make: Any, endpoint: Any) -> None:
    endpoint.delay = 0.2
    rule = endpoint.judge(make)
    first, second = (asyncio.create_task(rule(make.episode(result="a"))) for _ in range(2))
    assert await asyncio.to_thread(endpoint.came.acquire, timeout=30)
    first.cancel()
    assert await second == 0.7
    assert first.cancelled()
    assert len(endpoint.requests) == 1


async def test_a_failure_that_nobody_waits_for_any_more_is_silent(make: Any, endpoint: Any) -> None:
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    endpoint.status, endpoint.delay = 500, 0.05
    waiting = asyncio.create_task(endpoint.judge(make)(make.episode(result="a")))
    assert await asyncio.to_thread(endpoint.came.acquire, timeout=30)
    waiting.cancel()
    await asyncio.sleep(0.3)
    del waiting
    gc.collect()
    assert complaints == []


def test_a_judge_can_be_used_again_after_its_loop_was_ended_amid_requests(
    make: Any, endpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_rewards.judge._AT_ONCE", 1)
    rule = endpoint.judge(make)
    endpoint.delay = 0.2

    async def asked(number: int, seconds: float) -> list[Any]:
        tasks = [asyncio.create_task(rule(make.episode(result=n))) for n in range(number)]
        await asyncio.wait(tasks, timeout=seconds)
        return [task.result() if task.done() else None for task in tasks]

    assert asyncio.run(asked(3, 0.05)) == [None, None, None]
    endpoint.delay = 0.0
    assert asyncio.run(asked(3, 10)) == [0.7] * 3


def test_a_damaged_file_of_the_cache_is_asked_again_and_mended(make: Any, endpoint: Any, tmp_path: Path) -> None:
    assert asyncio.run(endpoint.judge(make, cache=str(tmp_path))(make.episode(result="a"))) == 0.7
    [file] = tmp_path.iterdir()
    file.write_text("")
    assert asyncio.run(endpoint.judge(make, cache=str(tmp_path))(make.episode(result="a"))) == 0.7
    assert (file.read_text(), len(endpoint.requests)) == ("0.7", 2)


async def test_a_cache_that_cannot_be_used_is_named_and_the_score_is_not_bought_twice(
    make: Any, endpoint: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        rule = endpoint.judge(make, cache=str(folder))
        assert isinstance(rule, Judge)
        with pytest.raises(JudgeError, match=rf"cache {folder} cannot be used .*Set `cache`"):
            await rule(make.episode(result="a"))


async def test_queries_run_side_by_side_without_mixing_their_rows(make: Any, tmp_path: Path) -> None:
    for number in range(4):
        with closing(sqlite3.connect(tmp_path / f"{number}.sqlite")) as connection:
            connection.executescript(f"CREATE TABLE t (n INTEGER); INSERT INTO t VALUES ({number});")
    rule = make.rule(kinds.REWARD, "sql_match", field="sql", database=tmp_path / "{database}.sqlite")

    async def value(number: int, found: int) -> float:
        metadata = {"sql": "SELECT n FROM t", "database": str(number)}
        return float(await rule(make.episode(result=f"SELECT {found} FROM t WHERE n >= 0", metadata=metadata)))

    pairs = [(number, found) for number in range(4) for found in range(4)] * 3
    assert await asyncio.gather(*(value(*pair) for pair in pairs)) == [float(a == b) for a, b in pairs]
