"""Attaching to AutoGen.

There is an adapter for each of AutoGen's packages: neither may import the other early.
"""

from __future__ import annotations

import agl_core


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
