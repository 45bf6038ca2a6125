"""Effects of thresholds: each alarm can be switched off."""

from __future__ import annotations

from agl_core.training.alarms import Alarm, Watch
from agl_core.types import AlarmName

from .settings_bench import Bench, Effect, Given


def alarms(bench: Bench, given: Given) -> list[AlarmName]:
    """Those that a run wants to know of."""
    watch = Watch.of_run(bench.load(given).config, [])
    return [alarm.name for alarm in watch.wanted(Alarm(name, "something", "", "") for name in AlarmName)]


def thresholds(bench: Bench, given: Given) -> int:
    """In which of three steps the alarm on truncated responses is raised."""
    watch = Watch.of_run(bench.load(given).config, [])
    return sum(len(watch.look({"length/truncated": 0.3})) for _ in range(3))


EFFECTS = {f"alarms.{name}": Effect(alarms, {f"alarms.{name}": False}) for name in AlarmName}
EFFECTS[f"alarms.{AlarmName.TRUNCATED}"] = Effect(thresholds, {f"alarms.{AlarmName.TRUNCATED}": 0.5})
