"""Unmodified agents of other frameworks whose tool fails: what is seen, and what the conversation alone tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import agl_core
from agl_core.learning.transitions import build_episode
from agl_core.testing.scripts import CallTools, Say
from agl_server.testing import running_stack

# Before any framework is imported, as a worker does it.
agl_core.attach()


class Seen(NamedTuple):
    agents: list[str | None]
    statuses: list[str]
    in_words: list[tuple[str, str | None]]
    """Statuses, each with its rule, where nothing but the conversation is known."""


def look_up(city: str) -> str:
    """Look the weather of a city up."""
    if city == "Bern":
        raise ValueError("no such city")
    return "The error rate of its forecasts fell."


async def play(ask: Callable[[str, str], object], tool: str = "look_up") -> Seen:
    """Two tool calls, of which the first fails; `ask` gets the base URL and the key."""
    async with running_stack() as stack:
        attempt = await stack.attempt()
        stack.upstream.script(CallTools([(tool, {"city": "Bern"}), (tool, {"city": "Thun"})]), Say("Answer: cold"))
        with attempt.running():
            await asyncio.to_thread(ask, stack.url(attempt.key), stack.key(attempt.key))
        episode = await attempt.close()
        rollout = await stack.store.rollout(attempt.key.rollout)
        [record] = await stack.store.attempts(rollout.id)
        conversation = build_episode(rollout, record, await attempt.calls())
    in_words = [(str(result.status), result.status_rule) for result in conversation.transitions[0].tool_results]
    statuses = [str(result.status) for result in episode.transitions[0].tool_results]
    return Seen([transition.agent for transition in episode.transitions], statuses, in_words)
