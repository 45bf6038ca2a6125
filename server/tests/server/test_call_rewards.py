"""An agent rewards its own calls by the replies that its client got; what it says goes no further than its attempt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from langchain_openai import ChatOpenAI

import agl_core
from agl_core.builtin import immediate
from agl_core.errors import AgentError
from agl_core.plugins import Plugins
from agl_core.types import AlarmName, Ending, Episode, Mode, episode_return
from agl_server.health.alarms import alarms_on
from agl_server.reading.explained import reports_of
from agl_server.testing import LeasedAttempt, Stack
from agl_server.training.metrics import Observer
from agl_server.training.rollouts import Collector, scoring_rules

from .server_aids import HELLO, client_of


async def chat(client: openai.AsyncOpenAI) -> Any:
    return await client.chat.completions.create(model="default", messages=HELLO)


async def streamed_chat(client: openai.AsyncOpenAI) -> Any:
    *_, last = [chunk async for chunk in await client.chat.completions.create(model="any", messages=HELLO, stream=True)]
    return last


async def several_choices(client: openai.AsyncOpenAI) -> Any:
    return await client.chat.completions.create(model="default", messages=HELLO, n=2)


async def responses(client: openai.AsyncOpenAI) -> Any:
    return await client.responses.create(model="default", input="hello")


async def streamed_responses(client: openai.AsyncOpenAI) -> Any:
    async with client.responses.stream(model="default", input="hello") as stream:
        return await stream.get_final_response()


async def messages(client: anthropic.AsyncAnthropic) -> Any:
    return await client.messages.create(model="default", messages=HELLO, max_tokens=9)


async def streamed_messages(client: anthropic.AsyncAnthropic) -> Any:
    async with client.messages.stream(model="default", messages=HELLO, max_tokens=9) as stream:
        return await stream.get_final_message()


async def langchain(client: openai.AsyncOpenAI) -> Any:
    return await ChatOpenAI(model="any", base_url=str(client.base_url), api_key=client.api_key).ainvoke("hello")


async def langchain_responses(client: openai.AsyncOpenAI) -> Any:
    url, key = str(client.base_url), client.api_key
    return await ChatOpenAI(model="any", base_url=url, api_key=key, use_responses_api=True).ainvoke("hello")


async def scored(stack: Stack, *attempts: LeasedAttempt) -> list[Episode]:
    """The episodes as a run scores them that names no rule."""
    loaded: Any = SimpleNamespace(rewards={}, config=None)
    endings: Any = dict.fromkeys(Ending, "score")
    collector = Collector(stack.store, stack.server.queue, scoring_rules(loaded), endings, Plugins().hook, lambda: None)
    with Observer().phase("rollouts", 1) as phase:
        return await collector.collect([[await stack.store.rollout(one.key.rollout) for one in attempts]], phase)


@pytest.mark.parametrize(
    "ask",
    [
        chat, streamed_chat, several_choices, responses, streamed_responses, messages, streamed_messages, langchain,
        langchain_responses,
    ],
    ids=lambda ask: ask.__name__,
)  # fmt: skip
async def test_each_call_has_its_reward_and_the_rest_is_the_terminal_reward(stack: Stack, ask: Any) -> None:
    attempt = await stack.attempt(mode=Mode.TRAIN)
    make_client: Any = client_of if "messages" in ask.__name__ else Stack.client
    client = make_client(stack, attempt.key)
    with attempt.running():
        first, second = await ask(client), await ask(client)
        agl_core.reward(0.25, "step", call=first)
        agl_core.reward(-1, call=getattr(second, "response_metadata", {}).get("id") or second.id)
        agl_core.reward(0.5, "step", call=first)
        agl_core.reward(2)
    await attempt.close()

    one, two = [call.id for call in await attempt.calls()]
    said = {(r.name, r.call): (r.value, r.source) for r in await stack.store.rewards([attempt.key])}
    assert said == {("step", one): (0.75, "agent"), ("reward", two): (-1.0, "agent"), ("reward", None): (2.0, "agent")}
    for _ in ("in the run", "in the resumed run"):
        [episode] = await scored(stack, attempt)
        choices = 2 if ask is several_choices else 1
        assert [t.reward for t in episode.transitions] == [0.75] * choices + [-1.0] * choices
        assert (episode.terminal, episode_return(episode)) == (2.0, 1.75)
        assert immediate([episode])[0] == [0.75] * choices + [1.0] * choices
        stored = {(r.source, r.call, r.value) for r in await stack.store.rewards([attempt.key]) if r.source != "agent"}
        assert stored == {("reported", one, 0.75), ("reported", two, -1.0), ("reported", None, 2.0)}


async def test_a_call_of_another_attempt_is_not_rewarded_and_the_rollout_says_so(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    victim, attempt = await stack.attempt(mode=Mode.TRAIN), await stack.attempt(mode=Mode.TRAIN)
    with victim.running():
        reply = await chat(stack.client(victim.key))
    with attempt.running():
        await chat(stack.client(attempt.key))
        agl_core.reward(-9, call=reply)
        agl_core.reward(9, call="made-up")
    await attempt.close()
    await victim.close()

    episodes = await scored(stack, victim, attempt)
    assert [(e.terminal, [t.reward for t in e.transitions]) for e in episodes] == [(0.0, [0.0])] * 2
    assert await stack.store.rewards([victim.key]) == []
    [told] = await reports_of(stack.store, [await stack.store.rollout(attempt.key.rollout)])
    kept = [(r.call, r.value) for r in told.attempts[0].uncounted_rewards]
    assert sorted(kept) == [(reply.id, -9.0), ("made-up", 9.0)]
    assert "1 of 2 rollouts (the first: r1): agl_core.reward(call=…) named calls that the" in caplog.text


async def test_a_run_whose_only_rewards_are_of_calls_is_told_that_they_are_asserted(stack: Stack) -> None:
    attempt = await stack.attempt(mode=Mode.TRAIN)
    with attempt.running():
        agl_core.reward(0.25, call=await chat(stack.client(attempt.key)))
    await attempt.close()
    alarms = alarms_on(await scored(stack, attempt), [AlarmName.NO_REWARD, AlarmName.ASSERTED_REWARDS])
    assert [alarm.name for alarm in alarms] == [AlarmName.ASSERTED_REWARDS]


@pytest.mark.parametrize("call", [7, "", object(), {"id": "x"}, SimpleNamespace(id=None)])
def test_what_has_no_id_is_refused(call: Any) -> None:
    with pytest.raises(AgentError, match="neither a reply with an id nor an id"):
        agl_core.reward(1, call=call)
