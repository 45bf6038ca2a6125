"""The credited values that each installed algorithm takes; core's tests of `check` have what goes with them."""

from __future__ import annotations

from typing import Any

import pytest

from agl_core import kinds
from agl_core.plugins import Plugins


@pytest.mark.parametrize(
    ("name", "options", "takes"),
    [
        ("grpo", {}, "return"),
        ("reinforce++", {}, "return"),
        ("reinforce++", {"across_calls": True, "gamma": 0.9}, "reward"),
        ("ppo", {}, "return"),
        ("ppo", {"across_calls": True}, "reward"),
    ],
)
def test_an_algorithm_takes_rewards_only_where_it_works_across_calls(
    name: str, options: dict[str, Any], takes: str
) -> None:
    algorithm = Plugins.load().component(kinds.ALGORITHM, name, "here")
    assert algorithm.takes(algorithm.options(**options)) == takes
