"""What this package registers, and attaching without code."""

from __future__ import annotations

import agl_core


@agl_core.adapter("smolagents")
def smolagents() -> None:
    """smolagents: agent names, and the results of tools, managed agents and code."""
    from agl_smolagents.agents import watch

    watch()


def attach() -> None:
    """See every smolagents agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([smolagents])
