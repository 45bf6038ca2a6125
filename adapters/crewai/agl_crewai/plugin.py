"""What this package registers, and attaching without code."""

from __future__ import annotations

import agl_core


@agl_core.adapter("crewai")
def crewai() -> None:
    """CrewAI: the roles of agents, and tool results."""
    from agl_crewai import events

    events.follow()


def attach() -> None:
    """See every CrewAI agent and crew of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([crewai])
