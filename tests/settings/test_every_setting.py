"""No silent no-ops: a test changes every setting that agl accepts, and sees what that changes."""

from __future__ import annotations

import re

import pytest

from agl_core.plugins import Plugins

from .effects import EFFECTS, SEEN_BY
from .settings_bench import HERE, Bench
from .settings_found import every_setting

SETTINGS = every_setting(Plugins.load())
PROCESSES = ("agent.command", "workers.isolation", "workers.memory_mib")
"""To see these, a process is started for each attempt."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.storm if name in PROCESSES else ()) for name in EFFECTS]
)
async def test_it_has_an_effect(name: str, bench: Bench) -> None:
    effect = EFFECTS[name]
    before = await bench.observed(effect.observe, effect.given)
    assert await bench.observed(effect.observe, {**effect.given, **effect.change}) != before


def test_every_other_setting_is_changed_by_the_tests_of_its_component() -> None:
    """Which say its name, in code."""
    root, unseen = HERE.parents[1], []
    for setting in [setting for setting in SETTINGS if setting not in EFFECTS]:
        folders = next((folders for prefix, folders in SEEN_BY.items() if setting.startswith(prefix)), ())
        name = re.compile(rf"\b{setting.rpartition('.')[2]}\b")
        files = [file for folder in folders for file in (root / folder).rglob("*.py")]
        if not any(name.search(file.read_text()) for file in files):
            unseen.append(setting)
    assert unseen == [], "say in EFFECTS how changing it is seen, or change it in a test of its component"
    assert len(SETTINGS) == len(set(SETTINGS))
    assert EFFECTS.keys() - set(SETTINGS) == set(), "no such settings"
