"""The player of the three games: plain code on the `openai` client, whose tool and whose state are marked."""

from __future__ import annotations

import random
from typing import Any

from beds import Bed, Outcome, State, letter, outcomes
from openai import AsyncOpenAI

import agl_core

client = AsyncOpenAI()


class ToolError(Exception):
    """The tool of `recoverable` did not fetch the thing."""


async def play(task_input: dict[str, Any]) -> float:
    """Play a game of `{"bed": …, "words": […]}`. What the end of it earned is the reward."""
    state: State | None = State(Bed(task_input["bed"]), tuple(task_input["words"]))
    with agl_core.agent("player"):
        while state is not None:
            agl_core.state(turn=state.turn, done=state.done, failed=state.failed)
            asked: Any = [{"role": "user", "content": state.prompt}]
            reply = await client.chat.completions.create(model="default", messages=asked)
            possible = outcomes(state, letter(reply.choices[0].message.content))
            [outcome] = random.choices(possible, [each.chance for each in possible])
            use_tool(outcome)
            state = outcome.after
    return 0.0 if task_input["bed"] == Bed.ADDITIVE else outcome.reward


def use_tool(outcome: Outcome) -> None:
    """Run the tool if one was asked, so that its result is recorded."""
    if outcome.tool is None:
        return
    try:
        with agl_core.tool("fetch") as run:
            if not outcome.tool:
                raise ToolError("busy")
            run.result = "here it is"
    except ToolError:
        pass
