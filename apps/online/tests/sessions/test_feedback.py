"""Feedback is joined with what it is about, however late, counts once, and becomes the session's reward."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agl_core.learning.rewards import ScoringRule, score
from agl_core.learning.transitions import is_distorted
from agl_core.testing import episodes as make
from agl_core.types import Annotation, DropReason, Episode, Mode, Sampling
from agl_online.plugin import users_said

from .conftest import Deployed, deployed

UP, DOWN = {"thumbs": 1}, {"thumbs": 0}


@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages", "completions"])
async def test_the_id_of_the_clients_reply_joins_it(use: Deployed, route: str) -> None:
    messages = [{"role": "user", "content": "hello"}]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"model": "default", "messages": messages},
        "responses": {"model": "default", "input": "hello"},
        "messages": {"model": "default", "max_tokens": 9, "messages": messages},
        "completions": {"model": "default", "prompt": "hello"},
    }
    call = (await use.send(f"/v1/{route}", use.key(), bodies[route])).json()["id"]
    answer = await use.say(call=call, rewards={"thumbs": 1, "short": -1})
    [session] = await use.sessions()
    assert answer.json() == {"session": session.id, "call": call, "new": True}
    assert await use.numbers(session.id) == {("thumbs", call): 1.0, ("short", call): -1.0}


async def test_it_may_come_after_the_end_and_after_a_restart_by_id_or_name(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        reply = await use.ask("a", "talk", **{"x-agl-session-end": "1"})
    async with deployed(tmp_path) as use:
        [session] = await use.sessions()
        for target in ({"call": reply.id}, {"session": session.id}, {"session": "talk"}):
            answer = await use.say(**target, rewards={"right": 1.0})
            assert (answer.status_code, answer.json()["session"]) == (200, session.id)
        assert await use.numbers(session.id) == {("right", reply.id): 1.0, ("right", None): 1.0}
        await use.ask("b", "talk")
        [_, second] = await use.sessions()
        assert (await use.say(session="talk", rewards=UP)).json()["session"] == second.id, "a name means its latest"


async def test_what_is_sent_twice_counts_once_and_the_latest_number_counts(use: Deployed) -> None:
    reply = await use.ask("a", "talk")
    [session] = await use.sessions()
    body = {"call": reply.id, "id": "f-1", "rewards": UP, "note": "thanks"}
    answers = await asyncio.gather(*(use.say(**body) for _ in range(5)))
    assert sorted(answer.json()["new"] for answer in answers) == [False] * 4 + [True]
    assert (await use.say(call=reply.id, id="f-2", rewards=DOWN)).json()["new"]
    assert not (await use.say(**body)).json()["new"], "a retry that comes late"
    assert await use.numbers(session.id) == {("thumbs", reply.id): 0.0}, "does not undo what came after it"
    for rewards in (UP, DOWN, UP):
        assert (await use.say(session="talk", rewards=rewards)).json()["new"]
    assert (await use.numbers(session.id))["thumbs", None] == 1.0
    assert [feedback.said["note"] for feedback in await use.feedback(session.id)][:2] == ["thanks", None]


async def test_what_cannot_be_joined_says_why(use: Deployed) -> None:
    reply = await use.ask("a", "talk")
    [session] = await use.sessions()
    for body, status, code in (
        ({"call": "chatcmpl-123"}, 404, "call_unknown"),
        ({"call": reply.id + "0"}, 404, "call_unknown"),
        ({"session": "never"}, 404, "session_unknown"),
        ({"session": f"use-{'0' * 24}-{'0' * 12}"}, 404, "session_unknown"),
    ):
        answer = await use.say(**body, rewards=UP)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), body
    for target in ({"call": reply.id}, {"session": session.id}):
        answer = await use.say(application="mail", **target, rewards=UP)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_session")
    assert (await use.say(application="mail", session="talk", rewards=UP)).status_code == 404, "a name of another's"
    for wrong in (
        {"rewards": UP},
        {"session": "talk"},
        {"session": "talk", "call": reply.id, "rewards": UP},
        {"session": "talk", "rewards": {"thumbs": "1"}},
        {"session": "talk", "rewards": {"thumbs": 1e300}},
    ):
        assert (await use.say(**wrong)).status_code == 422, wrong
    assert await use.numbers(session.id) == {}


FIRST, SECOND = "r-c0", "r-c1"


def feedback(call: str | None = None, **rewards: float) -> Annotation:
    return Annotation("r", 0, f"{call}-{rewards}", 0.0, {"rewards": rewards, "note": None}, call)


def session(*given: Annotation, calls: int = 2, **changes: Any) -> Episode:
    tokens = np.arange(3, dtype=np.int32)
    ids = {"prompt_ids": tokens, "response_ids": tokens, "logprobs": np.full(3, -0.5, np.float32)}
    transitions = [make.transition(turn, **{**ids, **changes}) for turn in range(calls)]
    return make.episode(*transitions, mode=Mode.USE, annotations=given)


async def scored(episode: Episode, weight: float = 1.0) -> Episode:
    scored_episode, errors = await score(episode, [ScoringRule("users", users_said, weight)], {})
    assert not errors
    return scored_episode


async def test_what_is_said_of_a_session_is_its_terminal_reward_and_of_a_call_that_calls_own() -> None:
    episode = await scored(session(feedback(thumbs=1.0), feedback(SECOND, thumbs=0.0), feedback(FIRST, helpful=0.5)))
    assert episode.terminal == 1.0
    assert [t.reward for t in episode.transitions] == [0.5, 0.0]
    assert [len(t.rewards) for t in episode.transitions] == [1, 1], "a thumbs down is a reward of 0, not none"
    only_calls = await scored(session(feedback(SECOND, thumbs=1.0)))
    assert (only_calls.terminal, [len(t.rewards) for t in only_calls.transitions]) == (0.0, [0, 1])


async def test_names_are_weighed_and_those_that_were_not_said_do_not_count() -> None:
    given = session(feedback(thumbs=1.0, helpful=0.0), feedback(rude=0.0))
    assert users_said(given) == {"session": pytest.approx(1 / 3)}
    assert users_said(given, weights={"thumbs": 3.0, "rude": 0.0}) == {"session": pytest.approx(3 / 4)}
    assert users_said(given, weights={"thumbs": 0.0, "helpful": 0.0, "rude": 0.0}) is None
    assert users_said(session(feedback(thumbs=0.0), feedback(thumbs=1.0))) == {"session": 1.0}, "the later one counts"


async def test_missing_feedback_is_missing() -> None:
    silent = await scored(session())
    assert (silent.dropped, silent.terminal) == (DropReason.NO_REWARD, None)
    observed = await scored(session(feedback(thumbs=1.0)), weight=0.0)
    assert observed.dropped is DropReason.NO_REWARD, "a rule without a weight only looks"


@pytest.mark.parametrize(
    ("request_fields", "sampling", "distorted"),
    [
        ({}, {}, False),
        ({}, {"temperature": 0.3}, False),
        ({}, {"temperature": 0.0}, True),
        ({}, {"top_p": 0.9}, True),
        ({"top_k": 40}, {}, True),
        ({"top_k": -1, "frequency_penalty": 0, "logit_bias": {}, "min_p": None}, {}, False),
        ({"presence_penalty": 0.5}, {}, True),
        ({"logit_bias": {"17": -100}}, {}, True),
    ],
)
def test_what_an_application_asks_for_decides(
    request_fields: dict[str, Any], sampling: dict[str, float], distorted: bool
) -> None:
    request = {"messages": [], **request_fields}
    call = make.call(request=request, effective=Sampling(**{"temperature": 1.0, "top_p": 1.0, **sampling}))
    assert is_distorted(call, Mode.USE) is distorted
    assert not is_distorted(call, Mode.TRAIN), "the gateway leaves these fields out in training"
