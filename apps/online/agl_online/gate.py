"""Whether a new version may answer sessions: its evaluation and replies against those of the served one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from agl_core.learning.batch import BatchPlan, PolicyCredit, make_batches
from agl_core.protocols import Engine
from agl_core.reading.evaluations import Comparison, compare
from agl_core.training.evaluate import Evaluated
from agl_core.types import CreditKind, Episode
from agl_online.config import GateSection
from agl_online.kinds import Release, ReleaseCheck
from agl_online.ledger import By, Decision, State

_SOLVED = 1.0
"""Nothing here depends on which rollouts count as solved."""
_MIN_TASKS = 20
"""Tasks of a set that both versions need: the interval of the difference takes means for normal."""
_MAX_KL = 0.5
"""How far a version may be from the served one in nats per token, by the served version's sampled replies."""
_MAX_LENGTH = 2.0
"""How many times as long responses may be."""
_MAX_RISES = (
    ("tool_results/failed", 0.1, "tool calls that fail"),
    ("answers/empty", 0.05, "empty answers"),
    ("answers/refused", 0.05, "answers that refuse"),
    ("answers/question", 0.2, "answers that end with a question"),
)
"""By how much shares may rise that a policy may learn to raise in order to raise the reward."""
_NO_CREDIT = PolicyCredit(
    "none", lambda group: [[0.0] * len(each.transitions) for each in group], kind=CreditKind.RETURN
)
"""What is only scored earns nothing."""


def decide(
    policy: str,
    step: int,
    candidate: Evaluated,
    incumbent: Evaluated,
    settings: GateSection,
    *,
    divergence: Mapping[str, float],
    objections: Sequence[str] = (),
) -> Decision:
    """Whether a candidate passes the gate, with the figures that say so.

    `candidate` and `incumbent` are evaluations of both versions on the same tasks, `divergence` how far apart they
    are. `objections` are what the user's own checks say against it.
    """
    comparisons = compare(candidate.scores, incumbent.scores, _SOLVED)
    figures = {name: value for each in comparisons for name, value in _figures(each)}
    for key, now in _of(candidate, "reward/mean"):
        figures |= {key: now, f"{key}/before": incumbent.metrics.get(key, math.nan)}
    reasons = [*_rewards(comparisons, settings), *objections]
    if not comparisons:
        reasons.append("no task was evaluated with both versions")
    figures |= divergence
    if not divergence:
        reasons.append("no sampled reply showed how far it is from the served version")
    for key, nats in divergence.items():
        if not nats <= _MAX_KL:
            reasons.append(
                f"it is {nats:.3f} nats per token from the served version on {_place(key, 'kl')} (more than "
                f"{_MAX_KL:g})"
            )
    for name, limit, what in _MAX_RISES:
        for key, now in _of(candidate, name):
            before = incumbent.metrics.get(key, 0.0)
            figures |= {key: now, f"{key}/before": before}
            if now - before > limit:
                reasons.append(f"the share of {what} rose from {before:.3f} to {now:.3f} on {_place(key, name)}")
    for key, now in _of(candidate, "length/response"):
        length = incumbent.metrics.get(key, math.nan)
        figures |= {key: now, f"{key}/before": length}
        if now > _MAX_LENGTH * max(length, 1.0):
            reasons.append(f"responses grew from {length:.0f} to {now:.0f} tokens on {_place(key, 'length/response')}")
    state = State.REJECTED if reasons else State.PASSED
    return Decision(policy, step, state, By.GATE, _sentence(reasons or list(_gains(figures))), figures)


async def divergence(
    engine: Engine, policy: str, episodes: Mapping[str, Sequence[Episode]], agents: Sequence[str]
) -> dict[str, float]:
    """KL(served ‖ new) in nats per token, by held-out set and mode: `eval/sampled/kl`.

    `episodes` are of the served version, by set and mode, and the engine holds the weights of the new one. For a
    recorded token with d = log π_new − log π_served it is the mean of exp(d) − 1 − d, which is never negative (k3 of
    Schulman, "Approximating KL divergence", 2020). A greedy reply is no sample of a distribution, and so is not
    counted; nor is one without exact log-probabilities. Without any other reply there is no figure.
    """
    found = {}
    for place, evaluated in episodes.items():
        groups = [[each] for each in evaluated]
        batch = make_batches(groups, BatchPlan({policy: _NO_CREDIT}, agents)).batches.get(policy)
        if batch is not None:
            served_R = batch.behaviour_logprobs_R[batch.mask_R].astype(np.float64)
            change_R = (await engine.logprobs(policy, batch))[batch.mask_R] - served_R
            found[f"{place}/kl"] = float(np.mean(np.expm1(change_R) - change_R))
    return found


async def objections(checks: Mapping[str, ReleaseCheck], release: Release) -> list[str]:
    """What these checks, by their names, say against serving a version; a check that raises speaks against it too."""
    found = []
    for name, check in checks.items():
        try:
            said = check(release)
            said = await said if inspect.isawaitable(said) else said
        except Exception as error:
            said = f"it raised {type(error).__name__}: {error}"
        if said is not None:
            found.append(f"{name}: {said}")
    return found


def _rewards(comparisons: Sequence[Comparison], settings: GateSection) -> Iterator[str]:
    for each in comparisons:
        place, found = f"{each.set}, {each.mode}", each.difference
        if each.tasks < _MIN_TASKS:
            yield f"{each.tasks} tasks are too few to compare rewards on {place} ({_MIN_TASKS} are enough)"
        elif not found.low > -settings.tolerance:
            yield (
                f"the reward on {place} may be lower by more than {settings.tolerance:g} ({found.value:+.3f}, 95% "
                f"interval {found.low:+.3f} to {found.high:+.3f})"
            )


def _figures(comparison: Comparison) -> Iterator[tuple[str, float]]:
    place, found = f"{comparison.set}/{comparison.mode}/reward", comparison.difference
    yield f"{place}/difference", found.value
    yield f"{place}/low", found.low
    yield f"{place}/high", found.high
    yield f"{comparison.set}/{comparison.mode}/tasks", float(comparison.tasks)


def _gains(figures: Mapping[str, float]) -> Iterator[str]:
    for key, now in figures.items():
        if key.endswith("/reward/mean"):
            yield f"reward {figures[f'{key}/before']:.3f} → {now:.3f} on {_place(key, 'reward/mean')}"


def _of(evaluated: Evaluated, name: str) -> list[tuple[str, float]]:
    """A metric of every set and mode."""
    return [(key, value) for key, value in evaluated.metrics.items() if key.endswith(f"/{name}")]


def _place(key: str, name: str) -> str:
    return key.removesuffix(f"/{name}").replace("/", ", ")


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."
