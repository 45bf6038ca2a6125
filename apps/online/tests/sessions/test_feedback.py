"""Feedback is joined with what it is about, however late, and counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from .deployed import Deployed, deployed

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
    headers = {"Authorization": f"Bearer {use.keys.of_application('shop')}"}
    reply = await use.http.post(f"{use.server.base_url}/v1/{route}", json=bodies[route], headers=headers)
    call = reply.json()["id"]
    said = await use.say(call=call, rewards={"thumbs": 1, "short": -1})
    [session] = await use.sessions()
    assert said.json() == {"session": session.id, "call": call, "new": True}
    assert await use.numbers(session.id) == {("thumbs", call): 1.0, ("short", call): -1.0}


async def test_it_may_come_after_the_end_and_after_a_restart_by_id_or_name(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        reply = await use.ask("a", "talk", **{"x-agl-session-end": "1"})
    async with deployed(tmp_path) as use:
        [session] = await use.sessions()
        for target in ({"call": reply.id}, {"session": session.id}, {"session": "talk"}):
            said = await use.say(**target, rewards={"right": 1.0})
            assert (said.status_code, said.json()["session"]) == (200, session.id)
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
    assert [feedback.note for feedback in await use.said(session.id)][:2] == ["thanks", None]


async def test_what_cannot_be_joined_says_why(use: Deployed) -> None:
    reply = await use.ask("a", "talk")
    [session] = await use.sessions()
    for body, status, code in (
        ({"call": "chatcmpl-123"}, 404, "call_unknown"),
        ({"call": reply.id + "0"}, 404, "call_unknown"),
        ({"session": "never"}, 404, "session_unknown"),
        ({"session": f"use-{'0' * 24}-{'0' * 12}"}, 404, "session_unknown"),
    ):
        said = await use.say(**body, rewards=UP)
        assert (said.status_code, said.json()["error"]["code"]) == (status, code), body
    for target in ({"call": reply.id}, {"session": session.id}):
        said = await use.say(application="mail", **target, rewards=UP)
        assert (said.status_code, said.json()["error"]["code"]) == (403, "foreign_session")
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
