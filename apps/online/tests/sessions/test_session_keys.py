"""Who may do what with sessions: each key opens its own door, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from agl_core.types import AttemptKey

from .deployed import Deployed, deployed

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}


async def post(use: Deployed, path: str, key: str, body: Any = CHAT, **headers: str) -> httpx.Response:
    return await use.http.post(
        f"{use.server.base_url}{path}", json=body, headers={"Authorization": f"Bearer {key}", **headers}
    )


async def test_no_key_opens_anothers_door(use: Deployed) -> None:
    shop = (await use.post("sessions", use.keys.of_application("shop"), name="talk")).json()
    mail = (await use.post("sessions", use.keys.of_application("mail"), name="talk")).json()
    reply = await use.ask("hello", "other")
    keys = {
        "application": use.keys.of_application("shop"),
        "session": shop["key"],
        "feedback": use.keys.of_feedback("shop"),
        "worker": use.server.keys.worker,
        "operator": use.operator,
        "attempt": use.server.keys.of_attempt(AttemptKey(shop["session"], 0)),
        "lease": use.server.keys.of_lease(AttemptKey(shop["session"], 0)),
        "wrong": "agl-wrong",
        "too short": "agl-",
    }
    calls, own = "/v1/chat/completions", f"{shop['path']}/v1/chat/completions"
    foreign = f"{mail['path']}/v1/chat/completions"
    doors: dict[str, tuple[str, Any, set[str]]] = {
        "a model call": (calls, CHAT, {"application"}),
        "a call of the session": (own, CHAT, {"session"}),
        "a call of another application's session": (foreign, CHAT, set()),
        "beginning": ("/agl/v1/sessions", {}, {"application"}),
        "ending": ("/agl/v1/sessions/end", {"session": "talk"}, {"application"}),
        "feedback": ("/agl/v1/feedback", {"call": reply.id, "rewards": {"thumbs": 1}}, {"feedback"}),
        "deletion": ("/agl/v1/sessions/delete", {"sessions": ["use-x"]}, {"operator"}),
        "a lease": ("/agl/v1/leases", {"worker": "w", "capacity": 1}, {"worker"}),
    }
    for door, (path, body, whose) in doors.items():
        for name, key in keys.items():
            got = await post(use, path, key, body)
            assert (got.status_code != 401) is (name in whose), (door, name, got.status_code, got.text)
    for name, key in keys.items():
        named = await use.http.get(f"{use.server.base_url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert (named.status_code == 200) is (name == "application"), name
    assert not [call for call in await use.calls() if call.rollout == mail["session"]]


async def test_a_session_is_not_reached_by_a_header_without_its_key(use: Deployed) -> None:
    shop, other = [(await use.post("sessions", use.keys.of_application("shop"))).json() for _ in range(2)]
    stamped = {"x-agl-rollout": f"{other['session']}/0"}
    for key in (shop["key"], use.keys.of_application("shop"), use.keys.of_application("mail"), use.server.keys.worker):
        assert (await post(use, "/v1/chat/completions", key, CHAT, **stamped)).status_code == 401
    assert (await post(use, "/v1/chat/completions", other["key"], CHAT, **stamped)).status_code == 200
    assert [call.rollout for call in await use.calls()] == [other["session"]]


async def test_applications_do_not_end_or_see_each_others_sessions(use: Deployed) -> None:
    begun = (await use.post("sessions", use.keys.of_application("shop"), name="talk")).json()
    mail = use.keys.of_application("mail")
    assert (await use.post("sessions/end", mail, session=begun["session"])).status_code == 403
    assert (await use.post("sessions/end", mail, session="talk")).status_code == 404
    same_name = (await use.post("sessions", mail, name="talk")).json()
    assert same_name["session"].split("-")[1] != begun["session"].split("-")[1]
    assert use.counted("open") == 2


async def test_an_agent_of_training_is_no_application(use: Deployed) -> None:
    attempt = await use.stack.lease()
    key = use.stack.key(attempt)
    begun = (await use.post("sessions", use.keys.of_application("shop"))).json()
    assert (await post(use, f"{begun['path']}/v1/chat/completions", key)).status_code == 401
    for route in ("sessions", "sessions/end", "feedback", "sessions/delete"):
        assert (await use.post(route, key)).status_code == 401
    for mine in (begun["key"], use.keys.of_application("shop"), use.keys.of_feedback("shop")):
        own = f"/rollout/{attempt.rollout}/attempt/{attempt.attempt}/v1/chat/completions"
        assert (await post(use, own, mine)).status_code == 401


async def test_another_number_makes_the_old_keys_of_an_application_invalid(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        begun = (await use.post("sessions", use.keys.of_application("shop"), name="talk")).json()
        reply = await use.ask("hello", "talk")
    old = [use.keys.of_application("shop"), begun["key"], use.keys.of_feedback("shop")]
    for applications in ({"shop": 2, "mail": 1}, {"mail": 1}):
        async with deployed(tmp_path, applications=applications) as use:
            assert (await post(use, "/v1/chat/completions", old[0])).status_code == 401
            assert (await post(use, f"{begun['path']}/v1/chat/completions", old[1])).status_code == 401
            said = await use.post("feedback", old[2], call=reply.id, rewards={"thumbs": 1})
            assert said.status_code == 401
            if "shop" in applications:
                assert (await use.say(call=reply.id, rewards={"thumbs": 1})).status_code == 200
                await use.ask("the same session", "talk")
                assert {call.rollout for call in await use.calls()} == {begun["session"]}
