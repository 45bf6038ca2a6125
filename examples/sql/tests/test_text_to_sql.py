"""The agent, against a scripted model: who is asked when, what the query may do, and what its result is."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sql_habits import FLAWLESS, MIXED, demonstrated
from sql_prompts import CHECK, REWRITE, WRITE
from sql_query import describe, reading, run
from sql_schemas import DATABASES

EXAMPLE = Path(__file__).parents[1]
SHIPS = {"question": "How many ship have flag 'Red' ?", "database": str(DATABASES / "harbours.sqlite")}
SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


async def test_a_query_that_the_checker_likes_is_the_answer(answer: Any, model: Any) -> None:
    model.replies = ["SELECT count(*) FROM ship", "ok"]
    assert await answer(SHIPS) == "SELECT count(*) FROM ship"
    assert model.asked == [WRITE, CHECK]
    assert "table ship : ship_id harbour_id captain length_cm flag" in model.requests[0]["messages"][1]["content"]
    with closing(sqlite3.connect(SHIPS["database"])) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM ship")
    assert f"result : 1 rows, first {count}" in model.requests[1]["messages"][1]["content"]


async def test_the_rewriter_sees_error_and_remark_and_is_checked_in_turn(answer: Any, model: Any) -> None:
    model.replies = ["SELECT x FROM ship", "x is no column", "SELECT flag FROM ship", "ok"]
    assert await answer(SHIPS) == "SELECT flag FROM ship"
    assert model.asked == [WRITE, CHECK, REWRITE, CHECK]
    told = model.requests[2]["messages"][1]["content"]
    assert "query : SELECT x FROM ship\nresult : error: no such column: x\nremark : x is no column" in told


async def test_there_are_two_rewrites_at_most(answer: Any, model: Any) -> None:
    model.replies = ["SELECT 1", "no", "SELECT 2", "no", "SELECT 3"]
    assert await answer(SHIPS) == "SELECT 3"
    assert model.asked == [WRITE, CHECK, REWRITE, CHECK, REWRITE]


async def test_a_query_may_be_in_a_block_of_code(answer: Any, model: Any) -> None:
    model.replies = ["Here it is:\n```sql\nSELECT 1\n```", "OK."]
    assert await answer(SHIPS) == "SELECT 1"


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("DELETE FROM ship", "not authorized"),
        ("ATTACH 'other.sqlite' AS other", "not authorized"),
        ("", "not a query"),
        ("SELECT 1; SELECT 2", "one statement"),
        (SLOW, "interrupted"),
        ("SELECT a.flag FROM ship AS a, ship AS b, ship AS c", "more than 1000 rows"),
        ("SELECT length(randomblob(1000000))", "too big"),
    ],
)
def test_a_query_reads_within_bounds(query: str, error: str) -> None:
    with reading(Path(SHIPS["database"])) as connection:
        before = describe(connection)
        assert error in (run(connection, query).error or "")
        assert describe(connection) == before


@pytest.mark.parametrize("shares", [MIXED, FLAWLESS])
async def test_demonstrations_have_the_shape_of_what_langchain_sends(answer: Any, model: Any, shares: Any) -> None:
    """The policy is warmed up on exactly what the agent will show it."""
    model.replies = ["SELECT flag FROM ship", "wrong columns", "SELECT 1", "ok"]
    await answer(SHIPS)
    shown = {demo[0]["content"]: demo for demo in (demonstrated(str(i), shares) for i in range(40))}
    assert shown.keys() == set(model.asked) == {WRITE, CHECK, REWRITE}
    for request in model.requests:
        demo = shown[request["messages"][0]["content"]]
        assert [message.keys() for message in request["messages"]] == [message.keys() for message in demo[:-1]]
        assert "tools" not in request
        for here, there in zip(request["messages"], demo[:-1], strict=True):
            assert here["role"] == there["role"]
            assert words(here["content"]) >= words(there["content"]) - {"result :"}


def words(text: str) -> set[str]:
    """The words that name the parts of a prompt."""
    return {part for part in ("table ", "question :", "query :", "result :", "remark :") if part in text}


def test_the_agent_does_not_know_agl() -> None:
    for module in ("text_to_sql.py", "sql_prompts.py", "sql_query.py"):
        assert "agl_" not in (EXAMPLE / module).read_text()
