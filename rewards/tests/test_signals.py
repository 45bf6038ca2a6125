"""Signs of trouble in sessions, from what was recorded alone."""

from __future__ import annotations

import difflib
import random

from agl_core.testing import episodes as make
from agl_core.types import Episode, Mode, ToolStatus, Transition
from agl_rewards.signals import abandoned, asked_again, tool_failed


def talk(*users: str, result: object = None, last: str = "Done.") -> Episode:
    """One call for each text of the user, each with all texts so far."""
    transitions: list[Transition] = []
    for turn in range(len(users)):
        messages = tuple({"role": "user", "content": text} for text in users[: turn + 1])
        said = last if turn == len(users) - 1 else "Here."
        transitions.append(make.transition(turn, messages=messages, response={"role": "assistant", "content": said}))
    return make.episode(*transitions, mode=Mode.USE, result=result)


def turns(found: object) -> list[str]:
    assert found is None or isinstance(found, dict)
    return [key.call for key in found or {}]


def test_a_request_that_is_repeated_or_corrected_is_a_sign_about_the_reply_before_it() -> None:
    assert turns(asked_again(talk("Book a flight to Rome", "And a hotel?", "and a  hotel"))) == ["r-c1"]
    assert turns(asked_again(talk("Book a flight to Rome", "No, I meant Romania", "Thanks"))) == ["r-c0"]
    assert asked_again(talk("Book a flight to Rome", "No problem, thanks!")) is None
    assert asked_again(talk("Book a flight to Rome")) is None


def test_a_long_request_is_compared_as_a_short_one_would_be() -> None:
    drawn = random.Random(0)
    words = ["".join(drawn.choices("abcdefghij", k=drawn.randint(2, 9))) for _ in range(500)]
    for share, again in ((0.0, True), (0.02, True), (0.5, False), (1.0, False)):
        asked = drawn.choices(words, k=200)
        anew = [drawn.choice(words) if drawn.random() < share else word for word in asked]
        before, new = " ".join(asked), " ".join(anew)
        exact = difflib.SequenceMatcher(None, before, new, autojunk=False).ratio()
        assert (exact >= 0.8) is (asked_again(talk(before, new)) is not None) is again, share
    assert asked_again(talk("Please summarise this: " + before, "Thanks!")) is None


def test_a_request_of_any_length_is_compared_at_once() -> None:
    before, new = ("".join("ab" + "c" * (each % period) for each in range(8000)) for period in (7, 5))
    assert asked_again(talk(before, new)) is None
    assert turns(asked_again(talk(before, before + "!"))) == ["r-c0"]


def test_tool_calls_of_one_request_are_no_repetition() -> None:
    one = talk("Book a flight to Rome", "x")
    same = make.transition(1, messages=one.transitions[0].messages)
    assert asked_again(make.episode(one.transitions[0], same, mode=Mode.USE)) is None


def test_a_failed_tool_is_a_sign_about_its_call() -> None:
    failed = make.transition(1, make.tool_result("o", status=ToolStatus.TIMEOUT))
    fine = make.transition(0, make.tool_result("p"))
    assert turns(tool_failed(make.episode(fine, failed))) == ["r-c1"]
    assert tool_failed(make.episode(fine)) is None


def test_a_session_is_abandoned_that_went_idle_while_its_last_reply_asked_for_something() -> None:
    idle = {"ended_by": "idle"}
    assert turns(abandoned(talk("Hi", last="Which city?", result=idle))) == ["r-c0"]
    assert abandoned(talk("Hi", last="Which city?", result={"ended_by": "request"})) is None
    assert abandoned(talk("Hi", last="Booked.", result=idle)) is None
    calls = make.transition(0, response={"role": "assistant", "tool_calls": [{"id": "c"}]})
    assert turns(abandoned(make.episode(calls, result=idle))) == ["r-c0"]
