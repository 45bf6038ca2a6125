"""Sessions begin, go on, end and are recorded as rollouts are, over the official client."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agl_core.learning import build_episode
from agl_core.testing.scripts import Hold, Say
from agl_core.testing.server import until
from agl_core.types import Ending, Mode, RolloutState

from .deployed import Deployed, deployed


async def test_calls_of_one_name_are_one_session_recorded_exactly(use: Deployed) -> None:
    use.model.headers["x-agl-policy-version"] = "7"
    first = await use.ask("where is my order?", "talk-1")
    second = await use.ask("and the other one?", "talk-1")
    await use.ask("hello", "talk-2")
    await use.ask("hello", "talk-1", application="mail")
    one, two, other = await use.sessions()
    assert [each.mode for each in (one, two, other)] == [Mode.USE] * 3
    assert one.task.input is None
    assert one.task.metadata == {"application": "shop", "session": "talk-1"}
    assert (other.task.metadata["application"], other.group != one.group) == ("mail", True)
    calls = [call for call in await use.calls() if call.rollout == one.id]
    assert [call.id for call in calls] == [first.id, second.id]
    assert [call.sequence for call in calls] == [0, 1]
    assert [call.version for call in calls] == [7, 7]
    [choice] = calls[0].choices
    assert choice.response_ids is not None
    assert bytes(choice.response_ids[:-1].tolist()).decode() == first.choices[0].message.content
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.response_ids)
    assert calls[0].prompt_ids is not None
    [attempt] = await use.store.attempts(one.id)
    episode = build_episode(one, attempt, calls)
    assert [t.turn for t in episode.transitions] == [0, 1]


async def test_replies_are_sampled_as_the_application_asks(use: Deployed) -> None:
    client = use.agent(use.keys.of_application("shop"))
    hello = [{"role": "user", "content": "hello"}]
    for asked in ({}, {"temperature": 0.2, "top_p": 0.9, "max_tokens": 7, "frequency_penalty": 0.5}):
        await client.chat.completions.create(model="default", messages=hello, **asked)  # type: ignore[call-overload]
    plain, chosen = (each.body for each in use.model.received)
    assert (plain["temperature"], plain["top_p"], plain["max_tokens"]) == (0.7, 1.0, 512), "said, so that it is known"
    assert {name: chosen[name] for name in ("temperature", "top_p", "max_tokens", "frequency_penalty")} == {
        "temperature": 0.2, "top_p": 0.9, "max_tokens": 7, "frequency_penalty": 0.5,
    }  # fmt: skip


async def test_a_session_ends_by_request_by_header_and_when_it_is_idle(tmp_path: Path) -> None:
    async with deployed(tmp_path, idle_minutes=0.3 / 60) as use:
        shop = use.keys.of_application("shop")
        await use.ask("a", "by-request")
        assert (await use.post("sessions/end", shop, session="by-request")).status_code == 200
        assert (await use.post("sessions/end", shop, session="by-request")).status_code == 200, "again"
        await use.ask("a", "by-header", **{"x-agl-session-end": "1"})
        await use.ask("a call without a name is a session of its own")
        await use.ask("a", "idle")
        hold = Hold(Say("late"))
        use.model.script(hold)
        slow = asyncio.create_task(use.ask("a", "slow"))
        await hold.arrived.wait()

        async def ended() -> dict[str | None, str]:
            found = {}
            for each in await use.sessions():
                if each.state is RolloutState.DONE:
                    [attempt] = await use.store.attempts(each.id)
                    assert (each.ending, each.counted_attempt) == (Ending.FINISHED, 0)
                    found[each.task.metadata["session"]] = attempt.result["ended_by"]
            return found

        while len(await ended()) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await ended() == {"by-request": "request", "by-header": "reply", None: "reply", "idle": "idle"}
        hold.release.set()
        await slow
        again = await use.ask("b", "idle")
        assert again.id
        assert len([each for each in await use.sessions() if each.task.metadata["session"] == "idle"]) == 2


async def test_a_session_of_the_api_has_a_key_of_its_own(use: Deployed) -> None:
    begun = (await use.post("sessions", use.keys.of_application("shop"), name="task-9")).json()
    again = (await use.post("sessions", use.keys.of_application("shop"), name="task-9")).json()
    assert again == begun
    assert [each.id for each in await use.sessions()] == [begun["session"]], "before its first call"
    agent = use.agent(begun["key"], begun["path"])
    assert [each.id for each in (await agent.models.list()).data] == ["default"]
    reply = await agent.chat.completions.with_raw_response.create(
        model="default", messages=[{"role": "user", "content": "hello"}]
    )
    assert reply.headers["x-agl-session"] == begun["session"]
    await use.ask("by name", "task-9")
    assert [call.rollout for call in await use.calls()] == [begun["session"]] * 2
    await use.post("sessions/end", use.keys.of_application("shop"), session=begun["session"])
    late = await agent.chat.completions.create(model="default", messages=[{"role": "user", "content": "late"}])
    assert [call.late for call in await use.calls() if call.id == late.id] == [True], "answered; it does not count"


async def test_open_sessions_are_taken_up_by_the_next_server(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        await use.ask("one", "talk")
        begun = (await use.post("sessions", use.keys.of_application("shop"))).json()
        ended = (await use.ask("x", "over", **{"x-agl-session-end": "1"})).id
        await until(lambda: use.counted("ended"))
    async with deployed(tmp_path) as use:
        assert use.counted("open") == 2
        await use.ask("two", "talk")
        agent = use.agent(begun["key"], begun["path"])
        await agent.chat.completions.create(model="default", messages=[{"role": "user", "content": "hello"}])
        by_name = {each.task.metadata["session"]: each for each in await use.sessions()}
        assert len(by_name) == 3
        calls = await use.calls()
        assert [call.sequence for call in calls if call.rollout == by_name["talk"].id] == [0, 1]
        assert [call.sequence for call in calls if call.rollout == begun["session"]] == [0]
        assert (await use.say(call=ended, rewards={"thumbs": 1})).status_code == 200


async def test_sessions_are_no_affair_of_trainers_and_workers(use: Deployed) -> None:
    await use.ask("hello", "talk")
    attempt = await use.stack.lease()
    assert use.server.queue.running == 1
    await use.stack.client(attempt).chat.completions.create(
        model="default", messages=[{"role": "user", "content": "x"}]
    )
    await use.server.queue.abandon("run")
    [session] = await use.sessions()
    assert session.state is RolloutState.RUNNING
    await use.ask("again", "talk")
    assert len(await use.calls()) == 2
