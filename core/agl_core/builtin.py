"""What the core itself brings, through the same hooks as any plugin."""

from __future__ import annotations

from agl_core.hooks import hookimpl
from agl_core.learning.credit import discounted, identical, immediate, stepwise
from agl_core.plugins import Register

__all__ = [
    "discounted",
    "identical",
    "immediate",
    "register_buffers",
    "register_stores",
    "register_task_sources",
    "stepwise",
]
# Credit rules are made by a decorator: being here is all it takes, as in a user's own file.


@hookimpl
def register_buffers(register: Register) -> None:
    """The order of completion, without and with replay."""
    from agl_core.training.buffers import fifo
    from agl_core.training.replay import PrioritisedOptions, prioritised, prioritised_needs

    register("fifo", fifo)
    register("prioritised", prioritised, options=PrioritisedOptions, needs=prioritised_needs)


@hookimpl
def register_stores(register: Register) -> None:
    """The store that needs no server."""
    from agl_core.store.sqlite import build

    register("sqlite", build)


@hookimpl
def register_task_sources(register: Register) -> None:
    """Tasks from files."""
    from agl_core.training.tasks import JsonlOptions, jsonl

    register("jsonl", jsonl, options=JsonlOptions)
