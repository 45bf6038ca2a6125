"""What every installed credit rule yields and every algorithm takes; core's tests of `check` have which go together."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core import kinds
from agl_core.plugins import Plugins

YIELDS = {
    "identical": {"return"},
    "discounted": {"return"},
    "stepwise": {"return"},
    "air": {"return"},
    "immediate": {"reward", "return"},
}
TAKES: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {}, "return"),
    ("grpo", {"beta": 0.0}, "return"),
    ("grpo", {"ratio": "sequence"}, "return"),
    ("reinforce++", {}, "return"),
    ("reinforce++", {"beta": 0.1}, "return"),
    ("reinforce++", {"across_calls": True, "gamma": 0.9}, "reward"),
    ("ppo", {}, "return"),
    ("ppo", {"beta": 0.1}, "return"),
    ("ppo", {"across_calls": True}, "reward"),
]


def test_credit_rules_and_algorithms_are_all_listed() -> None:
    plugins = Plugins.load()
    assert {name: rule.yields for name, rule in plugins.components(kinds.CREDIT).items()} == YIELDS
    assert set(plugins.components(kinds.ALGORITHM)) == {name for name, *_ in TAKES}


@pytest.mark.parametrize(("name", "options", "takes"), TAKES)
def test_an_algorithm_takes_rewards_only_where_it_works_across_calls(
    name: str, options: dict[str, Any], takes: str
) -> None:
    algorithm = Plugins.load().component(kinds.ALGORITHM, name, "here")
    assert algorithm.takes(algorithm.options(**options)) == takes
