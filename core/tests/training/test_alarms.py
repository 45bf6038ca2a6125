"""Every alarm: the numbers that trip it, numbers that do not, and what the run then says and writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from agl_core.config.models import RunConfig
from agl_core.training.alarms import CHECKS, Numbers, Watch
from agl_core.training.metrics import MetricsLog
from agl_core.types import AlarmName

from .scripted_training import MINIMAL, Lines, make_bench

SOUND: Numbers = {
    "reward/mean": 0.5,
    "reward/std": 0.3,
    "rollouts": 100.0,
    "rollout/turns": 2.0,
    "length/truncated": 0.0,
    "calls/parse_errors": 0.0,
    "calls/prefix_broken": 0.0,
    "responses/repetitive": 0.0,
    "responses/gibberish": 0.0,
    "answers/empty": 0.0,
    "tool_results/failed": 0.05,
    "groups/no_contrast": 0.3,
    "transitions/kept": 200.0,
    "transitions/dropped": 0.0,
    "update/entropy": 0.5,
    "update/kl_behaviour": 0.01,
    "update/kl_reference": 0.1,
    "update/grad_norm": 0.5,
    "update/logprob_gap_max": 0.001,
}
BAD: Mapping[AlarmName, Numbers] = {
    AlarmName.REWARD_COLLAPSE: {"reward/mean": 0.1},
    AlarmName.ENTROPY_COLLAPSE: {"update/entropy": 0.01, "reward/mean": 0.45},
    AlarmName.ENTROPY_EXPLOSION: {"update/entropy": 4.0},
    AlarmName.KL_RUNAWAY: {"update/kl_behaviour": 2.0},
    AlarmName.NO_CONTRAST: {"groups/no_contrast": 1.0},
    AlarmName.TRUNCATED: {"length/truncated": 0.5},
    AlarmName.PARSE_ERRORS: {"calls/parse_errors": 80.0},
    AlarmName.REPETITION: {"responses/repetitive": 0.5},
    AlarmName.GIBBERISH: {"responses/gibberish": 0.5},
    AlarmName.TOOL_ERRORS: {"tool_results/failed": 0.9},
    AlarmName.EMPTY_ANSWERS: {"answers/empty": 0.6},
    AlarmName.BROKEN_PREFIXES: {"calls/prefix_broken": 60.0},
    AlarmName.STALE: {"dropped/stale": 100.0, "transitions/kept": 100.0, "transitions/dropped": 100.0},
    AlarmName.KL_REFERENCE_RUNAWAY: {"update/kl_reference": 9.0},
    AlarmName.GRADIENT_SPIKE: {"update/grad_norm": 50.0},
    AlarmName.LOGPROB_GAP: {"update/logprob_gap_max": 3.0},
}
"""Changes of the sound numbers that raise one alarm and no other."""


def watched(watch: Watch, *steps: Numbers) -> list[AlarmName]:
    return [alarm.name for step in steps for alarm in watch.look(step)]


def after_sound(bad: Numbers, count: int = 6) -> list[Numbers]:
    return [SOUND] * 8 + [{**SOUND, **bad}] * count


def test_every_alarm_on_numbers_is_here_and_has_a_threshold() -> None:
    assert {check.__name__ for check in CHECKS} == BAD.keys()
    assert {name for name in AlarmName if name.has_threshold} == {*BAD, AlarmName.STALL}


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_is_raised_once_and_says_what_was_seen_and_what_to_do(name: AlarmName) -> None:
    """Unless the run switches it off, or chooses another threshold."""
    watch = Watch()
    alarms = [alarm for numbers in after_sound(BAD[name]) for alarm in watch.look(numbers)]
    assert [alarm.name for alarm in alarms] == [name]
    assert all((alarms[0].seen, alarms[0].remedy))
    assert any(digit in alarms[0].seen for digit in "0123456789")
    if name is not AlarmName.GRADIENT_SPIKE:  # A median gets used to spikes.
        assert f"alarm/{name}" in watch.held, "it goes on"
    assert watched(watch, *[SOUND] * 6) == []
    assert watch.held == {}

    assert watched(Watch({name: False}), *after_sound(BAD[name])) == []
    strictest = {AlarmName.ENTROPY_COLLAPSE: 1e-9, AlarmName.REWARD_COLLAPSE: 2.0}
    assert watched(Watch({name: strictest.get(name, 1e9)}), *after_sound(BAD[name])) == []


def test_sound_numbers_none_and_one_bad_step_raise_nothing() -> None:
    for name in (AlarmName.REWARD_COLLAPSE, AlarmName.ENTROPY_COLLAPSE, AlarmName.KL_RUNAWAY, AlarmName.LOGPROB_GAP):
        assert watched(Watch(), *[SOUND] * 8, {**SOUND, **BAD[name]}, *[SOUND] * 3) == []
    assert watched(Watch(), *[{}] * 20) == []
    learning = [{**SOUND, "reward/mean": step / 20, "update/entropy": 0.5 / (step + 1)} for step in range(20)]
    assert watched(Watch(), *learning) == [], "certain because it learned"


def test_rewards_below_zero_collapse_too() -> None:
    def run(*rewards: float) -> list[AlarmName]:
        return watched(Watch(), *[{"reward/mean": reward, "reward/std": 0.5, "rollouts": 64.0} for reward in rewards])

    assert run(-10, -9, -6, -3, -2, -2, -2, -2, -9, -9, -9) == [AlarmName.REWARD_COLLAPSE]
    assert run(-10, -9, -6, -3, -2, -2, -2, -2, -3, -3, -3) == []
    assert run(*[0.02, 0.0] * 10) == [], "noise of a policy that cannot do anything yet"


def test_a_policy_among_several_is_named() -> None:
    watch = Watch(policies=("writer", "critic"))

    def step(writer: float) -> Numbers:
        return {"update/writer/kl_behaviour": writer, "update/critic/kl_behaviour": 0.01}

    [alarm] = [a for numbers in [step(0.0)] * 6 + [step(2.0)] * 3 for a in watch.look(numbers)]
    assert alarm.name is AlarmName.KL_RUNAWAY
    assert alarm.seen.startswith("policy writer: KL(behaviour ‖ current) is 2")


def test_a_resumed_run_goes_on_from_its_numbers_and_does_not_repeat_itself(tmp_path: Path) -> None:
    bad = {**SOUND, **BAD[AlarmName.TRUNCATED]}
    first, log = Watch(), MetricsLog(tmp_path / "metrics.jsonl", {})
    for number, numbers in enumerate([*[SOUND] * 8, *[bad] * 4], 1):
        alarms = first.look(numbers)
        log.write(number, "train", {**numbers, **first.held}, alarms)
    assert watched(Watch(steps=[*log.forget_after(12)]), bad) == []
    assert watched(Watch(steps=[*log.forget_after(8)]), bad, bad, bad) == [AlarmName.TRUNCATED]


async def test_a_run_says_them_and_writes_them(tmp_path: Path) -> None:
    bench, lines = make_bench(tmp_path, steps=6), Lines()
    bench.collector.reward = lambda rollout: 1.0
    log = MetricsLog(tmp_path / "metrics.jsonl", {})
    await replace(bench.trainer, observer=lines, log=log).train()

    [line] = [line for line in lines.lines if "alarm no_contrast" in line]
    assert line.startswith("step 5: ")
    written = [orjson.loads(line) for line in (tmp_path / "metrics.jsonl").read_bytes().splitlines()]
    assert [line.get("alarm/no_contrast") for line in written] == [None] * 4 + [1.0] * 2
    [alarm] = written[4]["alarms"]
    assert (alarm["name"], alarm["seen"]) == ("no_contrast", "1 of the groups have equal rewards over the last 5 steps")
    assert all("alarms" not in line for line in [*written[:4], written[5]])


def test_thresholds_are_checked() -> None:
    for wrong, message in (
        ({"truncatd": 0.5}, "truncatd"),
        ({"truncated": -1}, "greater than 0"),
        ({"no_reward": 0.5}, "has no threshold: it can only be switched off"),
    ):
        with pytest.raises(ValueError, match=message):
            RunConfig.model_validate({**MINIMAL, "alarms": wrong})
    names: Sequence[AlarmName] = list(RunConfig.model_validate({**MINIMAL, "alarms": {"stall": 5}}).alarms)
    assert names == [AlarmName.STALL]
