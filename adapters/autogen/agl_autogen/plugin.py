"""Attaching to AutoGen, and recording its agents without a server of agl.

There is an adapter for each of AutoGen's packages: neither may import the other early.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import agl_core
from agl_core.capture import CapturedRollout, current_attempt, describe_error, running
from agl_core.types import Episode, Transition


@agl_core.adapter("autogen_core", name="autogen-core")
def autogen_core() -> None:
    """AutoGen's core: agents on a runtime, model clients, tools and workbenches."""
    from agl_autogen import agents

    agents.attach()


@agl_core.adapter("autogen_agentchat", name="autogen-agentchat")
def agentchat() -> None:
    """AutoGen's AgentChat: agents by the names that the user gave them, alone, in teams and as tools."""
    # Imported before our modules: it attaches the other adapter, which must not find them half imported.
    import autogen_core  # noqa: F401

    from agl_autogen import agents

    agents.attach_agentchat()


class Recorded:
    """The episode of the agents in a `record` block."""

    def __init__(self, rollout: CapturedRollout) -> None:
        self._rollout = rollout
        self.result: Any = None
        """The agent's result; set it in the block if rewards need it."""

    def episode(self) -> Episode | None:
        """The block's calls as an episode; None before its end, and in a rollout of agl."""
        from agl_core.learning.transitions import build_episode

        return build_episode(*self._rollout.records()) if self._rollout.is_finished else None

    def transitions(self) -> list[Transition]:
        """The transitions of the episode. They have token ids where the endpoint returned them and did not stream."""
        episode = self.episode()
        return list(episode.transitions) if episode else []


@contextmanager
def record(input: Any = None) -> Iterator[Recorded]:
    """Record what the AutoGen agents inside do, as one episode; `input` is its task.

        with record("1 + 2?") as recorded:
            await agent.run(task="1 + 2?")
        recorded.transitions()

    It sees this block's calls alone, also while others run. In a rollout of agl the gateway records them instead,
    and nothing is kept here.
    """
    agl_core.attach([autogen_core, agentchat])
    # Imported before our modules: it attaches the adapter, which must not find them half imported.
    import autogen_core as _  # noqa: F401

    from agl_autogen import calls

    calls.attach()

    rollout = CapturedRollout(uuid.uuid4().hex, input)
    recorded = Recorded(rollout)
    active = current_attempt()
    if active is not None and not isinstance(active, calls.AloneAttempt):
        yield recorded
        return
    error: str | None = None
    try:
        # No request is below an empty base URL, so none is stamped.
        with running(calls.AloneAttempt(rollout.id, 0, "", "", rollout.recording, rollout)):
            yield recorded
    except BaseException as raised:
        error = describe_error(raised)
        raise
    finally:
        rollout.finish(recorded.result, error)
