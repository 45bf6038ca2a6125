"""No silent no-ops: every setting that agl accepts has an entry in a table of effects, and has that effect."""

from __future__ import annotations

import doctest
from collections.abc import Mapping

import pytest

from agl_core.plugins import Plugins

from . import (
    alarm_effects,
    algorithm_effects,
    deployment_effects,
    learn_effects,
    online_effects,
    policy_effects,
    rule_effects,
    run_effects,
    server_effects,
    settings_found,
    tracker_effects,
    training_effects,
)
from .settings_bench import Bench, Effect
from .settings_found import every_setting

PLUGINS = Plugins.load()
SETTINGS = every_setting(PLUGINS)
EFFECTS: Mapping[str, Effect] = {
    **run_effects.EFFECTS,
    **training_effects.EFFECTS,
    **policy_effects.EFFECTS,
    **rule_effects.EFFECTS,
    **server_effects.EFFECTS,
    **online_effects.EFFECTS,
    **deployment_effects.EFFECTS,
    **learn_effects.EFFECTS,
    **alarm_effects.EFFECTS,
    **tracker_effects.EFFECTS,
    **algorithm_effects.effects(PLUGINS),
}


PROCESSES = ("agent.command", "workers.isolation", "workers.memory_mib")
"""To see these, an engine or a process for each attempt is started: a third of the time of all."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.storm if name in PROCESSES else ()) for name in SETTINGS]
)
async def test_it_has_an_effect(name: str, benches: tuple[Bench, Bench]) -> None:
    if name not in EFFECTS:
        pytest.fail(f"The setting '{name}' has no entry in a table of effects: say how changing it is seen.")
    effect = EFFECTS[name]
    bench, another = benches
    before = await bench.observed(effect.observe, effect.given)
    assert await another.observed(effect.observe, effect.given) == before, "not a function of the settings"
    assert await bench.observed(effect.observe, {**effect.given, **effect.change}) != before


def test_no_entry_is_out_of_date() -> None:
    assert EFFECTS.keys() - set(SETTINGS) == set()


def test_settings_are_found_where_they_are() -> None:
    assert doctest.testmod(settings_found).failed == 0
    some = {
        "config_version", "train.steps", "train.endings.lost", "tasks", "tasks.NAME.source", "trackers",
        "policies.NAME.optimizer.weight_decay", "policies.NAME.model.lora.rank", "rewards.NAME.weight", "credit.name",
        "engine.torch.threads", "algorithm.grpo.beta", "credit.discounted.gamma", "reward.judge.rubric",
        "task_source.jsonl.path",
    }  # fmt: skip
    assert some <= set(SETTINGS)
    assert len(SETTINGS) == len(set(SETTINGS))
