"""Everything a plugin can be or do: implement the hooks that you need, with `@agl_core.hookimpl`.

The hooks from `server_routes` on serve a run: an error in one is logged, and the run goes on. docs/plugins.md has an
example of each hook, and of each kind of component.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.routing import Route

    from agl_core.kinds import Register
    from agl_core.store import Store
    from agl_core.types import Attempt, Episode, Rollout

API_VERSION = 1
"""Grows when a hook changes in a way that breaks a plugin written for an earlier number."""

hookspec = pluggy.HookspecMarker("agl")
hookimpl = pluggy.HookimplMarker("agl")


@hookspec
def register_components(register: Register) -> None:
    """Bring components of any kind: call `register(kind, name, build, …)` for each (`agl_core.kinds`)."""


@hookspec(firstresult=True)
def show_run(run: Path, host: str, port: int, operator_key: str | None) -> AbstractAsyncContextManager[str] | None:
    """Show a run at `host` and `port` (0: a free one) while a command works on it; other machines need the key."""


@hookspec
def server_routes(store: Store, leased: Callable[[Request], Any]) -> Iterable[Route] | None:
    """Further routes of the Lightning Server; those that begin with /v1/ are below the attempts' paths too.

    `leased` gives the attempt (`agl_server.gateway.attempts.ActiveAttempt`) whose agent's key a request carries, or
    raises ApiError.
    """


@hookspec
def rollout_started(rollout: Rollout, attempt: int) -> None:
    """A worker took a rollout."""


@hookspec
def rollout_finished(rollout: Rollout, attempt: Attempt) -> None:
    """An attempt ended, however it ended."""


@hookspec
def episode_built(episode: Episode) -> Episode | None:
    """An episode was made from recorded calls; return a changed one to replace it, or None.

    Each plugin, installed ones first, gets what the one before it returned. To leave an episode out of training, return
    it with `dropped` set or without transitions; the reason is `DropReason.PLUGIN`.
    """


@hookspec
def policy_updated(policy: str, version: int, metrics: Mapping[str, Any]) -> None:
    """A policy was updated; `version` is served from now on."""
