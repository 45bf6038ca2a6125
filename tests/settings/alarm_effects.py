"""Effects of thresholds: each alarm can be switched off."""

from __future__ import annotations

from agl_core.training.alarms import Alarm
from agl_core.training.alarms.steps import Watch
from agl_core.types import AlarmName

from .settings_bench import Bench, Effect, Given

SOUND = {
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "rollouts": 100.0,
    "rollout/turns": 2.0,
    "tool_results/failed": 0.0,
    "answers/empty": 0.0,
    "answers/question": 0.0,
    "transitions/kept": 100.0,
    "transitions/dropped": 0.0,
    "update/entropy": 0.5,
    "update/grad_norm": 0.5,
}
BAD = {
    **SOUND,
    "reward/mean": 0.05,
    "length/truncated": 1.0,
    "calls/parse_errors": 150.0,
    "calls/prefix_broken": 150.0,
    "responses/repetitive": 1.0,
    "responses/gibberish": 1.0,
    "groups/no_contrast": 1.0,
    "tool_results/failed": 1.0,
    "answers/empty": 1.0,
    "answers/question": 1.0,
    "dropped/stale": 90.0,
    "update/kl_behaviour": 9.0,
    "update/kl_reference": 99.0,
    "update/clip_fraction": 1.0,
    "update/grad_norm": 99.0,
    "update/logprob_gap_max": 9.0,
    "update/entropy": 0.001,
}


def alarms(bench: Bench, given: Given) -> set[AlarmName]:
    """What a run raises in which everything goes wrong, first with too little entropy, then with too much."""
    watch = Watch.of_run(bench.load(given).config, [])
    steps = [SOUND] * 8 + [BAD] * 6 + [{**BAD, "update/entropy": 9.0}] * 3
    on_numbers = {alarm.name for numbers in steps for alarm in watch.look(numbers)}
    others = [Alarm(name, "something", "", "") for name in AlarmName if name not in on_numbers]
    return on_numbers | {alarm.name for alarm in watch.wanted(others)}


def thresholds(bench: Bench, given: Given) -> int:
    """In which of three steps the alarm on truncated responses is raised."""
    watch = Watch.of_run(bench.load(given).config, [])
    return sum(len(watch.look({"length/truncated": 0.3})) for _ in range(3))


EFFECTS = {f"alarms.{name}": Effect(alarms, {f"alarms.{name}": False}) for name in AlarmName}
EFFECTS[f"alarms.{AlarmName.TRUNCATED}"] = Effect(thresholds, {f"alarms.{AlarmName.TRUNCATED}": 0.5})
