"""Everything a plugin can be or do. One hook each; implement those you need, with `@agl_core.hookimpl`.

A `register_…` hook is called with `register`; call it for each component that you bring:

    @agl_core.hookimpl
    def register_rewards(register: RegisterReward) -> None:
        register("brevity", lambda options: brevity)

`agl_core.registering` has the signature of each; docs/plugins.md has an example of each. The hooks from
`rollout_started` on follow a run (`agl_core.run_hooks`): what one of them raises is logged, and the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from agl_core.types import Attempt, Episode, Rollout

if TYPE_CHECKING:
    import typer

    from agl_core.protocols import RunPages
    from agl_core.registering import (
        RegisterAdapter,
        RegisterAlgorithm,
        RegisterBuffer,
        RegisterCreditRule,
        RegisterEngine,
        RegisterRedactor,
        RegisterReleaseCheck,
        RegisterReward,
        RegisterStore,
        RegisterTaskSource,
        RegisterTracker,
    )

API_VERSION = 1
"""Grows when a hook changes in a way that breaks a plugin written for an earlier number."""

hookspec = pluggy.HookspecMarker("agl")
hookimpl = pluggy.HookimplMarker("agl")


@hookspec
def register_adapters(register: RegisterAdapter) -> None:
    """Bring an adapter for an agent framework: `build(options) -> Adapter`."""


@hookspec
def register_algorithms(register: RegisterAlgorithm) -> None:
    """Bring an algorithm: `build(options) -> Algorithm`; `takes` says which credited values it takes."""


@hookspec
def register_engines(register: RegisterEngine) -> None:
    """Bring an engine: `build(options, context) -> Engine`."""


@hookspec
def register_rewards(register: RegisterReward) -> None:
    """Bring a reward rule: `build(options) -> RewardRule`, or `GroupRewardRule` to see a whole group at once."""


@hookspec
def register_credit_rules(register: RegisterCreditRule) -> None:
    """Bring a credit rule: `build(options) -> CreditRule`; `kind` says what its values are."""


@hookspec
def register_buffers(register: RegisterBuffer) -> None:
    """Bring an experience buffer: `build(options) -> Buffer`."""


@hookspec
def register_stores(register: RegisterStore) -> None:
    """Bring a store: `build(options, folder, read_only) -> Store`; `folder` is the run's."""


@hookspec
def register_task_sources(register: RegisterTaskSource) -> None:
    """Bring a task source: `build(options, folder, seed) -> TaskSource`; paths are relative to `folder`."""


@hookspec
def register_trackers(register: RegisterTracker) -> None:
    """Bring a tracker: `build(options, run_dir) -> Tracker`."""


@hookspec
def register_release_checks(register: RegisterReleaseCheck) -> None:
    """Bring a check that a version must pass before it is served: `build(options) -> ReleaseCheck`."""


@hookspec
def register_redactors(register: RegisterRedactor) -> None:
    """Bring what takes texts of real use apart before they are stored: `build(options) -> Redactor`."""


@hookspec
def register_commands(cli: typer.Typer) -> None:
    """Add commands to the `agl` command line."""


@hookspec(firstresult=True)
def show_run(run: Path, host: str, port: int, operator_key: str | None) -> AbstractAsyncContextManager[RunPages] | None:
    """Show a run in the browser at `host` and `port` (0: a free one) while a command works on it.

    Browsers on other machines need the operator's key; without one they see nothing.
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

    Each plugin gets what the one before it returned, installed ones first, then files in their order. To leave an
    episode out of training, return it with `dropped` set or without transitions; the reason is `DropReason.PLUGIN`.
    """


@hookspec
def policy_updated(policy: str, version: int, metrics: Mapping[str, Any]) -> None:
    """A policy was updated; `version` is served from now on."""
