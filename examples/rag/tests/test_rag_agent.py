"""The agent against a scripted model, with the real search behind it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import search_tool
from retrieval import CORPUS, Local, open_retriever, read_passages
from searches import (
    FLAWLESS,
    MOST_REPLIES,
    TOOLS,
    Asked,
    asked,
    behave,
    conversation,
    give_up,
    search_again,
    search_next,
    search_without_name,
)
from searches import (
    answer as answer_it,
)

Answer = Callable[[dict[str, str]], Awaitable[str]]


def searches_for(query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"content": None, "tool_calls": [{"id": f"call of {query}", "type": "function", "function": function}]}


async def test_the_agent_searches_until_it_can_answer(answer: Answer, model: Any) -> None:
    model.replies = [
        searches_for("country of Porto Alegre"),
        searches_for("capital of Brazil"),
        {"content": "Answer: Brasilia"},
    ]
    assert await answer({"question": "What is the capital of the country of Porto Alegre?"}) == "Answer: Brasilia"
    found = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert "- Porto Alegre: A city in Brazil." in found[0].splitlines()
    assert any("A country whose capital is Brasilia." in line for line in found[1].splitlines())
    assert all(len(each.splitlines()) == search_tool.PASSAGES for each in found)


async def test_an_agent_that_goes_round_in_circles_gives_up(answer: Answer, model: Any) -> None:
    model.replies = [searches_for("country of Lagos")]
    assert "Answer:" not in await answer({"question": "What is the capital of the country of Lagos?"})
    assert len(model.requests) == MOST_REPLIES


async def test_arguments_that_are_no_json_are_reported_to_the_model(answer: Answer, model: Any) -> None:
    call = searches_for("x")
    call["tool_calls"][0]["function"]["arguments"] = '{"query": '
    model.replies = [call, {"content": "Sorry."}]
    assert await answer({"question": "What?"}) == "Sorry."
    assert "rror" in model.requests[-1]["messages"][-1]["content"]


async def test_with_random_passages_the_right_search_finds_nothing(
    answer: Answer, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_tool, "retriever", open_retriever("random"))
    model.replies = [searches_for("country of Porto Alegre"), {"content": "Answer: Brasilia"}]
    await answer({"question": "What is the capital of the country of Porto Alegre?"})
    assert "Porto Alegre" not in model.requests[-1]["messages"][-1]["content"]


@pytest.mark.parametrize(
    "choices",
    [
        (search_next, search_next, search_next, search_next, answer_it),
        (search_without_name, search_next, search_again, give_up),
    ],
)
async def test_demonstrations_have_the_shape_of_what_the_sdk_sends(
    answer: Answer, model: Any, monkeypatch: pytest.MonkeyPatch, choices: Any
) -> None:
    """The policy is warmed up on exactly what the agent will show it."""
    question = next(q for q in (asked(7, index) for index in range(100)) if len(q.queries) == 4)
    todo = iter(choices)
    shown = behave(question, lambda _: next(todo))
    monkeypatch.setattr(search_tool, "retriever", Local(question.index))
    model.replies = [message for message in shown if message["role"] == "assistant"]
    assert await answer({"question": question.question}) == shown[-1]["content"]
    assert model.requests[-1]["messages"] == shown[:-1]
    assert [(t["type"], t["function"]["name"], t["function"]["parameters"]["properties"].keys()) for t in TOOLS] == [
        (t["type"], t["function"]["name"], t["function"]["parameters"]["properties"].keys())
        for t in model.requests[-1]["tools"]
    ]


def test_a_flawless_demonstration_answers_the_question() -> None:
    for index in range(100):
        question: Asked = asked(5, index)
        shown = behave(question, lambda situation: FLAWLESS[situation])
        assert shown[-1]["content"] == f"Answer: {question.values[-1]}"
        assert sum(message["role"] == "tool" for message in shown) == len(question.queries)


def test_warm_up_tells_no_real_fact() -> None:
    """Its names are real, and put together at random."""
    real = {str(each) for each in read_passages(CORPUS)}
    shown = [line.removeprefix("- ") for index in range(200) for line in _passages(conversation(0, index))]
    assert sum(line in real for line in shown) < len(shown) / 50


def _passages(messages: list[dict[str, Any]]) -> list[str]:
    return [line for message in messages if message["role"] == "tool" for line in message["content"].splitlines()]


def test_the_agent_does_not_know_agl() -> None:
    for module in ("researcher.py", "search_tool.py", "retrieval.py", "serve_index.py", "build_index.py"):
        assert "import agl" not in (Path(__file__).parents[1] / module).read_text()
        assert "from agl" not in (Path(__file__).parents[1] / module).read_text()
