"""What the policy did in the first training step of a run, before it had learned anything."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agl_core.config import CONFIG_FILE
from agl_core.config.load import load
from agl_core.training.rollouts import recorded_episodes
from agl_core.types import Episode, Mode


def first_step(run: Path) -> list[Episode]:
    """The recorded episodes, without rewards of rules."""

    async def read() -> list[Episode]:
        loaded = load(run / CONFIG_FILE)
        async with loaded.store.build(run, True) as store:
            rollouts = [each for each in await store.rollouts(mode=Mode.TRAIN) if each.step == 1]
            return await recorded_episodes(store, rollouts, loaded.plugins.hook)

    return asyncio.run(read())
