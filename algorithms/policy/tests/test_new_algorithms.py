"""The package as a plugin, and new algorithms as a user writes them: the advantages, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agl_algorithms import PolicyGradient, PolicyGradientOptions, group_statistics, plugin
from agl_algorithms.grpo import Grpo
from agl_algorithms.ppo import Ppo
from agl_algorithms.reinforce import Reinforce
from agl_core import Capability, CreditKind, kinds
from agl_core.plugins import Plugins

from .conftest import Row, make_samples


class Mine(PolicyGradient):
    def advantages(self, samples, values_R=None):
        group = group_statistics(samples)
        return samples.at_tokens(group.deviation_N)


def test_what_has_no_advantage_is_kept_for_a_kl_term_alone() -> None:
    values = {0: [1.0, 0.0, 0.5], 1: [2.0, 2.0]}
    samples = make_samples(
        [Row(group, 9 * group + i, value, (True, False)) for group in values for i, value in enumerate(values[group])]
    )
    advantages_R = Mine(PolicyGradientOptions()).advantages(samples)
    assert Mine(PolicyGradientOptions()).keep(samples, advantages_R).tolist() == [True, True, False, False, False]
    assert Mine(PolicyGradientOptions(beta=0.1)).keep(samples, advantages_R).all()


ALWAYS = {Capability.TOKEN_IDS}


@pytest.mark.parametrize(
    ("name", "made", "options", "takes", "needs"),
    [
        ("grpo", Grpo, {}, CreditKind.RETURN, {Capability.GROUPS, Capability.REFERENCE}),
        ("grpo", Grpo, {"beta": 0}, CreditKind.RETURN, {Capability.GROUPS}),
        ("reinforce++", Reinforce, {}, CreditKind.RETURN, set()),
        ("reinforce++", Reinforce, {"across_calls": True}, CreditKind.REWARD, set()),
        ("reinforce++", Reinforce, {"beta": 0.1}, CreditKind.RETURN, {Capability.REFERENCE}),
        ("ppo", Ppo, {}, CreditKind.RETURN, {Capability.CRITIC}),
        ("ppo", Ppo, {"across_calls": True}, CreditKind.REWARD, {Capability.CRITIC}),
        ("ppo", Ppo, {"beta": 0.1}, CreditKind.RETURN, {Capability.CRITIC, Capability.REFERENCE}),
    ],
)
def test_each_is_registered_with_what_it_takes_and_needs(
    name: str, made: type, options: dict[str, Any], takes: CreditKind, needs: set[Capability]
) -> None:
    plugins = Plugins()
    plugins.register(plugin, "test")
    component = plugins.components(kinds.ALGORITHM)[name]
    chosen = component.options(**options)
    algorithm = component.build(chosen)
    assert isinstance(algorithm, made)
    assert component.needs(chosen) == ALWAYS | needs
    assert component.takes(chosen) is takes
    # What it tells the engine is what the check goes by.
    assert algorithm.needs_critic == (Capability.CRITIC in needs)
    assert algorithm.needs_reference == (Capability.REFERENCE in needs)
    assert all(field.description for field in component.options.model_fields.values())
    assert component.options(**chosen.model_dump()) == chosen


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, agl_algorithms.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
