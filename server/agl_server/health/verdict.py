"""The verdict on a run: its file of numbers, its health by these, and when they end it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

import orjson

from agl_core.errors import TrainingError
from agl_core.types import AlarmName, DropReason, Ending, Verdict
from agl_server.health.table import ALARMS, FIRST, REMEDIES, Alarm, Numbers

METRICS_FILE = "metrics.jsonl"
HEADLINE_SET = "eval"
"""The held-out set whose reward is the run's, if there are several."""
LOSS, PAIR_ACCURACY = "loss", "pair_accuracy"
"""Metrics of updates; `loss` is also the mode of an evaluation whose replies are recorded."""
_REWARD, LOSSES = "/reward/mean", f"/{LOSS}"
"""The end of a key of an evaluation, after its set."""
_PASSING = frozenset({DropReason.NO_ADVANTAGE, DropReason.NO_CONTRAST, DropReason.STALE, DropReason.STALLED})
"""Reasons that training itself causes and removes: rewards that are equal, for example, may differ later."""
_MAX_PROB_GAP = 0.2
"""Mean difference of the probabilities of tokens where they were sampled and in training. Rounding explains far less:
6e-5 was measured where servers had the weights rounded to bfloat16."""


@dataclass(frozen=True, slots=True)
class MetricsLine:
    """The numbers of one training step or of one evaluation."""

    step: int
    kind: str
    """`train` or `eval`."""
    values: Numbers
    alarms: Sequence[Alarm] = ()
    """Raised since the line before."""
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
        """An evaluation's set `eval`, else its first one, with the first mode: `eval/greedy`."""
        sets = [key.removesuffix(_REWARD) for key in self.values if key.endswith(_REWARD)]
        return next((name for name in sets if name.startswith(f"{HEADLINE_SET}/")), sets[0] if sets else None)

    @property
    def headline(self) -> float | None:
        return self.values.get(f"{self.headline_set}{_REWARD}")


def read_metrics(folder: Path) -> list[MetricsLine]:
    """The lines of a run's metrics, in their order; without those that cannot be read."""
    return read_lines(folder)[0]


def read_lines(folder: Path) -> tuple[list[MetricsLine], list[int]]:
    """The lines of a run's metrics, and the numbers, from 1 on, of those that cannot be read.

    A last line without its end does not count: it is being written, or a kill cut it off.
    """
    parsed = list(parsed_lines(folder / METRICS_FILE))
    damaged = [number for number, text, line in parsed if isinstance(line, Exception) and text.endswith(b"\n")]
    return [line for *_, line in parsed if isinstance(line, MetricsLine)], damaged


def parsed_lines(file: Path) -> Iterator[tuple[int, bytes, MetricsLine | Exception]]:
    """Each line with its number, or why it is none."""
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True) if file.exists() else (), 1):
        try:
            yield number, text, MetricsLine.parse(text)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            yield number, text, error


def series(lines: Sequence[MetricsLine], kind: str, key: str) -> list[tuple[int, float]]:
    """The values of a key, each with its step.

    >>> series([MetricsLine(1, "train", {"reward/mean": 0.5}), MetricsLine(1, "eval", {})], "train", "reward/mean")
    [(1, 0.5)]
    """
    return [(line.step, line.values[key]) for line in lines if line.kind == kind and key in line.values]


def held_out(lines: Sequence[MetricsLine], what: str = _REWARD) -> dict[str, list[tuple[int, float]]]:
    """By set and mode, as `eval/greedy`: each evaluation's step and mean reward, or other value whose key ends so."""
    keys = dict.fromkeys(key for line in lines if line.kind == "eval" for key in line.values if key.endswith(what))
    return {key.removesuffix(what): series(lines, "eval", key) for key in keys}


def counts(steps: Iterable[Numbers], prefix: str) -> Counter[str]:
    """The totals of the keys with this prefix, over all steps."""
    total: Counter[str] = Counter()
    for step in steps:
        total.update({key.removeprefix(prefix): int(n) for key, n in step.items() if key.startswith(prefix)})
    return total


def of_update(name: str, metrics: Numbers) -> list[float]:
    """The values of an update's metric by this name, of each policy."""
    return [value for key, value in metrics.items() if re.fullmatch(rf"update/(.+/)?{name}", key)]


@dataclass(frozen=True, slots=True)
class RunHealth:
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


def read_health(folder: Path) -> RunHealth:
    """The health of the run in this folder. A run without steps has none of anything; nothing is changed."""
    lines, damaged = read_lines(folder)
    alarms = [(line.step, alarm) for line in lines for alarm in line.alarms]
    steps = [line for line in lines if line.kind == "train"]
    latest = steps[-1].values if steps else {}
    reasons = Counter[str]()
    for line in steps:
        reasons.update({k: int(n) for k, n in line.values.items() if k.startswith(("unhealthy/", "unobserved/"))})
    return RunHealth(
        alarms,
        {alarm.name: step for step, alarm in alarms if f"alarm/{alarm.name}" in latest},
        [(line.step, {v: int(line.values.get(f"health/{v}", 0)) for v in Verdict}) for line in steps],
        reasons,
        damaged,
    )


@dataclass(frozen=True, slots=True)
class RunVerdict:
    word: Literal["learned", "not yet", "cannot"]
    """cannot: no step had anything to learn from, and further ones like them have nothing either."""
    why: str
    failed: bool = False
    """No rollout of training finished."""

    @property
    def text(self) -> str:
        return f"{self.word}: {self.why}"


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
        why = f"no rollout finished; {which} {endings.total()} ended as {ending}. {REMEDIES.get(ending, '')}"
        return RunVerdict("cannot", why.strip(), failed=True)
    kept = [s["transitions/kept"] - s.get("transitions/without_advantage", 0) for s in steps if "transitions/kept" in s]
    if kept and not any(kept):
        return RunVerdict("cannot", _why_nothing_was_learned(steps))
    measured = [_held_out_change(lines), _training_change(steps)]
    if not any("reward/mean" in step for step in steps):
        measured.insert(0, _pairs_won(steps) or _loss_change(lines, steps))
    changes = [change for change in measured if change is not None]
    learned = (change for change in changes if change.word == "learned")
    return next(learned, changes[0] if changes else RunVerdict("not yet", "one step shows no change"))


def _why_nothing_was_learned(steps: Sequence[Numbers]) -> str:
    if all(f"alarm/{AlarmName.NO_REWARD}" in step for step in steps):
        return f"no rollout got a reward. {ALARMS[AlarmName.NO_REWARD].remedy}"
    dropped = _dropped(steps)
    # These follow from others.
    others = dropped.keys() - {DropReason.GROUP_TOO_SMALL, DropReason.NO_ADVANTAGE, DropReason.NO_CONTRAST}
    if DropReason.NON_FINITE in others or (others and not dropped[DropReason.NO_ADVANTAGE]):
        named = sorted(others, key=lambda reason: -dropped[reason])
        reasons = ", ".join(f"{dropped[reason]} {reason}" for reason in named)
        return f"nothing was trained on; dropped: {reasons}. {REMEDIES.get(named[0], '')}".strip()
    if all(f"alarm/{AlarmName.NO_RESULT}" in step for step in steps):
        return f"the result was null in all rollouts. {ALARMS[AlarmName.NO_RESULT].remedy}"
    return f"no group had contrast: every advantage was 0. {ALARMS[AlarmName.NO_CONTRAST].remedy}"


def _dropped(steps: Sequence[Numbers]) -> Counter[str]:
    """The transitions and whole episodes that these steps dropped, by reason."""
    return counts(steps, "dropped/") + counts(steps, "episodes_dropped/")


class _Sample(NamedTuple):
    rollouts: float
    mean: float
    variance: float


def _sample(lines: Iterable[Numbers], prefix: str = "") -> _Sample | None:
    """The rewards of the rollouts of these lines together; None without any."""
    keys = [f"{prefix}{key}" for key in ("rollouts", "reward/mean", "reward/std")]
    rows = [tuple(line[key] for key in keys) for line in lines if all(key in line for key in keys)]
    count = math.fsum(n for n, _, _ in rows)
    if not count:
        return None
    mean = math.fsum(n * line_mean for n, line_mean, _ in rows) / count
    return _Sample(count, mean, math.fsum(n * (std**2 + (m - mean) ** 2) for n, m, std in rows) / count)


def _held_out_change(lines: Sequence[MetricsLine]) -> RunVerdict | None:
    """From the first evaluation to that of the last step; the same tasks, so that two standard errors are much."""
    evaluations = sorted((line for line in lines if line.kind == "eval" and line.headline_set), key=lambda e: e.step)
    if not evaluations or evaluations[0].step == evaluations[-1].step:
        return None
    name = evaluations[0].headline_set
    before, after = evaluations[0].values, evaluations[-1].values
    return _change(f"the held-out reward ({name})", [before], [after], 2.0, f"{name}/")


def _training_change(steps: Sequence[Numbers]) -> RunVerdict | None:
    """From the first steps to the last ones. Their tasks differ, and rollouts of one task are alike: hence three."""
    count = min(FIRST, len(steps) // 2)
    return _change("the training reward", steps[:count], steps[len(steps) - count :], 3.0)


def _change(
    name: str, before: Sequence[Numbers], after: Sequence[Numbers], least: float, prefix: str = ""
) -> RunVerdict | None:
    """Learned if a reward rose by more than chance, `least` standard errors of the difference; None if not known."""
    first, last, both = (_sample(lines, prefix) for lines in (before, after, [*before, *after]))
    if first is None or last is None or both is None:
        return None
    error = math.sqrt(both.variance * (1 / first.rollouts + 1 / last.rollouts))
    values = f"from {first.mean:.3g} to {last.mean:.3g}"
    if abs(last.mean - first.mean) <= least * error:
        return RunVerdict("not yet", f"{name} went {values}, which is no more than chance")
    if last.mean > first.mean:
        return RunVerdict("learned", f"{name} rose {values}")
    return RunVerdict("not yet", f"{name} fell {values}")


def _loss_change(lines: Sequence[MetricsLine], steps: Sequence[Numbers]) -> RunVerdict | None:
    """From the first evaluation of recorded replies to the last, without them from the first steps to the last ones.

    The replies of an evaluation are the same ones, so no change of it is chance.
    """
    evaluated = {name: points for name, points in held_out(lines, LOSSES).items() if len(points) > 1}
    if evaluated:
        headline = HEADLINE_SET if HEADLINE_SET in evaluated else next(iter(evaluated))
        (_, before), *_, (_, after) = evaluated[headline]
        name = f"the held-out loss ({headline})"
    else:
        losses = [fmean(of_step) for step in steps if (of_step := of_update(LOSS, step))]
        if (count := min(FIRST, len(losses) // 2)) == 0:
            return None
        name, before, after = "the training loss", fmean(losses[:count]), fmean(losses[-count:])
    moved = "fell" if after < before else "rose"
    why = f"{name} {moved} from {before:.3g} to {after:.3g} nats per token"
    return RunVerdict("learned" if after < before else "not yet", why)


def _pairs_won(steps: Sequence[Numbers]) -> RunVerdict | None:
    """Whether the better one of a pair gained more than the other by training, beyond chance; None without pairs."""
    last = steps[-min(FIRST, -(-len(steps) // 2)) :]
    pairs = math.fsum(math.fsum(of_update("pairs", step)) for step in last)
    if not pairs:
        return None
    share = fmean([fmean(of_step) for step in last if (of_step := of_update(PAIR_ACCURACY, step))])
    text = f"in {share:.0%} of the last {pairs:.0f} pairs training favoured the better one"
    if share - 0.5 > 1 / math.sqrt(pairs):  # Two standard errors.
        return RunVerdict("learned", text)
    return RunVerdict("not yet", f"{text}; half of them would be chance")


def why_nothing(numbers: Numbers) -> Mapping[str, int]:
    """The reasons for which a step with these numbers had nothing to train on, by how often.

    Empty if it had data, or if rollouts finished and some were dropped for a passing reason. `group_too_small` does not
    count: it follows from others. A loss that is not a number moves no weight, whatever else was dropped.
    """
    if any(map(math.isnan, of_update(LOSS, numbers))):
        return {DropReason.NON_FINITE: 1}
    if numbers["transitions/kept"]:
        return {}
    endings, dropped = counts([numbers], "ending/"), _dropped([numbers])
    if endings and Ending.FINISHED not in endings:
        return endings
    ignored = {DropReason.GROUP_TOO_SMALL, *(_PASSING if DropReason.NON_FINITE in dropped else ())}
    reasons = {reason: count for reason, count in dropped.items() if reason not in ignored}
    return {} if reasons.keys() & _PASSING else reasons


def check_patience(step: int, steps: Sequence[Numbers]) -> None:
    """TrainingError if the last two steps had nothing to train on, whatever the reason of each."""
    reasons = [why_nothing(numbers) for numbers in steps[-2:]]
    if len(reasons) < 2 or not all(reasons):
        return
    most = sum(map(Counter, reasons), Counter[str]()).most_common()
    raise TrainingError(
        f"There was nothing to train on in steps {step - 1} to {step}: "
        f"{', '.join(f'{count} {reason}' for reason, count in most)}. {REMEDIES.get(most[0][0], '')} See "
        f"docs/faults.md. The run can be resumed."
    )


def check_serving(step: int, updates: Mapping[str, Numbers]) -> None:
    """TrainingError if a policy's server is not what is trained: `updates` are the metrics of a step by policy."""
    for policy, metrics in updates.items():
        if not (gap := metrics.get("prob_gap_mean", 0.0)) <= _MAX_PROB_GAP:
            raise TrainingError(
                f"Serving and training disagree in step {step}. Tokens that the current weights of '{policy}' sampled "
                f"have a mean probability of {metrics['prob_sampled_mean']:.3g} where they were sampled, and of "
                f"{metrics['prob_trained_mean']:.3g} in training. They differ by {gap:.3g} on average "
                f"(at most {_MAX_PROB_GAP:g}): probably the server has other weights than the trainer, or one of them "
                f"changes the logits. When the cause is fixed, go on from the last checkpoint (agl train --resume). "
                "If they are meant to differ, set alarms.logprob_gap = false."
            )
