"""The adapter that this package registers."""

from __future__ import annotations

import agl_core


@agl_core.adapter("smolagents")
def smolagents() -> None:
    """smolagents: agent names, and the results of tools, managed agents and code."""
    from agl_smolagents.agents import watch

    watch()
