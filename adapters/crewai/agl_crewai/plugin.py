"""What this package registers, and attaching without code."""

from __future__ import annotations

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter


class CrewAIAdapter:
    """CrewAI: the roles of agents, and tool results."""

    framework = "crewai"

    def attach(self) -> None:
        from agl_crewai import events

        events.follow()


def attach() -> None:
    """See every CrewAI agent and crew of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([CrewAIAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("crewai", lambda options: CrewAIAdapter(), doc=CrewAIAdapter.__doc__)
