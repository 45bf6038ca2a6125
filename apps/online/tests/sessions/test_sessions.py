"""Sessions begin, go on and end, each key opens its own door, and use goes on whatever becomes of recording."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_core.capture.requests import HEADER_RETRIES
from agl_core.errors import StoreError
from agl_core.learning.transitions import build_episode, counted_calls
from agl_core.testing.scripts import Hold, Say
from agl_core.types import AttemptKey, Ending, Mode, RolloutState
from agl_online import session as of_session
from agl_online.wire import HEADER_SESSION, Purpose

from .conftest import KEYS, Deployed, deployed

CHAT = {"model": "default", "messages": [{"role": "user", "content": "hello"}]}
CALLS = "/v1/chat/completions"


async def test_calls_of_one_name_are_one_session_recorded_exactly(use: Deployed) -> None:
    use.model.headers["x-agl-policy-version"] = "7"
    first = await use.ask("where is my order?", "talk-1")
    second = await use.ask("and the other one?", "talk-1")
    await use.ask("hello", "talk-2")
    await use.ask("hello", "talk-1", application="mail")
    one, two, other = await use.sessions()
    assert [s.mode for s in (one, two, other)] == [Mode.USE] * 3
    assert one.task.input is None
    assert one.task.metadata == {"application": "shop", "session": "talk-1"}
    assert (other.task.metadata["application"], other.group != one.group) == ("mail", True)
    calls = [call for call in await use.calls() if call.rollout == one.id]
    assert [call.id for call in calls] == [first.id, second.id]
    assert [call.sequence for call in calls] == [0, 1]
    assert [call.version for call in calls] == [7, 7]
    [choice] = calls[0].choices
    assert bytes(choice.response_ids[:-1].tolist()).decode() == first.choices[0].message.content
    assert len(choice.logprobs) == len(choice.response_ids)
    assert calls[0].prompt_ids is not None
    [attempt] = await use.store.attempts(one.id)
    episode = build_episode(one, attempt, calls)
    assert [t.turn for t in episode.transitions] == [0, 1]


async def test_replies_are_sampled_as_the_application_asks(use: Deployed) -> None:
    client = use.agent(use.key())
    hello = [{"role": "user", "content": "hello"}]
    for settings in ({}, {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7, "frequency_penalty": 0.5}):
        await client.chat.completions.create(model="default", messages=hello, **settings)  # type: ignore[call-overload]
    plain, chosen = (r.body for r in use.model.received)
    assert (plain["temperature"], plain["top_p"], plain["max_tokens"]) == (0.7, 1.0, 512), "said, so that it is known"
    assert {name: chosen[name] for name in ("temperature", "top_p", "max_tokens", "frequency_penalty")} == {
        "temperature": 0.2, "top_p": 0.9, "max_tokens": 7, "frequency_penalty": 0.5,
    }  # fmt: skip


async def test_a_session_ends_by_request_by_header_and_when_it_is_idle(tmp_path: Path) -> None:
    async with deployed(tmp_path, idle_minutes=0.3 / 60) as use:
        await use.ask("a", "by-request")
        for _ in range(2):
            assert (await use.post("sessions/end", use.key(), session="by-request")).status_code == 200
        await use.ask("a", "by-header", **{"x-agl-session-end": "1"})
        await use.ask("a call without a name is a session of its own")
        await use.ask("a", "idle")
        hold = Hold(Say("late"))
        use.model.script(hold)
        slow = asyncio.create_task(use.ask("a", "slow"))
        await hold.arrived.wait()

        async def ended() -> dict[str | None, str]:
            endings = {}
            for s in await use.sessions():
                if s.state is RolloutState.DONE:
                    [attempt] = await use.store.attempts(s.id)
                    assert (s.ending, s.counted_attempt) == (Ending.FINISHED, 0)
                    endings[s.task.metadata["session"]] = attempt.result["ended_by"]
            return endings

        while len(await ended()) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await ended() == {"by-request": "request", "by-header": "reply", None: "reply", "idle": "idle"}
        hold.release.set()
        await slow
        again = await use.ask("b", "idle")
        assert again.id
        assert len([s for s in await use.sessions() if s.task.metadata["session"] == "idle"]) == 2


async def test_a_session_of_the_api_has_a_key_of_its_own(use: Deployed) -> None:
    begun = await use.begin(name="task-9")
    assert await use.begin(name="task-9") == begun
    assert [s.id for s in await use.sessions()] == [begun["session"]], "before its first call"
    agent = use.agent(begun["key"], begun["path"])
    assert [m.id for m in (await agent.models.list()).data] == ["default"]
    reply = await agent.chat.completions.with_raw_response.create(
        model="default", messages=[{"role": "user", "content": "hello"}]
    )
    assert reply.headers["x-agl-session"] == begun["session"]
    await use.ask("by name", "task-9")
    assert [call.rollout for call in await use.calls()] == [begun["session"]] * 2
    await use.post("sessions/end", use.key(), session=begun["session"])
    late = await use.ask("late", begun=begun)
    assert [call.late for call in await use.calls() if call.id == late.id] == [True], "answered; it does not count"


@pytest.mark.parametrize(("tries", "counted"), [("01", [1]), ("012", [2]), ("00", [0, 1]), ("001", [0, 2])])
async def test_a_call_that_is_tried_again_at_the_next_server_counts_once(
    tmp_path: Path, tries: str, counted: list[int]
) -> None:
    """Its client numbers the tries, and goes on from the last reply; each of the equal requests meets a new server."""
    replies = []
    for number in tries:
        async with deployed(tmp_path) as use:
            reply = await use.send(CALLS, use.key(), CHAT, **{HEADER_SESSION: "talk", HEADER_RETRIES: number})
            replies.append(reply.json()["id"])
            [session], calls = await use.sessions(), await use.calls()
            [attempt] = await use.store.attempts(session.id)
    assert [call.id for call in counted_calls(attempt, calls)] == [replies[place] for place in counted]
    assert [call.id for call in calls] == replies, "what was sampled before stays on record"
    assert len({call.sequence for call in calls}) == tries.count("0")


async def test_sessions_are_no_affair_of_trainers_and_workers(use: Deployed) -> None:
    await use.ask("hello", "talk")
    attempt = await use.stack.lease()
    assert len(use.server.queue.running) == 1
    await use.stack.client(attempt).chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}]
    )
    await use.server.queue.abandon("run")
    [session] = await use.sessions()
    assert session.state is RolloutState.RUNNING
    await use.ask("again", "talk")
    assert len(await use.calls()) == 2


async def test_no_key_opens_anothers_door(use: Deployed) -> None:
    shop, mail = [await use.begin(application=application, name="talk") for application in ("shop", "mail")]
    reply, training = await use.ask("hello", "other"), await use.stack.lease()
    keys = {
        "application": use.key(),
        "session": shop["key"],
        "feedback": use.key(purpose=Purpose.FEEDBACK),
        "worker": KEYS.worker,
        "operator": KEYS.operator,
        "attempt": KEYS.of_attempt(AttemptKey(shop["session"], 0)),
        "lease": KEYS.of_lease(AttemptKey(shop["session"], 0)),
        "agent of training": use.stack.key(training),
        "wrong": "agl-wrong",
        "too short": "agl-",
    }
    doors: dict[str, tuple[str, Any, set[str]]] = {
        "a model call": (CALLS, CHAT, {"application", "agent of training"}),
        "a call of training": (f"/rollout/{training.rollout}/attempt/0{CALLS}", CHAT, {"agent of training"}),
        "a call of the session": (f"{shop['path']}{CALLS}", CHAT, {"session"}),
        "a call of another application's session": (f"{mail['path']}{CALLS}", CHAT, set()),
        "beginning": ("/agl/v1/sessions", {}, {"application"}),
        "ending": ("/agl/v1/sessions/end", {"session": "talk"}, {"application"}),
        "feedback": ("/agl/v1/feedback", {"call": reply.id, "rewards": {"thumbs": 1}}, {"feedback"}),
        "deletion": ("/agl/v1/sessions/delete", {"sessions": ["use-x"]}, {"operator"}),
        "a lease": ("/agl/v1/leases", {"worker": "w", "capacity": 1}, {"worker"}),
    }
    for door, (path, body, whose) in doors.items():
        for name, key in keys.items():
            got = await use.send(path, key, body)
            assert (got.status_code != 401) is (name in whose), (door, name, got.status_code, got.text)
    for name, key in keys.items():
        named = await use.http.get(f"{use.server.base_url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert (named.status_code == 200) is (name in ("application", "agent of training")), name
    assert not [call for call in await use.calls() if call.rollout == mail["session"]]


async def test_a_session_is_not_reached_by_a_header_without_its_key(use: Deployed) -> None:
    shop, other = [await use.begin() for _ in range(2)]
    stamped = {"x-agl-rollout": f"{other['session']}/0"}
    for key in (shop["key"], use.key(), use.key("mail"), KEYS.worker):
        assert (await use.send(CALLS, key, CHAT, **stamped)).status_code == 401
    assert (await use.send(CALLS, other["key"], CHAT, **stamped)).status_code == 200
    assert [call.rollout for call in await use.calls()] == [other["session"]]


async def test_applications_do_not_end_or_see_each_others_sessions(use: Deployed) -> None:
    begun = await use.begin(name="talk")
    assert (await use.post("sessions/end", use.key("mail"), session=begun["session"])).status_code == 403
    assert (await use.post("sessions/end", use.key("mail"), session="talk")).status_code == 404
    same_name = await use.begin(application="mail", name="talk")
    assert same_name["session"].split("-")[1] != begun["session"].split("-")[1]
    assert use.counted("open") == 2


async def test_another_number_makes_the_old_keys_of_an_application_invalid(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        begun = await use.begin(name="talk")
        reply = await use.ask("hello", "talk")
    old = [use.key(), begun["key"], use.key(purpose=Purpose.FEEDBACK)]
    for applications in ({"shop": 2, "mail": 1}, {"mail": 1}):
        async with deployed(tmp_path, applications=applications) as use:
            assert (await use.send(CALLS, old[0], CHAT)).status_code == 401
            assert (await use.send(f"{begun['path']}{CALLS}", old[1], CHAT)).status_code == 401
            assert (await use.post("feedback", old[2], call=reply.id, rewards={"thumbs": 1})).status_code == 401
            if "shop" in applications:
                assert (await use.say(call=reply.id, rewards={"thumbs": 1})).status_code == 200
                await use.ask("the same session", "talk")
                assert {call.rollout for call in await use.calls()} == {begun["session"]}


async def ended(use: Deployed, name: str) -> Any:
    """The session of this name, once it has ended."""
    await use.post("sessions/end", use.key(), session=name)
    while True:
        named = [s for s in await use.sessions() if s.task.metadata["session"] == name]
        if named and named[0].state is RolloutState.DONE:
            return named[0]
        await asyncio.sleep(0.01)


async def failing(*records: Any) -> None:
    raise StoreError("the disk is full")


async def test_a_store_that_fails_costs_no_reply(use: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    await use.ask("one", "talk")
    with monkeypatch.context() as broken:
        broken.setattr(use.store, "put", failing)
        assert (await use.ask("two", "talk")).id
        assert (await use.ask("never written", "gone")).id
        assert (await use.say(session="talk", rewards={"thumbs": 1})).status_code == 503, (
            "feedback is not lost in silence"
        )
    await use.ask("three", "talk")
    assert use.counted("unrecorded") == 2
    session = await ended(use, "talk")
    assert session.ending is Ending.LOST, "nothing is learned from a session with holes"
    [attempt] = await use.store.attempts(session.id)
    assert attempt.error == "1 of its calls were answered and could not be recorded."
    await use.ask("whole", "next")
    assert (await ended(use, "next")).ending is Ending.FINISHED


async def test_that_a_session_has_holes_outlives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with deployed(tmp_path) as use:
        await use.ask("one", "talk")
        with monkeypatch.context() as broken:
            broken.setattr(use.store, "put", failing)
            await use.ask("two", "talk")
        await use.ask("three", "talk")
    async with deployed(tmp_path) as use:
        await use.ask("four", "talk")
        assert (await ended(use, "talk")).ending is Ending.LOST


def hanging(use: Deployed, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Nothing is written before this is set, and patience is short."""
    monkeypatch.setattr(of_session, "_PATIENCE", 0.05)
    released, put = asyncio.Event(), use.store.put

    async def late(*records: Any) -> None:
        await released.wait()
        await put(*records)

    monkeypatch.setattr(use.store, "put", late)
    return released


async def test_a_store_that_hangs_holds_no_reply_up_for_long(use: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_session, "_MAX_WAITING", 2)
    released = hanging(use, monkeypatch)
    for number in range(4):
        async with asyncio.timeout(20):
            assert (await use.ask("hello", f"talk-{number}")).id
    assert use.counted("unrecorded") == 2, "only so many may wait"
    released.set()
    while len(await use.calls()) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert [s.task.metadata["session"] for s in await use.sessions()] == ["talk-0", "talk-1"]


async def test_feedback_waits_for_a_call_that_is_still_being_written(
    use: Deployed, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = hanging(use, monkeypatch)
    reply = await use.ask("hello", "talk")
    feedback = asyncio.create_task(use.say(call=reply.id, rewards={"thumbs": 1}))
    done, _ = await asyncio.wait({feedback}, timeout=0.3)
    assert not done
    released.set()
    assert (await feedback).json()["new"]
