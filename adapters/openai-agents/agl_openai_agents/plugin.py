"""What this package registers, and attaching without code."""

from __future__ import annotations

import sys
from collections.abc import Callable

import agl_core
from agl_core import hookimpl
from agl_core.capture import Identity
from agl_core.registering import RegisterAdapter


class OpenAIAgentsAdapter:
    """OpenAI Agents SDK: agent and guardrail names, and tool results."""

    framework = "agents"

    def attach(self) -> Callable[[], Identity | None] | None:
        if not hasattr(sys.modules.get("agents"), "add_trace_processor"):
            return None  # a module of the user's that has the same name

        from agl_openai_agents import identity, tools, vendor

        tools.watch_tools()
        vendor.keep_rollouts_private()
        return identity.who_calls


def attach() -> None:
    """See every OpenAI Agents SDK agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([OpenAIAgentsAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("openai-agents", lambda options: OpenAIAgentsAdapter(), doc=OpenAIAgentsAdapter.__doc__)
