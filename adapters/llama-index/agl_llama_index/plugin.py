"""What this package registers."""

from __future__ import annotations

import agl_core


@agl_core.adapter("llama_index.core", name="llama-index")
def llama_index() -> None:
    """LlamaIndex: the names of agents and of workflows, and tool results."""
    from agl_llama_index.spans import attach

    attach()


def attach() -> None:
    """See every LlamaIndex agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([llama_index])
