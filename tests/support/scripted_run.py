"""What trainers get of a run, without its plugins, engine and server: for tests that script rollouts and engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agl_core import kinds
from agl_core.builtin import identical
from agl_core.config.models import RunConfig
from agl_core.config.resolve import Chosen, PolicyPlan
from agl_core.kinds import Component, NoOptions
from agl_core.plugins import Plugins
from agl_core.types import CreditKind
from agl_server.health.alarms import StallWatch


def scripted_config(config: RunConfig, plugins: Plugins | None = None) -> Any:
    """A loaded configuration with one policy, whose credit rule is `identical`."""
    returns = frozenset({CreditKind.RETURN})
    credit = Chosen(Component(kinds.CREDIT, "scripted", lambda _: identical, "", yields=returns), NoOptions())
    algorithm = Chosen(Component(kinds.ALGORITHM, "scripted", lambda _: None, ""), NoOptions())
    policies = {"default": PolicyPlan(algorithm, credit)}
    return SimpleNamespace(
        config=config, policies=policies, plugins=plugins or Plugins(), imitates=False, is_rewarded=True
    )


def scripted_session(store: Any, version: int, **parts: Any) -> Any:
    """A session of `run` with this store, version and other parts."""
    server, versions = SimpleNamespace(store=store), {"default": version}
    return SimpleNamespace(**{"server": server, "run": "run", "versions": versions, "stall": StallWatch(), **parts})
