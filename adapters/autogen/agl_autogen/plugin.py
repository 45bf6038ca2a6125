"""Attaching to AutoGen, and recording its agents without a server of agl.

There is an adapter for each of AutoGen's packages: neither may import the other early.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import agl_core
from agl_core.capture import Capture, current_attempt, describe_error, running

if TYPE_CHECKING:
    from agl_autogen.calls import Recorded


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

    capture = Capture(keep=1)
    rollout, recorded = capture.start(uuid.uuid4().hex, input), calls.Recorded(capture)
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
