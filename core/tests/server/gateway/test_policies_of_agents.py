"""Which policy answers a call."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import openai
import pytest

from agl_core.testing.server import running_stack
from agl_core.wire.headers import HEADER_AGENT

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_policies_are_found_by_the_models_name() -> None:
    async with running_stack(upstream_fields=lambda _: {"models": {"writer": "w-v", "judge": "j-v"}}) as stack:
        key = await stack.lease()
        assert [model.id async for model in stack.client(key).models.list()] == ["judge", "writer"]
        await stack.client(key).chat.completions.create(model="judge", messages=HELLO)
        assert stack.upstream.received[-1].body["model"] == "j-v"
        assert (await stack.calls(key))[-1].policy == "judge"
        with pytest.raises(openai.NotFoundError, match="Did you mean 'judge'"):
            await stack.client(key).chat.completions.create(model="juge", messages=HELLO)


TWO_POLICIES = {"writer": "w-v", "judge": "j-v"}


@pytest.mark.parametrize(
    ("agent", "model", "policy"),
    [
        ("critic", "gpt-4o", "judge"),
        ("critic", "writer", "judge"),
        ("editor-2", "gpt-4o", "writer"),
        ("edit\u00f6r", "gpt-4o", "writer"),
        ("somebody", "writer", "writer"),
        ("somebody", "judge", "judge"),
        (None, "judge", "judge"),
        ("Critic", "writer", "writer"),
    ],
)
async def test_an_agent_gets_its_own_policy_whatever_model_it_asks_for(
    agent: str | None, model: str, policy: str
) -> None:
    async with running_stack(
        upstream_fields=lambda _: {"models": TWO_POLICIES}, agents={"judge": ["critic"], "writer": ["edit*"]}
    ) as stack:
        key = await stack.lease()
        headers = {} if agent is None else {HEADER_AGENT: quote(agent)}
        reply = await stack.client(key).chat.completions.create(model=model, messages=HELLO, extra_headers=headers)
        assert reply.model == model
        assert stack.upstream.received[-1].body["model"] == TWO_POLICIES[policy]
        (call,) = await stack.calls(key)
        assert (call.policy, call.agent) == (policy, agent)
        assert [each.id async for each in stack.client(key).models.list()] == ["judge", "writer"]


@pytest.mark.parametrize(("headers", "caller"), [({HEADER_AGENT: "poet"}, "the agent 'poet'"), ({}, "a call without")])
async def test_an_agent_without_a_policy_is_told_both_remedies(headers: dict[str, str], caller: str) -> None:
    async with running_stack(
        upstream_fields=lambda _: {"models": TWO_POLICIES}, agents={"judge": ["critic"], "writer": ["edit*"]}
    ) as stack:
        key = await stack.lease()
        with pytest.raises(openai.NotFoundError) as error:
            await stack.client(key).chat.completions.create(model="writr", messages=HELLO, extra_headers=headers)
        for said in (f"none has {caller}", "`agents`", "Did you mean 'writer'"):
            assert said in error.value.message


async def test_agents_of_a_default_policy_do_not_shut_others_out() -> None:
    async with running_stack(
        upstream_fields=lambda _: {"models": {"default": "d-v", "judge": "j-v"}}, agents={"default": ["a"]}
    ) as stack:
        key = await stack.lease()
        await stack.client(key).chat.completions.create(
            model="gpt-4o", messages=HELLO, extra_headers={HEADER_AGENT: "b"}
        )
        assert (await stack.calls(key))[-1].policy == "default"
