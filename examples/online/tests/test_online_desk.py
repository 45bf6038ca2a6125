"""The desk and what its policy imitates."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from desk import TOOLS, search, solve
from flights import Wish
from habits import ANY_AIRLINE, NAMED_AIRLINE, conversation, guess, lesson, search_airline, search_city
from users import is_right

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


def test_only_the_right_behaviour_answers_the_wish() -> None:
    plain = Wish("Rome", "Friday")
    for wish, right in ((plain, search_city), (WISH, search_airline)):
        for behaviour in (guess, search_city, search_airline) if wish.airline else (guess, search_city):
            assert is_right(behaviour(wish)[-1]["content"], wish) is (behaviour is right)


def test_demonstrations_have_the_shares_that_they_should_and_lessons_are_right() -> None:
    seen: Counter[tuple[bool, str]] = Counter()
    for index in range(4000):
        [_, user, *replies] = conversation(0, index)
        airline = " with " in user["content"]
        queries = [json.loads(c["function"]["arguments"])["query"] for r in replies for c in r.get("tool_calls", ())]
        seen[airline, "guess" if not queries else "airline" if " " in queries[0] else "city"] += 1
    for airline, shares in ((False, ANY_AIRLINE), (True, NAMED_AIRLINE)):
        total = sum(count for (kind, _), count in seen.items() if kind is airline)
        for behaviour, share in shares.items():
            name = behaviour.__name__.removeprefix("search_")
            assert seen[airline, name] / total == pytest.approx(share, abs=0.03)
    for index in range(100):
        [_, user, asked, _, _] = lesson(0, index)
        named = " with " in user["content"]
        assert (" " in json.loads(asked["tool_calls"][0]["function"]["arguments"])["query"]) is named
