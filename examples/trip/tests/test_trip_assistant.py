"""The assistant against a scripted model."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from behaviours import answer, ask_airline, ask_refund, behave, calculate_words, search_airline, subtract
from trip_tools import MOST_CALLS, TOOLS
from trips import Split, traveller, trip

Help = Callable[[dict[str, str]], Awaitable[str]]

NAME = traveller(Split.TRAIN, 0, 0)
ASKED = trip(NAME)
INPUT = {"question": ASKED.question, "traveller": NAME}


def calls(tool: str, arguments: str, id_: str = "call_0") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": tool, "arguments": arguments}}


async def test_a_good_episode_takes_every_call_and_sends_what_was_demonstrated(
    help_traveller: Help, model: Any
) -> None:
    """The policy is warmed up on exactly what the assistant will show it."""
    todo = iter((ask_airline, search_airline, ask_refund, subtract, answer))
    shown = behave(ASKED, lambda _: next(todo))
    model.replies = [message for message in shown if message["role"] == "assistant"]
    assert await help_traveller(INPUT) == f"You pay = {ASKED.result}."
    assert len(model.requests) == MOST_CALLS
    assert model.requests[-1]["messages"] == shown[:-1]
    assert model.requests[-1]["tools"] == TOOLS


async def test_the_model_is_told_no_more_than_the_question(help_traveller: Help, model: Any) -> None:
    model.replies = [{"content": "You pay 0."}]
    await help_traveller(INPUT)
    assert model.requests[0]["messages"][1:] == [{"role": "user", "content": ASKED.question}]
    sent = json.dumps(model.requests[0])
    assert NAME not in sent
    assert ASKED.airline not in sent


async def test_a_failing_tool_is_told_to_the_model(help_traveller: Help, model: Any) -> None:
    asked = calculate_words(ASKED, "")
    model.replies = [
        {"content": None, "tool_calls": [calls("calculator", asked.text)]},
        {"content": None, "tool_calls": [calls("search", "no JSON")]},
        {"content": "Sorry."},
    ]
    assert await help_traveller(INPUT) == "Sorry."
    told = [message["content"] for message in model.requests[-1]["messages"] if message["role"] == "tool"]
    assert [each.partition(":")[0] for each in told] == ["Error", "Error"]


async def test_parallel_tool_calls_are_all_answered(help_traveller: Help, model: Any) -> None:
    both = [calls("memory", f'{{"key": "{key}"}}', key) for key in ("airline", "refund")]
    model.replies = [{"content": None, "tool_calls": both}, {"content": "Well."}]
    await help_traveller(INPUT)
    told = {m["tool_call_id"]: m["content"] for m in model.requests[-1]["messages"] if m["role"] == "tool"}
    assert told == {"airline": f"airline {ASKED.airline}", "refund": f"refund {ASKED.refund}"}


async def test_an_assistant_that_goes_round_in_circles_gives_up(help_traveller: Help, model: Any) -> None:
    model.replies = [{"content": None, "tool_calls": [calls("memory", '{"key": "seat"}')]}]
    result = await help_traveller(INPUT)
    assert not any(c.isdigit() for c in result)
    assert len(model.requests) == MOST_CALLS


def test_the_assistant_does_not_know_agl() -> None:
    for module in ("assistant.py", "trip_tools.py", "trips.py"):
        assert "agl_" not in (Path(__file__).parents[1] / module).read_text()
