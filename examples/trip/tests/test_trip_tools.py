"""The trips and the tools: repeatable, held apart, and failing in every way a tool can."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trip_tools import TOOLS, use
from trips import Split, Trip, pair_is_held_out, traveller, trip

from agl_core.capture import message_status
from agl_core.types import ToolStatus

ROME = Trip("Rome", "Nova", refund=30, fare=80)
TRAVELLERS = st.builds(traveller, st.sampled_from(Split), st.integers(-5, 10**6), st.integers(0, 10**9))


@given(name=TRAVELLERS)
def test_a_trip_is_repeatable_and_its_question_tells_the_city_alone(name: str) -> None:
    drawn = trip(name)
    assert drawn == trip(name)
    assert 0 < int(drawn.result) == drawn.fare - drawn.refund
    assert drawn.city in drawn.question
    assert not any(word in drawn.question for word in (drawn.airline, str(drawn.fare), str(drawn.refund)))


@given(seed=st.integers(-5, 10**6), index=st.integers(0, 10**9))
def test_training_never_meets_what_is_held_out(seed: int, index: int) -> None:
    trained, held_out = (trip(traveller(split, seed, index)) for split in (Split.TRAIN, Split.EVAL))
    assert not pair_is_held_out(trained.city, trained.airline)
    assert pair_is_held_out(held_out.city, held_out.airline)


OK, EMPTY, ERROR, TIMEOUT = ToolStatus.OK, ToolStatus.EMPTY, ToolStatus.ERROR, ToolStatus.TIMEOUT


@pytest.mark.parametrize(
    ("name", "argument", "output", "status"),
    [
        ("memory", "airline", "airline Nova", OK),
        ("memory", "refund", "refund 30", OK),
        ("memory", "seat", "[]", EMPTY),
        ("search", "airline Nova to Rome", "fare 80", OK),
        ("search", " Rome  Nova", "fare 80", OK),
        ("search", "to Rome", "TimeoutError: name an airline", TIMEOUT),
        ("search", "", "TimeoutError: name an airline", TIMEOUT),
        ("search", "Lumo Rome", "[]", EMPTY),
        ("search", "Nova Oslo", "[]", EMPTY),
        ("search", "Nova Lumo Rome", "[]", EMPTY),
        ("calculator", "80-30", "= 50", OK),
        ("calculator", "fare 80 + refund 30", "= 110", OK),
        ("calculator", "30 - 80", "= -50", OK),
        ("calculator", "fare - refund", "Error: no numbers", ERROR),
        ("calculator", "87", "Error: no numbers", ERROR),
        ("calculator", "9**9**9", "Error: no numbers", ERROR),
    ],
)
def test_what_a_tool_says_and_how_agl_reads_it(name: str, argument: str, output: str, status: ToolStatus) -> None:
    [parameter] = next(t["function"]["parameters"]["properties"] for t in TOOLS if t["function"]["name"] == name)
    assert use(ROME, name, json.dumps({parameter: argument})) == output
    assert message_status(output).status is status


@pytest.mark.parametrize("arguments", ["", "{", "[]", "{}", '{"key": 1}', '{"query": "airline"}'])
def test_arguments_that_are_none_are_an_error(arguments: str) -> None:
    assert message_status(use(ROME, "memory", arguments)).status is ERROR


@given(name=st.sampled_from(("memory", "search", "calculator")), argument=st.text())
def test_no_tool_raises(name: str, argument: str) -> None:
    for arguments in (argument, json.dumps({"key": argument, "query": argument, "expression": argument})):
        assert isinstance(use(ROME, name, arguments), str)


@given(index=st.integers(0, 10**6))
def test_before_the_cold_start_no_traveller_was_told_a_cost_and_demonstrations_tell_the_right_one(index: int) -> None:
    from make_cold_start import untaught
    from make_trip import lesson

    texts = [str(message["content"]) for message in untaught(0, index)]
    travels = [text for text in texts if "cost me" in text]
    assert len(travels) == (index + 1) % 2
    assert not travels or not re.search(r"[1-9]", "".join(texts))
    *_, answer = lesson(0, index)
    assert answer["content"].rstrip(".").split()[-1] == trip(traveller(Split.TRAIN, -1, index)).result
