"""Everything a plugin can be or do. One hook each; implement those you need, with `@agl_core.hookimpl`.

A `register_…` hook is called once with `register`; call it for each thing you bring:

    @agl_core.hookimpl
    def register_rewards(register):
        register("brevity", lambda options: brevity)

See `agl_core.plugins.Register` for what else it takes (settings honoured, needs, what it provides).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from agl_core.types import Attempt, Episode, Rollout

if TYPE_CHECKING:
    import typer

    from agl_core.plugins import Register

API_VERSION = 1
"""Grows when a hook changes in a way that breaks a plugin written for an earlier number."""

hookspec = pluggy.HookspecMarker("agl")
hookimpl = pluggy.HookimplMarker("agl")


@hookspec
def register_adapters(register: Register) -> None:
    """Bring an adapter for an agent framework: `build(options) -> Adapter`."""


@hookspec
def register_algorithms(register: Register) -> None:
    """Bring an algorithm: `build(options) -> agl_algorithms.Algorithm`."""


@hookspec
def register_engines(register: Register) -> None:
    """Bring an engine: `build(options, context) -> Engine`."""


@hookspec
def register_rewards(register: Register) -> None:
    """Bring a reward rule: `build(options) -> RewardRule`."""


@hookspec
def register_credit_rules(register: Register) -> None:
    """Bring a credit rule: `build(options) -> CreditRule`; provide Need.RETURNS, Need.REWARDS or both."""


@hookspec
def register_buffers(register: Register) -> None:
    """Bring an experience buffer: `build(options) -> Buffer`."""


@hookspec
def register_stores(register: Register) -> None:
    """Bring a store: `build(options, folder, read_only=False) -> Store`; folder is the run's."""


@hookspec
def register_task_sources(register: Register) -> None:
    """Bring a task source: `build(options, folder, seed) -> TaskSource`; paths are relative to `folder`."""


@hookspec
def register_trackers(register: Register) -> None:
    """Bring a tracker: `build(options, run_dir) -> Tracker`."""


@hookspec
def register_commands(cli: typer.Typer) -> None:
    """Add commands to the `agl` command line."""


@hookspec
def rollout_started(rollout: Rollout, attempt: int) -> None:
    """A worker took a rollout."""


@hookspec
def rollout_finished(rollout: Rollout, attempt: Attempt) -> None:
    """An attempt ended, however it ended."""


@hookspec
def episode_built(episode: Episode) -> Episode | None:
    """An episode was made from recorded calls; return a changed one to replace it, or None."""


@hookspec
def policy_updated(policy: str, version: int, metrics: Mapping[str, Any]) -> None:
    """A policy was updated; `version` is served from now on."""
