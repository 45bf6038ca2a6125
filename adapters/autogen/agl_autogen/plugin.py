"""What this package registers: an adapter for each of AutoGen's packages: neither may import the other early."""

from __future__ import annotations

import agl_core


@agl_core.adapter("autogen_core", name="autogen-core")
def autogen_core() -> None:
    """AutoGen's core: agents on a runtime, model clients, tools and workbenches."""
    from agl_autogen import agents, calls, tools

    agents.attach()
    calls.attach()
    tools.attach()


@agl_core.adapter("autogen_agentchat", name="autogen-agentchat")
def agentchat() -> None:
    """AutoGen's AgentChat: agents by the names that the user gave them, alone, in teams and as tools."""
    # Imported before our modules: it attaches the other adapter, which must not find them half imported.
    import autogen_core  # noqa: F401

    from agl_autogen import agents

    agents.attach_agentchat()


def attach() -> None:
    """See every AutoGen agent of this process, with no change to its code; calling it again changes nothing.

    agl's workers do it by themselves. Outside any rollout and any `record` nothing is done.
    """
    agl_core.attach([autogen_core, agentchat])
