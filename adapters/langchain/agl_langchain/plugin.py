"""What this package registers."""

from __future__ import annotations

import agl_core
from agl_core import hookimpl
from agl_core.registering import RegisterAdapter


class LangChainAdapter:
    """LangChain and LangGraph: agent and node names, and tool results."""

    framework = "langchain_core"

    def attach(self) -> None:
        from agl_langchain.callback import attach

        attach()


def attach() -> None:
    """See every LangChain and LangGraph agent of this process, with no change to its code; again changes nothing.

    agl's workers do it by themselves. Outside any rollout it does nothing.
    """
    agl_core.attach([LangChainAdapter()])


@hookimpl
def register_adapters(register: RegisterAdapter) -> None:
    register("langchain", lambda options: LangChainAdapter(), doc=LangChainAdapter.__doc__)
