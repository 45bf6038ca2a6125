"""The player of the games: plain code on the `openai` client, whose tools and whose state are marked."""

from __future__ import annotations

import random
from typing import Any

from beds import Bed, Game, Outcome, State, letter, outcomes
from openai import AsyncOpenAI

import agl_core

client = AsyncOpenAI()


class ToolError(Exception):
    """A tool did not do what it was asked for."""


async def play(task_input: dict[str, Any]) -> float:
    """Play a game of `Game`'s fields. What the end of it earned is the result."""
    words = tuple(task_input["words"])
    state: State | None = State.first(Game(**{**task_input, "bed": Bed(task_input["bed"]), "words": words}))
    with agl_core.agent("player"):
        while state is not None:
            agl_core.state(prompt=state.prompt)
            asked: Any = [{"role": "user", "content": state.prompt}]
            reply = await client.chat.completions.create(model="default", messages=asked)
            possible = outcomes(state, letter(reply.choices[0].message.content))
            [outcome] = random.choices(possible, [each.chance for each in possible])
            use_tool(outcome)
            state = outcome.after
    return outcome.reward


def use_tool(outcome: Outcome) -> None:
    """Run the tool if one was asked, so that its result is recorded."""
    if outcome.tool is None:
        return
    try:
        with agl_core.tool(outcome.tool) as run:
            if not outcome.works:
                raise ToolError("busy")
            run.result = "done"
    except ToolError:
        pass
