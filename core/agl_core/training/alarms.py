"""Alarms: what a person should know of a run, with why it matters and what to do.

An alarm is a function of its name, which returns what it saw, or None. Its docstring, which docs/health.md shows, has
two paragraphs: when the alarm is raised and why that matters, and what to do. Here are the alarms on the numbers of the
steps; `failures` has those on the rollouts of a step, and `stall` that on a run in which nothing goes on.

"First" are the first 5 steps of a run. An alarm says nothing as long as steps lack a number that it looks at.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal, TypeAlias, TypeVar

from agl_core.types import AlarmName

Numbers: TypeAlias = Mapping[str, float]
"""The metrics of one training step (docs/metrics.md)."""
Values: TypeAlias = Sequence[float | None]
"""One metric of the steps so far, the latest last; None where a step lacks it."""
NumberCheck = TypeVar("NumberCheck", bound=Callable[..., str | None])

FIRST = 5
"""The steps at the start of a run that later ones are compared with."""
KEPT_FIRST, KEPT = 100, 1000
"""Steps that alarms look at: so many at the start, and the latest."""
CHECKS: dict[Callable[..., str | None], tuple[str, ...]] = {}
"""The alarms on numbers, each with the metrics that it looks at."""


@dataclass(frozen=True)
class Alarm:
    """An alarm that was raised; `metrics.jsonl` has it in the line of its step."""

    name: AlarmName
    seen: str
    """The observation, with its numbers."""
    remedy: str
    """Advice to the user."""
    details: str = ""
    """More of what was seen, in lines of its own: the first error, for example."""

    @classmethod
    def of(cls, check: Callable[..., Any], seen: str, *, remedy: str = "", details: str = "") -> Alarm:
        """The alarm of this function; `remedy` is for a cause that is known more exactly."""
        return cls(AlarmName(check.__name__), seen, remedy or paragraphs(check)[1], details)

    @property
    def text(self) -> str:
        return " ".join(part for part in (f"alarm {self.name}: {self.seen}.", self.remedy, self.details) if part)


def paragraphs(check: Callable[..., Any]) -> tuple[str, str]:
    """When an alarm is raised, and what to do; without its docstring (`python -OO`), nothing."""
    when, remedy, *_ = [*(inspect.getdoc(check) or "").split("\n\n"), "", ""]
    return when.replace("\n", " "), remedy.replace("\n", " ")


def on(*metrics: str) -> Callable[[NumberCheck], NumberCheck]:
    """Make a function an alarm on these metrics; it gets the values of each, and the run's own `limit` if any."""

    def register(check: NumberCheck) -> NumberCheck:
        CHECKS[check] = metrics
        return check

    return register


@on("reward/mean", "reward/std", "rollouts")
def reward_collapse(means: Values, stds: Values, rollouts: Values, limit: float = 0.5) -> str | None:
    """The mean reward of 3 steps is below that of the best 3, of the first 100 and the last 1,000 steps, by `limit` of
    what the best are above the worst step (or above 0), and by 4 standard errors. The policy forgets what it had
    learned, and rarely recovers by itself.

    Go on from the best checkpoint (agl train --resume RUN/checkpoints/STEP) with a smaller learning rate, or with a KL
    term (algorithm.grpo.beta).
    """
    rows = zip(means, stds, rollouts, strict=True)
    known = [(mean, (std or 0.0) ** 2 / max(count or 1.0, 1.0)) for mean, std, count in rows if mean is not None]
    if len(known) < 6:
        return None
    rewards = [mean for mean, _ in known]
    windows = [fmean(rewards[i : i + 3]) for i in range(len(rewards) - 2)]
    best, last = max(windows), windows[-1]
    start = windows.index(best)
    noise = 4 * math.sqrt(fmean([variance for _, variance in known[start : start + 3]]) / 3)
    if best - last < max(limit * (best - min(0.0, *rewards)), noise) or best == last:
        return None
    return f"the mean reward fell from {best:.3g} to {last:.3g}, each over 3 steps"


@on("update/entropy", "reward/mean")
def entropy_collapse(entropies: Values, rewards: Values, limit: float = 0.1) -> str | None:
    """The entropy of 5 steps is below `limit` of that of the first 5, and the mean reward is no higher. The policy
    became certain without becoming better: it explores no more, and groups have no contrast.

    Lower the learning rate, set a bonus for entropy (algorithm.grpo.entropy) or raise the sampling temperature, or go
    on from an earlier checkpoint.
    """
    before, now = _first(entropies), _last(entropies, 5)
    if before is None or now is None or fmean(now) >= limit * before:
        return None
    first_reward, last_rewards = _first(rewards), _last(rewards, 5)
    if first_reward is None or last_rewards is None or fmean(last_rewards) > first_reward:
        return None
    return f"the entropy fell from {before:.3g} to {fmean(now):.3g} nats per token, and the reward did not rise"


@on("update/entropy")
def entropy_explosion(entropies: Values, limit: float = 3.0) -> str | None:
    """The entropy of 3 steps is `limit` times that of the first 5, and above 1. The policy drifts towards chance; its
    responses soon are gibberish.

    Lower the learning rate, train fewer epochs on each batch, or go on from an earlier checkpoint.
    """
    before, now = _first(entropies), _last(entropies, 3)
    if before is None or now is None or fmean(now) < max(limit * before, 1.0):
        return None
    return f"the entropy rose from {before:.3g} to {fmean(now):.3g} nats per token"


@on("update/kl_behaviour")
def kl_runaway(divergences: Values, limit: float = 0.5) -> str | None:
    """KL(behaviour ‖ current) is at least `limit`: median of 3 steps. One update moves the policy far from the one that
    sampled the data, so that the data no longer fit it.

    Lower the learning rate or the epochs of the algorithm; in asynchronous runs lower async.max_staleness.
    """
    return _at_least(limit, divergences, "KL(behaviour ‖ current) is {}", average=median)


@on("update/kl_reference")
def kl_reference_runaway(divergences: Values, limit: float = 3.0) -> str | None:
    """KL(current ‖ initial weights) is at least `limit`: median of 3 steps. The policy is far from the initial weights:
    it loses what these could do, and may exploit the reward.

    Read some rollouts with high rewards. Raise the KL term (algorithm.grpo.beta), or lower the learning rate.
    """
    return _at_least(limit, divergences, "KL(current ‖ initial weights) is {}", average=median)


@on("groups/no_contrast")
def no_contrast(shares: Values, limit: float = 0.95) -> str | None:
    """At least `limit` of the groups have equal rewards: mean of 5 steps. Where all rewards of a group are equal, its
    advantages are 0: these rollouts teach nothing.

    If the reward is at its best, the run is done. Otherwise choose tasks of medium difficulty, make groups larger
    (train.group_size), or give rewards for parts of the way.
    """
    return _at_least(limit, shares, "{} of the groups have equal rewards", steps=5)


@on("length/truncated")
def truncated(shares: Values, limit: float = 0.2) -> str | None:
    """At least `limit` of the responses reach the token limit: mean of 3 steps. A truncated response has no end: its
    answer or its tool call is missing, and it is trained on all the same.

    Raise sampling.max_tokens, or reward shorter responses.
    """
    return _at_least(limit, shares, "{} of the responses reach the token limit")


@on("calls/parse_errors", "rollouts", "rollout/turns")
def parse_errors(errors: Values, rollouts: Values, turns: Values, limit: float = 0.2) -> str | None:
    """At least `limit` of the responses have tool calls that do not parse: mean of 3 steps. A tool call that does not
    parse is not run, and the agent goes on without its result.

    Look at some (agl rollouts --verdict unhealthy). Check that the chat template and the model's tool format go
    together; a reward for well-formed calls helps.
    """
    shares = _shares(errors, _responses(rollouts, turns))
    return _at_least(limit, shares, "{} of the responses have tool calls that do not parse")


@on("responses/repetitive")
def repetition(shares: Values, limit: float = 0.1) -> str | None:
    """At least `limit` of the responses end in a loop: mean of 3 steps. Responses that loop are a sign of a policy that
    is trained too hard, or of a reward for length.

    Lower the learning rate, or go on from an earlier checkpoint; check what the reward says of long responses.
    """
    return _at_least(limit, shares, "{} of the responses end in a loop")


@on("responses/gibberish")
def gibberish(shares: Values, limit: float = 0.1) -> str | None:
    """At least `limit` of the responses are gibberish: mean of 3 steps. Responses that are no text show weights that
    broke, or a server that samples with other weights.

    Check the learning rate and update/logprob_gap_max, and go on from an earlier checkpoint.
    """
    return _at_least(limit, shares, "{} of the responses are gibberish")


@on("tool_results/failed")
def tool_errors(shares: Values, limit: float = 0.3) -> str | None:
    """At least `limit` of the tool calls fail, and 0.2 more than in the first 5 steps: mean of 3 steps. The agent
    learns from what failing tools say, and a service behind them may be down.

    Read the errors (agl show ROLLOUT). If a service fails, fix it and go on from the checkpoint before; if the policy
    makes worse calls, reward calls that work.
    """
    return _at_least(limit, shares, "{} of the tool calls fail", rise=0.2)


@on("answers/empty")
def empty_answers(shares: Values, limit: float = 0.2) -> str | None:
    """At least `limit` of the answers are empty, and 0.1 more than in the first 5 steps: mean of 3 steps. The policy
    says nothing: a reward that punishes wrong answers more than none teaches that.

    Compare the reward of empty answers with that of wrong ones, and check the chat template's end token.
    """
    return _at_least(limit, shares, "{} of the answers are empty", rise=0.1)


@on("calls/prefix_broken", "rollouts", "rollout/turns")
def broken_prefixes(broken: Values, rollouts: Values, turns: Values, limit: float = 0.1) -> str | None:
    """At least `limit` of the responses have a broken prefix before them: mean of 3 steps. The policy sees its earlier
    replies with other tokens than it sampled, and prefixes are computed again.

    Have the agent send its replies back as it got them, without rewriting or trimming; see docs/bad-input.md.
    """
    shares = _shares(broken, _responses(rollouts, turns))
    return _at_least(limit, shares, "{} of the responses have a broken prefix before them")


@on("dropped/stale", "transitions/kept", "transitions/dropped")
def stale(too_old: Values, kept: Values, dropped: Values, limit: float = 0.2) -> str | None:
    """At least `limit` of the transitions are too old to be trained on: mean of 3 steps. Rollouts are run and then
    thrown away, because the policy has moved on meanwhile.

    Lower async.in_flight, raise async.max_staleness, or add workers.
    """
    all_transitions = [None if k is None else k + (d or 0.0) for k, d in zip(kept, dropped, strict=True)]
    return _at_least(limit, _shares(too_old, all_transitions), "{} of the transitions are too old to be trained on")


@on("update/grad_norm")
def gradient_spike(norms: Values, limit: float = 10.0) -> str | None:
    """The gradient norm is at least `limit` times the median of the 10 steps before, and above 10. One batch pulls the
    weights much harder than others; clipping hides its size, not its direction.

    Look at the rollouts of this step. If spikes come again, lower the learning rate or the gradient's limit.
    """
    now, before = norms[-1] if norms else None, [norm for norm in norms[:-1] if norm is not None][-10:]
    if now is None or len(before) < FIRST or now < max(limit * median(before), 10.0):
        return None
    return f"the gradient norm is {now:.3g}; the median of the steps before is {median(before):.3g}"


@on("update/logprob_gap_max")
def logprob_gap(gaps: Values, limit: float = 1.0) -> str | None:
    """The largest difference of log-probabilities is at least `limit` nats: median of 3 steps. The server that samples
    and the trainer disagree about the same tokens, so that ratios are wrong.

    Check that both have the same weights, dtype and temperature, and switch on truncated importance weights.
    """
    return _at_least(limit, gaps, "the largest difference of log-probabilities is {} nats", average=median)


def _at_least(
    limit: float,
    values: Values,
    text: str,
    *,
    steps: int = 3,
    rise: float | None = None,
    average: Callable[[Sequence[float]], float] = fmean,
) -> str | None:
    """The observation, if the average of the last steps is at least `limit`, and `rise` above that of the first."""
    recent = _last(values, steps)
    if recent is None or (value := average(recent)) < limit:
        return None
    seen = f"{text.format(f'{value:.3g}')} over the last {steps} steps"
    if rise is None:
        return seen
    first = _first(values)
    return None if first is None or value < first + rise else f"{seen}, and {first:.3g} in the first {FIRST}"


def _last(values: Values, count: int) -> list[float] | None:
    """The values of the last `count` steps; None unless all of them have one."""
    known = [value for value in values[-count:] if value is not None]
    return known if len(known) == count else None


def _first(values: Values) -> float | None:
    """The mean over the first steps that have a value; None if there are no later ones."""
    known = [value for value in values if value is not None]
    return fmean(known[:FIRST]) if len(known) > FIRST else None


def _shares(counts: Values, totals: Values) -> Values:
    """Each count, which is 0 where a step lacks it, as a share of its total."""
    return [(count or 0.0) / total if total else None for count, total in zip(counts, totals, strict=True)]


def _responses(rollouts: Values, turns: Values) -> Values:
    """The number of responses in each step."""
    return [None if n is None or t is None else n * t for n, t in zip(rollouts, turns, strict=True)]


@dataclass
class Watch:
    """Looks at each step. An alarm that goes on is raised once.

    `settings` are the run's `[alarms]`; `policies` are its policies' names; a resumed run passes the numbers of the
    steps so far. It looks at the first steps and the last `kept` ones: a run may have very many.
    """

    settings: Mapping[AlarmName, float | Literal[False]] = field(default_factory=dict)
    policies: Sequence[str] = ("default",)
    steps: list[Numbers] = field(default_factory=list)
    kept: int = KEPT

    @property
    def held(self) -> Numbers:
        """The alarms that hold after the latest step, as metrics."""
        return {key: value for step in self.steps[-1:] for key, value in step.items() if key.startswith("alarm/")}

    def wanted(self, alarms: Iterable[Alarm]) -> list[Alarm]:
        """Those of these alarms that the run has not switched off."""
        return [alarm for alarm in alarms if self.settings.get(alarm.name) is not False]

    def look(self, numbers: Numbers, others: Iterable[Alarm] = ()) -> list[Alarm]:
        """The alarms after a step with these numbers that did not hold before it; `others` were raised elsewhere."""
        before = self.held
        self.steps.append(numbers)
        if len(self.steps) > KEPT_FIRST + self.kept:
            del self.steps[KEPT_FIRST : -self.kept]
        on_numbers = (Alarm.of(check, seen) for check in CHECKS if (seen := self._seen(check)) is not None)
        alarms = self.wanted([*others, *on_numbers])
        self.steps[-1] = {**numbers, **{f"alarm/{alarm.name}": 1.0 for alarm in alarms}}
        return [alarm for alarm in alarms if f"alarm/{alarm.name}" not in before]

    def standing(self, limits: Mapping[AlarmName, int]) -> str:
        """The alarm that held after as many of the last steps as its limit says, in words; empty without one."""
        for name, limit in limits.items():
            if len(self.steps) >= limit and all(f"alarm/{name}" in numbers for numbers in self.steps[-limit:]):
                return f"the alarm {name} has stood for {limit} steps"
        return ""

    def _seen(self, check: Callable[..., str | None]) -> str | None:
        """The observation of an alarm; if it looks at updates, of each policy on the steps that updated it."""
        limit = self.settings.get(AlarmName(check.__name__))
        settings = {"limit": limit} if limit else {}
        if len(self.policies) == 1 or not any(key.startswith("update/") for key in CHECKS[check]):
            return check(*([step.get(key) for step in self.steps] for key in CHECKS[check]), **settings)
        sentences = []
        for policy in self.policies:
            own = f"update/{policy}/"
            steps = [step for step in self.steps if any(key.startswith(own) for key in step)]
            keys = [key.replace("update/", own) for key in CHECKS[check]]
            if seen := check(*([step.get(key) for step in steps] for key in keys), **settings):
                sentences.append(f"policy {policy}: {seen}")
        return "; ".join(sentences) or None
