"""What this package registers."""

from __future__ import annotations

import agl_core


@agl_core.adapter("langchain_core")
def langchain() -> None:
    """LangChain and LangGraph: agent and node names, and tool results."""
    from agl_langchain.callback import attach

    attach()


def attach() -> None:
    """See every LangChain and LangGraph agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([langchain])
