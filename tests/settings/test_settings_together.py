"""Settings that the check lets through together do train, and what a run then rests on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from agl_core.errors import CapabilityError
from agl_core.types import AlarmName
from agl_server.health.alarms import alarms_of

from .settings_bench import Bench


@pytest.mark.parametrize("algorithm", ["reinforce++", "ppo"])
async def test_groups_of_one_where_nothing_compares_them(algorithm: str, bench: Bench) -> None:
    given = {"algorithm.name": algorithm, "train.group_size": 1}
    bench.load(given)
    transitions = (await bench.run(given)).summary.as_json()["transitions"]
    assert transitions["kept"] > 0
    assert transitions["dropped"] == {}


async def test_every_policy_trains_by_its_own_algorithm_and_credit(bench: Bench) -> None:
    model = {"path": str(bench.weights)}
    run = await bench.run(
        {
            "tasks.train.path": "by_turns.jsonl",
            "train.groups_per_step": 1,
            "policies": {
                "author": {
                    "model": model,
                    "agents": ["writer"],
                    "algorithm": {"name": "ppo", "ppo": {"across_calls": True, "gamma": 0.5}},
                    "credit": {"name": "immediate"},
                },
                "judge": {
                    "model": model,
                    "agents": ["crit*"],
                    "credit": {"name": "discounted", "discounted": {"gamma": 0.5}},
                },
            },
        }
    )
    assert [update["policy"] for update in run.updates] == ["author", "judge"] * 2
    author, judge = (run.seen["policies"][name] for name in ("author", "judge"))
    options = author["algorithm_options"]
    assert (author["algorithm"], options["across_calls"], options["gamma"]) == ("ppo", True, 0.5)
    assert (judge["algorithm"], "across_calls" in judge["algorithm_options"]) == ("grpo", False)
    author, judge = run.updates[2:]
    assert (author["kind"], judge["kind"]) == ("reward", "return")
    assert (author["turn"], judge["turn"]) == ([0, 2] * 2, [1, 3] * 2)
    # The terminal reward of 1 comes with the critic's last call, which is part of what the writer sees happen.
    assert (author["values"], judge["values"]) == ([0.0, 1.0] * 2, [0.25, 1.0] * 2)
    assert author["version"] == judge["version"] == [1] * 4

    trained = [line for line in run.metrics if line["kind"] == "train"]
    assert all({"update/author/loss", "update/judge/loss"} <= line.keys() for line in trained)
    assert not any("update/loss" in line for line in trained)


async def test_a_policy_without_trained_agents_is_never_updated(bench: Bench) -> None:
    model = {"path": str(bench.weights)}
    run = await bench.run(
        {
            "tasks.train.path": "by_turns.jsonl",
            "train.agents": ["writer"],
            "policies": {
                "author": {"model": model, "agents": ["writer"]},
                "judge": {"model": model, "agents": ["critic"]},
            },
        }
    )
    assert [update["policy"] for update in run.updates] == ["author"] * 2
    # The return of an episode is 1, whoever made its last call.
    assert {value for update in run.updates for value in update["values"]} == {1.0}
    transitions = run.summary.as_json()["transitions"]
    assert transitions["dropped"] == {"untrained_agent": transitions["kept"]}


TOOLS = {"rewards.exact_match": {}, "rewards.tool_results": {}}


def test_a_tool_result_does_not_count_twice(bench: Bench) -> None:
    bench.load(TOOLS)
    with pytest.raises(CapabilityError, match=r"'air'.* and reward 'tool_results'.*a tool result would count twice"):
        bench.load({**TOOLS, "credit.name": "air"})


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
    names = {AlarmName.ASSERTED_TOOL_RESULTS: of_tool_results, AlarmName.ASSERTED_REWARDS: of_rewards}
    raised = [name for name in alarms_of(bench.load(given)) if name in names]
    assert raised == [name for name, is_raised in names.items() if is_raised]
