"""The package as a plugin: what it brings, what it needs, and that a check of it costs no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agl_algorithms import plugin
from agl_algorithms.grpo import Grpo
from agl_algorithms.ppo import Ppo
from agl_algorithms.reinforce import Reinforce
from agl_core import Need
from agl_core.plugins import Kind, Plugins

ALWAYS = {Need.TOKEN_IDS}


@pytest.mark.parametrize(
    ("name", "made", "options", "needs"),
    [
        ("grpo", Grpo, {}, {Need.GROUPS, Need.RETURNS, Need.REFERENCE}),
        ("grpo", Grpo, {"beta": 0}, {Need.GROUPS, Need.RETURNS}),
        ("reinforce++", Reinforce, {}, {Need.RETURNS}),
        ("reinforce++", Reinforce, {"across_calls": True}, {Need.REWARDS}),
        ("reinforce++", Reinforce, {"beta": 0.1}, {Need.RETURNS, Need.REFERENCE}),
        ("ppo", Ppo, {}, {Need.RETURNS, Need.CRITIC}),
        ("ppo", Ppo, {"across_calls": True}, {Need.REWARDS, Need.CRITIC}),
        ("ppo", Ppo, {"beta": 0.1}, {Need.RETURNS, Need.CRITIC, Need.REFERENCE}),
    ],
    ids=str,
)
def test_each_is_registered_with_its_needs(name: str, made: type, options: dict[str, Any], needs: set[Need]) -> None:
    plugins = Plugins()
    plugins.register(plugin, "test")
    component = plugins.components(Kind.ALGORITHM)[name]
    chosen = component.options(**options)
    algorithm = component.build(chosen)
    assert isinstance(algorithm, made)
    assert component.needs(chosen) == ALWAYS | needs
    # What it tells the engine is what the check was told.
    assert algorithm.needs_critic == (Need.CRITIC in needs)
    assert algorithm.needs_reference == (Need.REFERENCE in needs)
    assert all(field.description for field in component.options.model_fields.values())
    assert component.options(**chosen.model_dump()) == chosen


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, agl_algorithms.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
