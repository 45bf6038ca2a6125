"""The desk and what its policy imitates."""

from __future__ import annotations

from typing import Any

import pytest
from desk import TOOLS, search, solve
from flights import Wish
from make_online import search_airline, search_city

WISH = Wish("Rome", "Friday", "Kite")


async def test_the_desk_searches_as_the_model_asks_and_says_what_it_says(model: Any) -> None:
    model.replies = search_airline(WISH)[::2]
    assert await solve({"question": WISH.question}) == f"It costs {WISH.result}."
    [first, second] = model.requests
    assert [message["content"] for message in first["messages"]] == ["Find a fare.", WISH.question]
    assert first["tools"] == TOOLS
    assert second["messages"][-1]["content"] == f"fare {WISH.result}"


async def test_the_desk_gives_up(model: Any) -> None:
    model.replies = search_city(WISH)[:1]
    assert await solve({"question": WISH.question}) == "I could not find out."


@pytest.mark.parametrize("arguments", ["", "[]", "{}", '{"query": 1}', '{"query": "Rome Oslo"}', '{"query": "Kite"}'])
def test_a_search_that_means_nothing_says_so(arguments: str) -> None:
    assert search(arguments).startswith("Error: ")
