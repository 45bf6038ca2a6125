"""What this package registers."""

from __future__ import annotations

from agl_core import hookimpl
from agl_core.plugins import Register


class LangChainAdapter:
    """LangChain and LangGraph: agent and node names, and tool outcomes."""

    framework = "langchain_core"

    def attach(self) -> None:
        from agl_langchain.callback import attach

        attach()


@hookimpl
def register_adapters(register: Register) -> None:
    register("langchain", lambda options: LangChainAdapter(), doc=LangChainAdapter.__doc__)
