"""What this package registers."""

from __future__ import annotations

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter


class LlamaIndexAdapter:
    """LlamaIndex: the names of agents and of workflows, and tool results."""

    framework = "llama_index.core"

    def attach(self) -> None:
        from agl_llama_index.spans import attach

        attach()


def attach() -> None:
    """See every LlamaIndex agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([LlamaIndexAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("llama-index", lambda options: LlamaIndexAdapter(), doc=LlamaIndexAdapter.__doc__)
