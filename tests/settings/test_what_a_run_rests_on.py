"""Which configurations may rest on what the agent's side alone asserts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agl_core.training.failures import asserted_rewards, asserted_tool_results, assertions_in

from .settings_bench import Bench

TOOLS = {"rewards.exact_match": {}, "rewards.tool_results": {}}


@pytest.mark.parametrize(
    ("given", "of_tool_results", "of_rewards"),
    [
        ({}, False, False),
        ({"credit.name": "air"}, True, False),
        (TOOLS, True, False),
        ({**TOOLS, "rewards.tool_results.weight": 0.0}, False, False),
        ({"rewards": {}}, False, True),
        ({"rewards.exact_match.weight": 0.0}, False, True),
    ],
)
def test_what_it_may_rest_on(bench: Bench, given: Mapping[str, Any], of_tool_results: bool, of_rewards: bool) -> None:
    checks = {asserted_tool_results: of_tool_results, asserted_rewards: of_rewards}
    assert assertions_in(bench.load(given)) == [check for check, is_raised in checks.items() if is_raised]
