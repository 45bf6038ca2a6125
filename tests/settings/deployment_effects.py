"""Effects of what a version has to show before it is served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agl_core.training.evaluate import Evaluated, TaskScore
from agl_online import canary, gate
from agl_online.canary import Outcome
from agl_online.config import CanarySection, GateSection, learn_section
from agl_online.deployed import is_drawn
from agl_online.gate import objections
from agl_online.kinds import Release

from .settings_bench import Bench, Effect, Given

BEFORE = np.random.default_rng(0).random(30) < 0.5


def evaluated(rewards: Any, **metrics: float) -> Evaluated:
    scores = [TaskScore("eval", "greedy", f"task-{n}", (float(each),)) for n, each in enumerate(rewards)]
    return Evaluated([], {f"eval/greedy/{key}": value for key, value in metrics.items()}, 0, scores, [])


def at_the_gate(
    metric: str = "", value: float = 0.0, *, worse: int = 0, nats: float = 0.0
) -> Callable[[Bench, Given], Any]:
    """What becomes of a version with this figure, so far from the served one, which fails at so many more tasks."""

    def observe(bench: Bench, given: Given) -> Any:
        settings = _gate(bench, given)
        usual = {"length/response": 20.0}
        candidate = evaluated(BEFORE & (np.arange(30) >= worse), **{**usual, **({metric: value} if metric else {})})
        apart = {"eval/sampled/kl": nats}
        return gate.decide("default", 2, candidate, evaluated(BEFORE, **usual), settings, divergence=apart).state

    return observe


def objected(bench: Bench, given: Given) -> Any:
    release = Release("default", 2, Path(), {}, 1, {})
    checks = {
        name: chosen.build()
        for name, chosen in bench.load(given).sections["learn"].parts.get("gate.checks", {}).items()
    }
    return objections(checks, release)


def with_sessions(*outcomes: Outcome) -> Callable[[Bench, Given], Any]:
    """What becomes of a canary with these sessions."""

    def observe(bench: Bench, given: Given) -> Any:
        look = canary.look("default", 2, 1, outcomes, _canary(bench, given))
        return None if look.decision is None else look.decision.state

    return observe


def arms(count: int, *, here: float, there: float, names: int | None = None, **bad: Any) -> tuple[Outcome, ...]:
    """So many sessions of both; of the canary's three in five are bad."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        name = f"user-{number % (names or count)}"
        found += [
            Outcome(2, name, float(rng.random() < here), **(bad if number % 5 < 3 else {})),
            Outcome(1, name, float(rng.random() < there)),
        ]
    return tuple(found)


def drawn(bench: Bench, given: Given) -> list[bool]:
    return [is_drawn(f"user-{number}", 2, _canary(bench, given).share) for number in range(50)]


def _gate(bench: Bench, given: Given) -> GateSection:
    return learn_section(bench.load(given)).gate


def _canary(bench: Bench, given: Given) -> CanarySection:
    return learn_section(bench.load(given)).canary


EQUAL, BETTER = {"here": 0.7, "there": 0.7}, {"here": 0.9, "there": 0.4}
ON: Given = {"learn.canary.tolerance": 0.1, "learn.canary.share": 0.5}
GATE: Given = {"learn.propose_every": 20}

EFFECTS: Mapping[str, Effect] = {
    "learn.gate.tolerance": Effect(at_the_gate(worse=4), {"learn.gate.tolerance": 0.5}, GATE),
    "learn.gate.checks": Effect(objected, {"learn.gate.checks": {"even": {}}}, GATE),
    "learn.canary.share": Effect(drawn, {"learn.canary.share": 0.4}, ON),
    "learn.canary.reward": Effect(with_sessions(*arms(100, **EQUAL)), {"learn.canary.reward": [0.9, 1.9]}, ON),
    "learn.canary.tolerance": Effect(with_sessions(*arms(100, **EQUAL)), {"learn.canary.tolerance": 0.6}, ON),
    "learn.canary.error": Effect(with_sessions(*arms(40, here=0.7, there=0.4)), {"learn.canary.error": 0.5}, ON),
    "learn.canary.min_sessions": Effect(with_sessions(*arms(60, **BETTER)), {"learn.canary.min_sessions": 61}, ON),
}
