"""Watching the numbers of a run: after each step, which alarms hold, and which of them are new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agl_core.config import RunConfig
from agl_core.training.alarms.conditions import Condition, Numbers, Steps
from agl_core.training.alarms.table import ALARMS, Alarm, raised
from agl_core.types import AlarmName

_UPDATE = "update/"
_PREFIX = "alarm/"
_READ = frozenset(key for kind in ALARMS.values() if kind.condition for key in kind.condition.keys)


@dataclass
class Watch:
    """Compares each step with the conditions of the table. An alarm that goes on is raised once.

    `settings` are the run's `[alarms]`; `policies` are its policies' names; a resumed run passes the numbers of the
    steps so far.
    """

    settings: Mapping[AlarmName, float | Literal[False]] = field(default_factory=dict)
    policies: Sequence[str] = ("default",)
    steps: list[Numbers] = field(default_factory=list)
    _others: set[AlarmName] = field(default_factory=set, init=False)
    """Alarms of the step under way that other code raised."""

    @classmethod
    def of_run(cls, config: RunConfig, steps: Iterable[Numbers]) -> Watch:
        """The watch of a run with this configuration, which goes on after these steps."""
        settings = config.alarms
        if config.learn is not None:  # What an earlier version sampled is bound to have other log-probabilities.
            settings = {AlarmName.LOGPROB_GAP: False, **settings}
        return cls(settings, tuple(config.policies), [_read(each) for each in steps])

    def wanted(self, alarms: Iterable[Alarm]) -> list[Alarm]:
        """Those of these alarms that the run has not switched off."""
        return [alarm for alarm in alarms if self.settings.get(alarm.name) is not False]

    def add(self, alarms: Iterable[Alarm]) -> list[Alarm]:
        """Take in what other code raised during the step; those that the run wants to know of come back."""
        wanted = self.wanted(alarms)
        self._others.update(alarm.name for alarm in wanted)
        return wanted

    def look(self, numbers: Numbers) -> list[Alarm]:
        """A step ended with these numbers: the alarms on them that the step before did not have."""
        before = {key for key in (self.steps[-1] if self.steps else {}) if key.startswith(_PREFIX)}
        self.steps.append(_read(numbers))
        found = [alarm for name in ALARMS if (alarm := self._alarm(name)) is not None]
        self.steps[-1] = {**self.steps[-1], **{f"{_PREFIX}{alarm.name}": 1.0 for alarm in found}}
        return [alarm for alarm in found if f"{_PREFIX}{alarm.name}" not in before]

    @property
    def held(self) -> dict[str, float]:
        """The alarms that hold after the latest step, as metrics; those that other code raised are forgotten."""
        others = {f"{_PREFIX}{name}": 1.0 for name in self._others}
        self._others.clear()
        return {key: value for key, value in self.steps[-1].items() if key.startswith(_PREFIX)} | others

    def _alarm(self, name: AlarmName) -> Alarm | None:
        condition, limit = ALARMS[name].condition, self.settings.get(name)
        if condition is None or limit is False:
            return None
        limit = condition.limit if limit is None else limit
        if len(self.policies) == 1 or not any(key.startswith(_UPDATE) for key in condition.keys):
            seen = condition.seen(self.steps, limit)
        else:
            seen = self._of_policies(condition, limit)
        return None if seen is None else raised(name, seen)

    def _of_policies(self, condition: Condition, limit: float) -> str | None:
        """What a condition on updates saw of the policies: their metrics carry their names."""
        found = {policy: condition.seen(_of_policy(self.steps, policy), limit) for policy in self.policies}
        return "; ".join(f"policy {policy}: {seen}" for policy, seen in found.items() if seen) or None


def _read(numbers: Numbers) -> Numbers:
    """Those of a step's metrics that conditions read, and the alarms that it has."""
    return {key: value for key, value in numbers.items() if key.startswith(_PREFIX) or _is_read(key)}


def _is_read(key: str) -> bool:
    """Whether a condition reads this metric, of any policy."""
    return key in _READ or (key.startswith(_UPDATE) and _UPDATE + key.rpartition("/")[2] in _READ)


def _of_policy(steps: Steps, policy: str) -> Steps:
    """The numbers of the steps that updated a policy, as a run with this policy alone would have them."""
    mine = f"{_UPDATE}{policy}/"
    return [
        {_UPDATE + key.removeprefix(mine) if key.startswith(mine) else key: value for key, value in each.items()}
        for each in steps
        if any(key.startswith(mine) for key in each)
    ]
