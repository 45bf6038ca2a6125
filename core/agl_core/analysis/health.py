"""The health of a run: what it came to, the alarms that it raised, its verdicts on rollouts, what it waits for now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from agl_core.analysis.curves.metrics import MetricsLine, read_metrics
from agl_core.client import LightningClient, ServerAddress
from agl_core.store.interface import Store
from agl_core.training.alarms import ALARMS
from agl_core.training.alarms.conditions import FIRST
from agl_core.training.alarms.rollouts import REMEDIES
from agl_core.training.alarms.stall import asked_tools, who_waits
from agl_core.training.metrics import METRICS_FILE
from agl_core.types import AlarmName, DropReason, Ending, Verdict
from agl_core.wire.body import Empty
from agl_core.wire.trainers import ACTIVITY, Activity


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """An alarm as `metrics.jsonl` has it."""

    step: int
    name: str
    seen: str
    why: str
    remedy: str
    details: str = ""
    holds: bool = False
    """Whether it still held after the latest step, as alarms on numbers can."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """What a run's folder says of its health."""

    alarms: Sequence[RaisedAlarm]
    """In the order in which they were raised."""
    verdicts: Sequence[tuple[int, Mapping[Verdict, int]]]
    """The number of training rollouts with each verdict, by step."""
    reasons: Mapping[str, int]
    """How often each symptom (`unhealthy/NAME`) and missing evidence (`unobserved/NAME`) was found."""
    damaged: Sequence[int] = ()
    """The numbers of the lines of the metrics file that cannot be read, from 1 on."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """What a run came to."""

    word: Literal["learned", "not yet", "cannot"]
    """cannot: no step had anything to learn from, and further ones like them have nothing either."""
    why: str
    failed: bool = False
    """No rollout of training finished."""

    @property
    def text(self) -> str:
        return f"{self.word}: {self.why}"


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the rollouts of a run wait for."""

    activity: Activity
    seen: str
    remedy: str


_PARTS = ("name", "seen", "why", "remedy", "details")


def read_health(folder: Path) -> RunHealth:
    """The health of the run in this folder. A run without steps has none of anything; nothing is changed."""
    lines = [line for line in read_metrics(folder) if line.kind == "train"]
    latest = lines[-1].values if lines else {}
    raised, damaged = _raised(folder / METRICS_FILE)
    newest = {each.get("name"): number for number, (_, each) in enumerate(raised)}
    alarms = [
        RaisedAlarm(
            step,
            **{part: str(each.get(part, "")) for part in _PARTS},
            holds=f"alarm/{each.get('name')}" in latest and newest[each.get("name")] == number,
        )
        for number, (step, each) in enumerate(raised)
    ]
    reasons: dict[str, int] = {}
    for line in lines:
        for key, value in line.values.items():
            if key.startswith(("unhealthy/", "unobserved/")):
                reasons[key] = reasons.get(key, 0) + int(value)
    return RunHealth(alarms, [(line.step, _verdicts(line)) for line in lines], reasons, damaged, len(lines))


def verdict_of(lines: Sequence[MetricsLine]) -> RunVerdict | None:
    """What the run with these metrics came to; None before its first step."""
    steps = [line.values for line in lines if line.kind == "train"]
    if not steps:
        return None
    endings = _counts(steps, "ending/")
    if endings and not endings[Ending.FINISHED]:
        [(ending, count)] = endings.most_common(1)
        which = "all" if len(endings) == 1 else f"{count} of"
        why = f"no rollout finished; {which} {endings.total()} ended as {ending}. {REMEDIES.get(Ending(ending), '')}"
        return RunVerdict("cannot", why.strip(), failed=True)
    kept = [
        each["transitions/kept"] - each.get("transitions/without_advantage", 0)
        for each in steps
        if "transitions/kept" in each
    ]
    if kept and not any(kept):
        return RunVerdict("cannot", _why_nothing_was_learned(steps))
    changes = [each for each in (_held_out_change(lines), _training_change(steps)) if each is not None]
    rose = next((each for each in changes if each.is_rise), None)
    if rose is not None:
        return RunVerdict("learned", rose.text)
    why = changes[0].text if changes else "one step shows no change"
    equal = [each["groups/no_contrast"] for each in steps if "groups/no_contrast" in each]
    if equal and (share := math.fsum(equal) / len(equal)) >= _MANY:
        why += f"; {share:.0%} of the groups had no contrast: all their rewards were equal"
    return RunVerdict("not yet", why)


_MANY = 0.5
"""From this share on, groups without contrast are a reason for having learned little."""


def _why_nothing_was_learned(steps: Sequence[Mapping[str, float]]) -> str:
    if all(f"alarm/{AlarmName.NO_REWARD}" in each for each in steps):
        alarm = ALARMS[AlarmName.NO_REWARD]
        return f"no rule in [rewards] had anything to say, and no agent reported a reward. {alarm.remedy}"
    dropped = _counts(steps, "dropped/") + _counts(steps, "episodes_dropped/")
    del dropped[DropReason.GROUP_TOO_SMALL]  # It follows from other reasons.
    others = [reason for reason, _ in dropped.most_common() if reason != DropReason.NO_ADVANTAGE]
    has_kept = any(each.get("transitions/kept") for each in steps)
    if others and not dropped[DropReason.NO_ADVANTAGE] and not has_kept:
        reasons = ", ".join(f"{int(dropped[reason])} {reason}" for reason in others)
        return f"nothing was trained on; dropped: {reasons}. {REMEDIES.get(DropReason(others[0]), '')}".strip()
    if has_kept and any(each.get("groups/no_contrast", 1.0) < 1 for each in steps):
        return "every advantage was 0, although the rewards of some groups differ: see the credit (agl show ROLLOUT)"
    rewards = [f"{each['reward/mean']:.3g}" for each in steps if "reward/mean" in each]
    seen = f" (mean reward {', '.join(dict.fromkeys(rewards[-3:]))})" if rewards else ""
    return (
        f"no group had contrast: all rewards that were compared were equal{seen}, so that every advantage was 0. "
        f"{ALARMS[AlarmName.NO_CONTRAST].remedy}"
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    """The rewards of some rollouts."""

    count: float
    mean: float
    variance: float

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, float]], prefix: str = "") -> _Sample | None:
        """The rollouts of these lines together."""
        keys = [f"{prefix}{key}" for key in ("rollouts", "reward/mean", "reward/std")]
        found = [tuple(each[key] for key in keys) for each in lines if all(key in each for key in keys)]
        count = math.fsum(n for n, _, _ in found)
        if not count:
            return None
        mean = math.fsum(n * of_line for n, of_line, _ in found) / count
        return cls(count, mean, math.fsum(n * (std**2 + (m - mean) ** 2) for n, m, std in found) / count)


@dataclass(frozen=True, slots=True)
class _Change:
    """A reward at the beginning and at the end of a run."""

    what: str
    before: _Sample
    after: _Sample
    least: float
    """The standard errors from which on it is more than chance."""

    @property
    def _errors(self) -> float:
        """The difference in standard errors, if all rewards were drawn from one distribution."""
        before, after = self.before, self.after
        count = before.count + after.count
        inside = (before.count * before.variance + after.count * after.variance) / count
        between = before.count * after.count * (after.mean - before.mean) ** 2 / count**2
        error = math.sqrt((inside + between) * (1 / before.count + 1 / after.count))
        return (after.mean - before.mean) / error if error else 0.0

    @property
    def is_rise(self) -> bool:
        return self._errors > self.least

    @property
    def text(self) -> str:
        values = f"from {self.before.mean:.3g} to {self.after.mean:.3g}"
        if abs(self._errors) > self.least:
            return f"{self.what} {'rose' if self.is_rise else 'fell'} {values}"
        return f"{self.what} went {values}, which is no more than chance"


def _held_out_change(lines: Sequence[MetricsLine]) -> _Change | None:
    """From the first evaluation to that of the last step; the same tasks, so that two standard errors are much."""
    found = sorted((line for line in lines if line.kind == "eval" and line.headline_set), key=lambda line: line.step)
    if not found or found[0].step == found[-1].step:
        return None
    name = found[0].headline_set
    before, after = (_Sample.of([line.values], f"{name}/") for line in (found[0], found[-1]))
    return None if before is None or after is None else _Change(f"the held-out reward ({name})", before, after, 2.0)


def _training_change(steps: Sequence[Mapping[str, float]]) -> _Change | None:
    """From the first steps to the last ones. Their tasks differ, and rollouts of one task are alike: hence three."""
    count = min(FIRST, len(steps) // 2)
    before, after = _Sample.of(steps[:count]), _Sample.of(steps[-count:] if count else ())
    return None if before is None or after is None else _Change("the training reward", before, after, 3.0)


def _counts(steps: Sequence[Mapping[str, float]], prefix: str) -> Counter[str]:
    """What the keys with this prefix count, over all steps."""
    found: Counter[str] = Counter()
    for each in steps:
        found.update({key.removeprefix(prefix): int(n) for key, n in each.items() if key.startswith(prefix)})
    return found


async def read_waiting(server: ServerAddress, store: Store) -> Waiting:
    """What the rollouts of a run wait for, as its server says. ServerError if that does not answer."""
    client = LightningClient(server.base_url, server.key)
    try:
        activity = await client.ask(ACTIVITY, Empty())
    finally:
        await client.close()
    return Waiting(activity, *who_waits(activity, await asked_tools(store, activity)))


def _verdicts(line: MetricsLine) -> dict[Verdict, int]:
    return {each: int(line.values.get(f"health/{each}", 0)) for each in Verdict}


def _raised(file: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """The alarms of all lines, each with its step, and the numbers of the lines that cannot be read."""
    found: list[tuple[int, dict[str, Any]]] = []
    damaged: list[int] = []
    content = file.read_bytes() if file.exists() else b""
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):  # It is being written, or a kill cut it off.
            continue
        try:
            line = orjson.loads(text)
            step, alarms = int(line["step"]), line.get("alarms", [])
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError):
            damaged.append(number)
            continue
        if isinstance(alarms, list):
            found += [(step, each) for each in alarms if isinstance(each, dict)]
    return found, damaged
