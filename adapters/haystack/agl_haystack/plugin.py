"""What this package registers: an adapter for Haystack, and one for its agents, which are imported later."""

from __future__ import annotations

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter


class HaystackAdapter:
    """Haystack: the names of components in pipelines, and of agents that are tools."""

    framework = "haystack.tracing.tracer"

    def attach(self) -> None:
        from agl_haystack import identity

        identity.attach()


class HaystackAgentsAdapter:
    """Haystack's agents: tool results."""

    framework = "haystack.components.agents.tool_calling"

    def attach(self) -> None:
        from agl_haystack import tools

        tools.attach()


def attach() -> None:
    """See every Haystack pipeline and agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([HaystackAdapter(), HaystackAgentsAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("haystack", lambda options: HaystackAdapter(), doc=HaystackAdapter.__doc__)
    register("haystack-agents", lambda options: HaystackAgentsAdapter(), doc=HaystackAgentsAdapter.__doc__)
