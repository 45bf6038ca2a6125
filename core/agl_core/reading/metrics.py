"""The numbers of a run, as its folder has them (docs/metrics.md): its alarms, its health, and what it came to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import orjson

from agl_core.training.alarms import FIRST, Alarm, no_contrast, paragraphs
from agl_core.training.checkpoints import HEADLINE_SET
from agl_core.training.failures import REMEDIES, no_result, no_reward
from agl_core.training.metrics import LOSS, METRICS_FILE, PAIR_ACCURACY, counts, of_update
from agl_core.types import AlarmName, DropReason, Ending, Verdict

_REWARD = "/reward/mean"
LOSSES = f"/{LOSS}"


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """The numbers of one training step or of one evaluation."""

    step: int
    kind: str
    """`train` or `eval`."""
    values: Mapping[str, float]
    alarms: Sequence[Alarm] = ()
    """Those that were raised since the line before."""
    stopped: str = ""
    """Why the run ended here, before its last step."""

    @classmethod
    def parse(cls, text: bytes) -> MetricsLine:
        """A line that `MetricsLog.write` wrote. LookupError, TypeError, ValueError or AttributeError if it is none."""
        line = orjson.loads(text)
        values = {key: float(value) for key, value in line.items() if type(value) in (int, float)}
        alarms = [Alarm(**{**alarm, "name": AlarmName(alarm["name"])}) for alarm in line.get("alarms", ())]
        return cls(int(line["step"]), line["kind"], values, alarms, str(line.get("stopped", "")))

    @property
    def headline_set(self) -> str | None:
        """Of an evaluation: the set `eval`, else the first one, and the first mode: `eval/greedy`."""
        sets = [key.removesuffix(_REWARD) for key in self.values if key.endswith(_REWARD)]
        return next((name for name in sets if name.startswith(f"{HEADLINE_SET}/")), sets[0] if sets else None)

    @property
    def headline(self) -> float | None:
        """The reward of the headline set."""
        return self.values.get(f"{self.headline_set}{_REWARD}")


def read_metrics(folder: Path) -> list[MetricsLine]:
    """The lines of a run's metrics, in their order; without those that cannot be read."""
    return read_lines(folder)[0]


def read_lines(folder: Path) -> tuple[list[MetricsLine], list[int]]:
    """The lines of a run's metrics, and the numbers, from 1 on, of those that cannot be read.

    A last line without its end does not count: it is being written, or a kill cut it off.
    """
    file = folder / METRICS_FILE
    lines, damaged = [], []
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), 1):
        try:
            lines.append(MetricsLine.parse(text))
        except (LookupError, TypeError, ValueError, AttributeError):
            if text.endswith(b"\n"):
                damaged.append(number)
    return lines, damaged


def series(lines: Sequence[MetricsLine], kind: str, key: str) -> list[tuple[int, float]]:
    """The values of a key, each with its step.

    >>> series([MetricsLine(1, "train", {"reward/mean": 0.5}), MetricsLine(1, "eval", {})], "train", "reward/mean")
    [(1, 0.5)]
    """
    return [(line.step, line.values[key]) for line in lines if line.kind == kind and key in line.values]


def held_out(lines: Sequence[MetricsLine], what: str = _REWARD) -> dict[str, list[tuple[int, float]]]:
    """The mean reward of each held-out set and mode, as `eval/greedy`, each with the step it follows; or what else
    evaluations have at the end of a key, as the loss of recorded replies by set (`LOSSES`)."""
    keys = dict.fromkeys(key for line in lines if line.kind == "eval" for key in line.values if key.endswith(what))
    return {key.removesuffix(what): series(lines, "eval", key) for key in keys}


@dataclass(frozen=True, slots=True)
class RunHealth:
    """The health of a run by its metrics."""

    alarms: Sequence[tuple[int, Alarm]]
    """Each with its step, in the order in which they were raised."""
    holding: Mapping[AlarmName, int]
    """The alarms that still held after the latest step, as those on numbers can; each with the step it holds since."""
    verdicts: Sequence[tuple[int, Mapping[Verdict, int]]]
    """The number of training rollouts with each verdict, by step."""
    reasons: Mapping[str, int]
    """How often each symptom (`unhealthy/NAME`) and missing evidence (`unobserved/NAME`) was found."""
    damaged: Sequence[int]
    """The numbers of the lines of the metrics file that cannot be read, from 1 on."""


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """The result of a run."""

    word: Literal["learned", "not yet", "cannot"]
    """cannot: no step had anything to learn from, and further ones like them have nothing either."""
    why: str
    failed: bool = False
    """No rollout of training finished."""

    @property
    def text(self) -> str:
        return f"{self.word}: {self.why}"


def read_health(folder: Path) -> RunHealth:
    """The health of the run in this folder. A run without steps has none of anything; nothing is changed."""
    lines, damaged = read_lines(folder)
    alarms = [(line.step, alarm) for line in lines for alarm in line.alarms]
    steps = [line for line in lines if line.kind == "train"]
    latest = steps[-1].values if steps else {}
    reasons: Counter[str] = Counter()
    for line in steps:
        reasons.update({k: int(n) for k, n in line.values.items() if k.startswith(("unhealthy/", "unobserved/"))})
    return RunHealth(
        alarms,
        {alarm.name: step for step, alarm in alarms if f"alarm/{alarm.name}" in latest},
        [(line.step, {v: int(line.values.get(f"health/{v}", 0)) for v in Verdict}) for line in steps],
        reasons,
        damaged,
    )


def stopped_early(lines: Sequence[MetricsLine]) -> str:
    """At which step and why the run ended before its last one; empty if it did not, or has gone on since."""
    latest = next((line for line in reversed(lines) if line.stopped or line.kind == "train"), None)
    return f"stopped early at step {latest.step}: {latest.stopped}" if latest and latest.stopped else ""


def verdict_of(lines: Sequence[MetricsLine]) -> RunVerdict | None:
    """The result of the run with these metrics, and why it stopped early if it did; None before its first step."""
    verdict, stopped = _result_of(lines), stopped_early(lines)
    return replace(verdict, why=f"{verdict.why}; {stopped}") if verdict and stopped else verdict


def _result_of(lines: Sequence[MetricsLine]) -> RunVerdict | None:
    steps = [line.values for line in lines if line.kind == "train"]
    if not steps:
        return None
    endings = counts(steps, "ending/")
    if endings and not endings[Ending.FINISHED]:
        [(ending, count)] = endings.most_common(1)
        which = "all" if len(endings) == 1 else f"{count} of"
        why = f"no rollout finished; {which} {endings.total()} ended as {ending}. {REMEDIES.get(Ending(ending), '')}"
        return RunVerdict("cannot", why.strip(), failed=True)
    kept = [
        step["transitions/kept"] - step.get("transitions/without_advantage", 0)
        for step in steps
        if "transitions/kept" in step
    ]
    if kept and not any(kept):
        return RunVerdict("cannot", _why_nothing_was_learned(steps))
    measured = [_held_out_change(lines), _training_change(steps)]
    if not any("reward/mean" in step for step in steps):
        measured.insert(0, _pairs_won(steps) or _loss_change(lines))
    changes = [change for change in measured if change is not None]
    for is_rise, text in changes:
        if is_rise:
            return RunVerdict("learned", text)
    return RunVerdict("not yet", changes[0][1] if changes else "one step shows no change")


def _why_nothing_was_learned(steps: Sequence[Mapping[str, float]]) -> str:
    if all(f"alarm/{AlarmName.NO_REWARD}" in step for step in steps):
        return f"no rollout got a reward. {paragraphs(no_reward)[1]}"
    dropped = counts(steps, "dropped/") + counts(steps, "episodes_dropped/")
    others = dropped.keys() - {
        DropReason.GROUP_TOO_SMALL,
        DropReason.NO_ADVANTAGE,
        DropReason.NO_CONTRAST,
    }  # They follow from others.
    if DropReason.NON_FINITE in others or (others and not dropped[DropReason.NO_ADVANTAGE]):
        named = sorted(others, key=lambda reason: -dropped[reason])
        reasons = ", ".join(f"{dropped[reason]} {reason}" for reason in named)
        return f"nothing was trained on; dropped: {reasons}. {REMEDIES.get(DropReason(named[0]), '')}".strip()
    if all(f"alarm/{AlarmName.NO_RESULT}" in step for step in steps):
        return f"the result was null in all rollouts. {paragraphs(no_result)[1]}"
    return f"no group had contrast: every advantage was 0. {paragraphs(no_contrast)[1]}"


class _Sample(NamedTuple):
    """The rewards of some rollouts."""

    rollouts: float
    mean: float
    variance: float


def _sample(lines: Iterable[Mapping[str, float]], prefix: str = "") -> _Sample | None:
    """The rewards of the rollouts of these lines together; None without any."""
    keys = [f"{prefix}{key}" for key in ("rollouts", "reward/mean", "reward/std")]
    rows = [tuple(line[key] for key in keys) for line in lines if all(key in line for key in keys)]
    count = math.fsum(n for n, _, _ in rows)
    if not count:
        return None
    mean = math.fsum(n * line_mean for n, line_mean, _ in rows) / count
    return _Sample(count, mean, math.fsum(n * (std**2 + (m - mean) ** 2) for n, m, std in rows) / count)


def _held_out_change(lines: Sequence[MetricsLine]) -> tuple[bool, str] | None:
    """From the first evaluation to that of the last step; the same tasks, so that two standard errors are much."""
    evaluations = sorted((line for line in lines if line.kind == "eval" and line.headline_set), key=lambda e: e.step)
    if not evaluations or evaluations[0].step == evaluations[-1].step:
        return None
    name = evaluations[0].headline_set
    before, after = (_sample([evaluations[i].values], f"{name}/") for i in (0, -1))
    return _change(f"the held-out reward ({name})", before, after, 2.0)


def _loss_change(lines: Sequence[MetricsLine]) -> tuple[bool, str] | None:
    """From the first evaluation of recorded replies to the last, without them from the first steps to the last ones.

    The replies of an evaluation are the same ones, so no change of it is chance.
    """
    evaluated = {name: points for name, points in held_out(lines, LOSSES).items() if len(points) > 1}
    if evaluated:
        headline = HEADLINE_SET if HEADLINE_SET in evaluated else next(iter(evaluated))
        (_, before), *_, (_, after) = evaluated[headline]
        name = f"the held-out loss ({headline})"
    else:
        steps = [line.values for line in lines if line.kind == "train"]
        losses = [fmean(of_step) for step in steps if (of_step := of_update(LOSS, step))]
        if (count := min(FIRST, len(losses) // 2)) == 0:
            return None
        name, before, after = "the training loss", fmean(losses[:count]), fmean(losses[-count:])
    moved = "fell" if after < before else "rose"
    return after < before, f"{name} {moved} from {before:.3g} to {after:.3g} nats per token"


def _pairs_won(steps: Sequence[Mapping[str, float]]) -> tuple[bool, str] | None:
    """Whether the better one of a pair gained more than the other by training, beyond chance; None without pairs."""
    last = steps[-min(FIRST, -(-len(steps) // 2)) :]
    pairs = math.fsum(math.fsum(of_update("pairs", step)) for step in last)
    if not pairs:
        return None
    share = fmean([fmean(of_step) for step in last if (of_step := of_update(PAIR_ACCURACY, step))])
    wins = share - 0.5 > 1 / math.sqrt(pairs)  # Two standard errors.
    return wins, (
        f"in {share:.0%} of the last {pairs:.0f} pairs training favoured the better one"
        f"{'' if wins else '; half of them would be chance'}"
    )


def _training_change(steps: Sequence[Mapping[str, float]]) -> tuple[bool, str] | None:
    """From the first steps to the last ones. Their tasks differ, and rollouts of one task are alike: hence three."""
    count = min(FIRST, len(steps) // 2)
    return _change("the training reward", _sample(steps[:count]), _sample(steps[-count:] if count else ()), 3.0)


def _change(name: str, before: _Sample | None, after: _Sample | None, least: float) -> tuple[bool, str] | None:
    """True if a reward rose by more than chance, and its change in words; None where it is not known.

    Chance is `least` standard errors of the difference, if all rewards were drawn from one distribution.
    """
    if before is None or after is None:
        return None
    count, difference = before.rollouts + after.rollouts, after.mean - before.mean
    inside = (before.rollouts * before.variance + after.rollouts * after.variance) / count
    between = before.rollouts * after.rollouts * difference**2 / count**2
    error = math.sqrt((inside + between) * (1 / before.rollouts + 1 / after.rollouts))
    values = f"from {before.mean:.3g} to {after.mean:.3g}"
    if abs(difference) <= least * error:
        return False, f"{name} went {values}, which is no more than chance"
    return difference > 0, f"{name} {'rose' if difference > 0 else 'fell'} {values}"
