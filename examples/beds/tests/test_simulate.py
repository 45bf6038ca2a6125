"""Training in this process begins with what its policy is worth, and a tool that always works earns nothing."""

from __future__ import annotations

import math
import random
from functools import cache
from statistics import fmean

import pytest
from bed_plugin import draw
from beds import BELL, Bed, Game, Policy, State, Worth, outcomes
from simulate import GROUPS, Arm, Simulation, run

from agl_algorithms.grpo import Grpo, GrpoOptions
from agl_algorithms.prepared import prepare, samples_of
from agl_core import CreditKind
from agl_core.learning.batch import BatchPlan, PolicyCredit, filter_trainable, make_batches
from agl_rewards.air import AirOptions, air

CELL = {"bed": Bed.ERRAND, "level": "lion", "things": 3, "calls": 8}


def tools_of(policy: Policy, start: State) -> tuple[float, float]:
    """How many tool calls, and how many that work, a game has on average."""

    @cache
    def count(state: State | None) -> tuple[float, float]:
        asked, ok = 0.0, 0.0
        for letter, share in policy(state).items() if state else ():
            for o in outcomes(state, letter):
                later, later_ok = count(o.after)
                asked += share * o.chance * ((o.tool is not None) + later)
                ok += share * o.chance * ((o.tool is not None and o.works) + later_ok)
        return asked, ok

    return count(start)


def test_a_simulated_run_is_repeatable_and_begins_with_what_its_policy_is_worth() -> None:
    arm, seed = Arm("air"), 5
    result = run(CELL, arm, seed, 4e-3, steps=2, held_out=8)
    assert run(CELL, arm, seed, 4e-3, steps=2, held_out=8) == result
    assert all(math.isfinite(number) for number in [*result["rewards"], *result["tools_ok"], result["after"]])

    policy, rng = Simulation(arm, seed, 4e-3).shares_by_prompt(), random.Random(f"train/{seed}")
    starts = [State.first(draw(rng, **CELL)) for _ in range(GROUPS)]
    value = fmean(map(Worth(policy).value, starts))
    asked, ok = (sum(counts) for counts in zip(*(tools_of(policy, start) for start in starts), strict=True))
    assert 0.1 < value < 0.9
    error = 4 * math.sqrt(value * (1 - value) / 48)
    assert result["rewards"][0] == pytest.approx(value, abs=error)
    assert result["tools_ok"][0] == pytest.approx(ok / asked, abs=0.1)

    untrained, rng = run(CELL, arm, seed, 4e-3, steps=0, held_out=192), random.Random(f"eval/{seed}")
    value = fmean(Worth(policy).value(State.first(draw(rng, **CELL))) for _ in range(192))
    assert untrained["after"] == pytest.approx(value, abs=error / 2), "four times as many games"


def test_a_tool_that_always_works_earns_nothing_by_default() -> None:
    """In a group without contrast: nobody wins, and the bell always rings."""
    game = Game(Bed.ERRAND, "mole", ("ant", "bee", "cat", "dog") * 2, calls=12, farm=True)
    group = Simulation(Arm("identical"), 0, 1e-3).play([game] * 8)
    assert {episode.terminal for episode in group} == {0.0}
    tools = {t.key: {result.tool for result in t.tool_results} for episode in group for t in episode.transitions}
    for form, kind in (("two-level", CreditKind.ADVANTAGE), ("mixed", CreditKind.RETURN)):
        plan = BatchPlan({"default": PolicyCredit("air", air(AirOptions(form=form)), kind)})  # type: ignore[arg-type]
        usable = filter_trainable(make_batches([group], plan).batches["default"], context_length=99, vocabulary=999)
        result = prepare(usable, samples_of(usable.batch), Grpo(GrpoOptions())).result(1, {})
        advantages = dict(zip(usable.batch.keys, result.advantage_N, strict=True))
        bells = [advantages[key] for key, asked in tools.items() if asked == {BELL}]
        assert len(bells) > 5
        assert all(value > 0 for value in bells) if form == "mixed" else bells == [0.0] * len(bells)
        assert any(advantages[key] for key in tools), "other tools' calls differ"
