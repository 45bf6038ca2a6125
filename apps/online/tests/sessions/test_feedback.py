"""Feedback is joined with what it is about, however late, and counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_core.types import AttemptKey

from .deployed import Deployed, deployed


async def test_the_id_of_the_clients_reply_joins_it(use: Deployed) -> None:
    first, second = await use.ask("a", "talk"), await use.ask("b", "talk")
    said = await use.say(call=second.id, reward=0.25, parts={"polite": 1, "short": -1}, thumbs="up")
    [session] = await use.sessions()
    assert said.json() == {"session": session.id, "call": second.id, "new": True}
    assert await use.numbers(session.id) == {
        ("feedback", second.id): 0.25, ("polite", second.id): 1.0, ("short", second.id): -1.0,
        ("thumbs", second.id): 1.0,
    }  # fmt: skip
    await use.say(call=first.id, thumbs="down")
    assert (await use.numbers(session.id))["thumbs", first.id] == 0.0


@pytest.mark.parametrize("route", ["responses", "messages", "completions"])
async def test_replies_of_every_api_can_be_named(use: Deployed, route: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "responses": {"model": "default", "input": "hello"},
        "messages": {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]},
        "completions": {"model": "default", "prompt": "hello"},
    }
    headers = {"Authorization": f"Bearer {use.keys.of_application('shop')}"}
    reply = await use.http.post(f"{use.server.base_url}/v1/{route}", json=bodies[route], headers=headers)
    assert (await use.say(call=reply.json()["id"], thumbs="up")).status_code == 200


async def test_it_may_come_after_the_end_and_after_a_restart_by_id_or_name(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        reply = await use.ask("a", "talk", **{"x-agl-session-end": "1"})
    async with deployed(tmp_path) as use:
        [session] = await use.sessions()
        for target in ({"call": reply.id}, {"session": session.id}, {"session": "talk"}):
            said = await use.say(**target, reward=1.0)
            assert (said.status_code, said.json()["session"]) == (200, session.id)
        assert await use.numbers(session.id) == {("feedback", reply.id): 1.0, ("feedback", None): 1.0}


async def test_a_name_means_its_latest_session(use: Deployed) -> None:
    early = await use.ask("a", "talk", **{"x-agl-session-end": "1"})
    await use.post("sessions/end", use.keys.of_application("shop"), session="talk")
    await use.ask("b", "talk")
    first, second = await use.sessions()
    assert (await use.say(session="talk", thumbs="up")).json()["session"] == second.id
    assert (await use.say(session="talk", call=early.id, thumbs="up")).json()["session"] == first.id
    mixed = await use.say(session=second.id, call=early.id, thumbs="up")
    assert (mixed.status_code, mixed.json()["error"]["code"]) == (409, "session_mismatch")


async def test_the_trace_of_a_request_means_its_last_reply(use: Deployed) -> None:
    trace, other = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"

    async def ask(text: str, trace: str, application: str = "shop") -> Any:
        traceparent = f"00-{trace}-00f067aa0ba902b7-01"
        return await use.ask(text, "talk", application=application, traceparent=traceparent)

    await ask("a", trace)
    second = await ask("b", trace)
    await ask("c", other)
    mails = await ask("the same request, in another service", trace, "mail")
    said = await use.say(trace=trace, thumbs="up")
    [session, _] = await use.sessions()
    assert said.json() == {"session": session.id, "call": second.id, "new": True}
    assert not (await use.say(call=second.id, thumbs="up")).json()["new"]
    assert (await use.say(application="mail", trace=trace, thumbs="up")).json()["call"] == mails.id
    assert (await use.say(trace=trace, session="talk", reward=1)).json()["call"] == second.id
    for body, status, code in (
        ({"trace": "f" * 32}, 404, "trace_unknown"),
        ({"trace": other, "application": "mail"}, 403, "foreign_session"),
        ({"trace": other, "session": "never"}, 404, "session_unknown"),
    ):
        refused = await use.say(**body, thumbs="down")
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), body
    assert (await use.say(trace="4BF9", thumbs="up")).status_code == 422
    assert "a call and a trace" in (await use.say(trace=trace, call=second.id, thumbs="up")).text
    deleted = await use.post("sessions/delete", use.operator, sessions=[session.id])
    assert deleted.status_code == 200
    assert (await use.say(trace=other, thumbs="up")).status_code == 404


async def test_what_is_sent_twice_counts_once_and_the_latest_number_counts(use: Deployed) -> None:
    reply = await use.ask("a", "talk")
    key = AttemptKey((await use.sessions())[0].id, 0)
    body = {"call": reply.id, "id": "f-1", "thumbs": "up", "note": "thanks"}
    answers = await asyncio.gather(*(use.say(**body) for _ in range(5)))
    assert sorted(each.json()["new"] for each in answers) == [False] * 4 + [True]
    assert (await use.say(call=reply.id, id="f-2", thumbs="down")).json()["new"]
    assert not (await use.say(**body)).json()["new"], "a retry that comes late"
    assert await use.numbers(key.rollout) == {("thumbs", reply.id): 0.0}, "does not undo what came after it"
    other = await use.say(call=reply.id, id="f-1", thumbs="down")
    assert (other.status_code, other.json()["error"]["code"]) == (409, "feedback_known")
    for thumbs, new in (("up", True), ("up", False), ("down", True), ("up", True)):
        assert (await use.say(session="talk", thumbs=thumbs)).json()["new"] is new
    assert (await use.numbers(key.rollout))["thumbs", None] == 1.0
    assert [each.note for each in await use.said(key.rollout)][:2] == ["thanks", None]


async def test_what_cannot_be_joined_says_why(use: Deployed) -> None:
    reply = await use.ask("a", "talk")
    [session] = await use.sessions()
    for body, status, code in (
        ({"call": "chatcmpl-123"}, 404, "call_unknown"),
        ({"call": reply.id + "0"}, 404, "call_unknown"),
        ({"session": "never"}, 404, "session_unknown"),
        ({"session": f"use-{'0' * 24}-{'0' * 12}"}, 404, "session_unknown"),
    ):
        said = await use.say(**body, thumbs="up")
        assert (said.status_code, said.json()["error"]["code"]) == (status, code), body
    for target in ({"call": reply.id}, {"session": session.id}):
        said = await use.say(application="mail", **target, thumbs="up")
        assert (said.status_code, said.json()["error"]["code"]) == (403, "foreign_session")
    assert (await use.say(application="mail", session="talk", thumbs="up")).status_code == 404, "a name of another's"
    for body, says in (
        ({"thumbs": "up"}, "neither a call nor a session nor a trace"),
        ({"session": "talk"}, "says nothing"),
        ({"session": "talk", "reward": "1"}, "reward"),
        ({"session": "talk", "reward": 1e300}, "reward"),
        ({"session": "talk", "parts": {"thumbs": 1}}, "has a field of its own"),
        ({"session": "talk", "thumbs": "sideways"}, "thumbs"),
    ):
        said = await use.say(**body)
        assert said.status_code == 422, body
        assert says in said.json()["error"]["message"]
    assert await use.numbers(session.id) == {}
