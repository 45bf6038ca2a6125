"""What this package registers: an adapter for each of AutoGen's packages: neither may import the other early."""

from __future__ import annotations

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter


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
        # Imported before our modules: it attaches the other adapter, which must not find them half imported.
        import autogen_core  # noqa: F401

        from agl_autogen import agents

        agents.attach_agentchat()


def attach() -> None:
    """See every AutoGen agent of this process, with no change to its code; calling it again changes nothing.

    agl's workers do it by themselves. Outside any rollout and any `record` nothing is done.
    """
    agl_core.attach([AutoGenCoreAdapter(), AgentChatAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("autogen-core", lambda options: AutoGenCoreAdapter(), doc=AutoGenCoreAdapter.__doc__)
    register("autogen-agentchat", lambda options: AgentChatAdapter(), doc=AgentChatAdapter.__doc__)
