"""The player of TextWorld's quests: plain code on the `openai` client, whose commands and whose state are marked."""

from __future__ import annotations

from typing import Any

from games import Game, State
from openai import AsyncOpenAI

import agl_core

client = AsyncOpenAI()


class CommandError(Exception):
    """The game refused a command, or it changed nothing."""


async def play(task_input: dict[str, Any]) -> float:
    """Play a quest of `Game`'s fields; the result is 1 if it is won."""
    state = State.first(Game(**task_input))
    with agl_core.agent("adventurer"):
        while not state.over:
            agl_core.state(room=state.room, inventory=state.inventory)
            asked: Any = [{"role": "user", "content": state.prompt}]
            reply = await client.chat.completions.create(model="default", messages=asked)
            state = use_command(state, (reply.choices[0].message.content or "").strip())
    return float(state.won)


def use_command(state: State, letter: str) -> State:
    """Give the letter's command to the game, so that its result is recorded."""
    after = state.after(letter)
    try:
        with agl_core.tool("textworld", arguments={"command": state.letters.get(letter, letter)}) as run:
            if not after.worked:
                raise CommandError("nothing happens")
            run.result = "done"
    except CommandError:
        pass
    return after
