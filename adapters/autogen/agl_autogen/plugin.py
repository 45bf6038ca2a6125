"""What this package registers: an adapter for each of AutoGen's packages, since neither may import the other early."""

from __future__ import annotations

from agl_core import hookimpl
from agl_core.plugins import Register


class AutoGenCoreAdapter:
    """AutoGen's core: agents on a runtime, model clients, tools and workbenches."""

    framework = "autogen_core"

    def attach(self) -> None:
        from agl_autogen import agents, calls, tools

        agents.attach()
        calls.attach()
        tools.attach()


class AgentChatAdapter:
    """AutoGen's AgentChat: agents by the names that the user gave them, alone, in teams and as tools."""

    framework = "autogen_agentchat"

    def attach(self) -> None:
        # Before our own modules are: its import attaches the other adapter, which must not find them half imported.
        import autogen_core  # noqa: F401

        from agl_autogen import agents

        agents.attach_agentchat()


@hookimpl
def register_adapters(register: Register) -> None:
    register("autogen-core", lambda options: AutoGenCoreAdapter(), doc=AutoGenCoreAdapter.__doc__)
    register("autogen-agentchat", lambda options: AgentChatAdapter(), doc=AgentChatAdapter.__doc__)
