"""Recording AutoGen's agents without a server of agl."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import agl_core
from agl_autogen.plugin import agentchat, autogen_core
from agl_core.apis.alone import LocalRollouts
from agl_core.capture import current_attempt, describe_error, running
from agl_core.types import Episode


class RecordedBlock(LocalRollouts):
    """The episode of the agents in a `record` block."""

    result: Any = None
    """The agent's result; set it in the block if rewards need it."""

    def episode(self) -> Episode | None:
        """The block's calls as an episode; None before its end, and in a rollout of agl."""
        return next(iter(self.episodes()), None)


@contextmanager
def record(input: Any = None) -> Iterator[RecordedBlock]:
    """Record what the AutoGen agents inside do, as one episode; `input` is its task.

        with record("1 + 2?") as recorded:
            await agent.run(task="1 + 2?")
        recorded.transitions()

    It sees this block's calls alone, also while others run. In a rollout of agl nothing is kept here.
    """
    agl_core.attach([autogen_core, agentchat])
    active, recorded = current_attempt(), RecordedBlock()
    if active is not None and active.calls is None:
        yield recorded
        return
    rollout = recorded.begin(uuid.uuid4().hex, input)
    error: str | None = None
    try:
        with running(rollout.attempt):
            yield recorded
    except BaseException as raised:
        error = describe_error(raised)
        raise
    finally:
        rollout.finish(recorded.result, error)
