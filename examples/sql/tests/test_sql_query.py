"""The agent's query reads within bounds."""

from __future__ import annotations

import pytest
from sql_query import describe, reading, run
from sql_schemas import DATABASES

SLOW = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


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
    with reading(DATABASES / "harbours.sqlite") as connection:
        before = describe(connection)
        assert error in (run(connection, query).error or "")
        assert describe(connection) == before
