"""Alarms and failures: the numbers that trip them, numbers that do not, and what the run then says and writes."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from scripted_run import MINIMAL, Lines

from agl_core.config.models import RunConfig
from agl_core.errors import TrainingError
from agl_core.testing import episodes as make
from agl_core.testing.scripts import CallTools, Hold
from agl_core.types import (
    AlarmName,
    DropReason,
    Ending,
    Episode,
    Rollout,
    Source,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)
from agl_server.health.alarms import KEPT_FIRST, Watch, alarms_of, alarms_on, who_waits
from agl_server.health.rollouts import health_metrics
from agl_server.health.table import ALARMS, Numbers
from agl_server.health.verdict import check_patience, read_metrics
from agl_server.testing import running_stack, until
from agl_server.training.metrics import MetricsLog

from .scripted_training import Bench, episode, make_bench

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
    "tool_results/failed": 0.3,
    "tool_results/ok": 0.7,
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
    AlarmName.TOOLS_FARMED: {"tool_results/ok": 0.95},
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


def after_sound(bad: Numbers) -> list[Numbers]:
    return [SOUND] * 8 + [{**SOUND, **bad}] * 6


def test_every_alarm_on_numbers_is_here_and_has_a_threshold() -> None:
    assert (
        {name for name in AlarmName if ALARMS[name].signal}
        == {name for name in AlarmName if name.has_threshold}
        == {*BAD, AlarmName.STALL}
    )


@pytest.mark.parametrize("name", BAD)
def test_an_alarm_is_raised_once_and_says_what_was_seen_and_what_to_do(name: AlarmName) -> None:
    """The run may switch it off, or choose another threshold."""
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


FARMED: dict[str, tuple[Sequence[tuple[float, float | None]], int | None]] = {
    "the reward stays at 0": ([(0, 0.4), (0, 0.4), (0, 0.6), (0, 0.7), (0, 0.8)], 5),
    "it falls later": ([(0.1, 0.4)] * 5 + [(0.05, 0.6)] * 3, 8),
    "below the threshold": ([(0, 0.4)] * 2 + [(0, 0.44)] * 10, None),
    "the reward rises": ([(0, 0.4)] * 2 + [(0.02 * n, 0.4 + 0.05 * n) for n in range(1, 12)], None),
    "the reward is the best": ([(1, 0.8)] * 2 + [(1, 0.85), (1, 0.95)] * 5, None),
    "one bad step": ([(0, 0.4)] * 5 + [(0, 1.0)] + [(0, 0.4)] * 5, None),
    "no tools": ([(0, None)] * 10, None),
    "no tools at first": ([(0, None)] * 2 + [(0, 0.4)] + [(0, 0.9)] * 10, None),
}


@pytest.mark.parametrize("name", FARMED)
def test_tools_are_farmed_if_more_of_them_work_and_the_reward_does_not_rise(name: str) -> None:
    steps, fires = FARMED[name]
    watch = Watch()
    alarms = [watch.look({"reward/mean": r} | ({} if ok is None else {"tool_results/ok": ok})) for r, ok in steps]
    raised = [n for n, of_step in enumerate(alarms, 1) for alarm in of_step if alarm.name is AlarmName.TOOLS_FARMED]
    assert raised == ([] if fires is None else [fires])


@pytest.mark.parametrize(("rollouts", "fires"), [(100, True), (16, False)])
def test_few_tool_calls_work_more_often_by_chance(rollouts: float, fires: bool) -> None:
    size = {"rollouts": rollouts, "rollout/turns": 2.0}
    steps = [{"reward/mean": 0.0, "tool_results/ok": ok, **size} for ok in (0.4, 0.4, 0.6, 0.55, 0.65)]
    assert watched(Watch(), *steps) == [AlarmName.TOOLS_FARMED] * fires


def test_an_empty_result_is_no_success_of_a_tool() -> None:
    """The metric behind the alarm counts as credit `air` does: what is neither ok nor failed is empty."""
    results = [make.tool_result(str(n), status=status) for n, status in enumerate(ToolStatus)]
    numbers = health_metrics([make.episode(make.transition(0, *results))])
    assert (numbers["tool_results/ok"], numbers["tool_results/failed"]) == (0.25, 0.5)


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
    assert watched(Watch(steps=[line.values for line in read_metrics(tmp_path)]), bad) == []
    log.forget_after(8)
    assert watched(Watch(steps=[line.values for line in read_metrics(tmp_path)]), bad, bad, bad) == [
        AlarmName.TRUNCATED
    ]


def test_a_long_run_is_compared_with_its_first_and_latest_steps_alone() -> None:
    watch = Watch(kept=20)
    falling = [{"update/entropy": 2.0, "reward/mean": 0.5}] * 200 + [{"update/entropy": 0.1, "reward/mean": 0.5}] * 5
    assert watched(watch, *falling) == [AlarmName.ENTROPY_COLLAPSE]
    assert len(watch.steps) == KEPT_FIRST + 20


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


# A step that taught nothing, or what only the agent's side asserts, says so, if that is for the user to fix.


async def messages(bench: Bench) -> list[str]:
    """The lines of a whole training beside those of its steps."""
    observer = Lines()
    await replace(bench.trainer, observer=observer).train()
    return [line for line in observer.lines if not re.match(r"step +\d+/\d+  reward ", line)]


@pytest.mark.parametrize(("gap", "alarms", "steps"), [(0.21, {}, 1), (0.19, {}, 3), (0.79, {"logprob_gap": False}, 3)])
async def test_a_server_that_is_not_what_is_trained_stops_the_run_with_both_numbers(
    tmp_path: Path, gap: float, alarms: dict[str, bool], steps: int
) -> None:
    bench = make_bench(tmp_path, steps=3, alarms=alarms)
    bench.engine.metrics = {"prob_gap_mean": gap, "prob_sampled_mean": 0.91, "prob_trained_mean": 0.12}
    message = r"step 1\..*'default'.* 0\.91 where .*0\.12 in training.*other weights.*--resume.*logprob_gap = false"
    with pytest.raises(TrainingError, match=message) if steps == 1 else nullcontext():
        await bench.trainer.train()
    assert len(bench.log.lines) == steps, "the numbers of the last step are recorded"


ENDINGS: dict[str, tuple[Callable[[Rollout], Ending], int, str]] = {
    "all crash": (lambda rollout: Ending.CRASHED, 2, "8 crashed"),
    "a step between": (lambda rollout: Ending.CRASHED if rollout.step % 2 else Ending.FINISHED, 4, ""),
    "another reason each": (
        lambda rollout: Ending.NO_CALL if rollout.step % 2 else Ending.CRASHED,
        2,
        "4 no_call, 4 crashed",
    ),
    "groups too small": (lambda rollout: Ending.LOST if rollout.member else Ending.FINISHED, 2, r"\d+ ending"),
}


@pytest.mark.parametrize("name", ENDINGS)
async def test_two_such_steps_in_a_row_end_a_run(tmp_path: Path, name: str) -> None:
    bench = make_bench(tmp_path, steps=4)
    bench.collector.ending, steps, reason = ENDINGS[name]
    with pytest.raises(TrainingError, match=rf": {reason}\.") if reason else nullcontext():
        await bench.trainer.train()
    assert bench.trainer.state.step == steps


@pytest.mark.parametrize(
    ("dropped", "ends"), [(DropReason.NO_ADVANTAGE, False), (DropReason.STALE, False), (DropReason.TOO_LONG, True)]
)
async def test_what_training_brings_along_ends_no_run(tmp_path: Path, dropped: DropReason, ends: bool) -> None:
    """Rewards of a policy that cannot do anything yet are all equal, for example."""
    bench = make_bench(tmp_path)
    bench.engine.dropped = dropped
    with pytest.raises(TrainingError, match=rf"train on in step.*: \d+ {dropped}\.") if ends else nullcontext():
        await bench.trainer.train()
    # What the engine could not take was in no group's mean; `agl show` explains the group by what has an advantage.
    advantages = {record.advantage for record in bench.store.written if isinstance(record, TrainingRecord)}
    assert advantages == {0.0 if dropped is DropReason.NO_ADVANTAGE else None}


@pytest.mark.parametrize(
    "numbers",
    [
        {"transitions/kept": 0.0, "dropped/non_finite": 3.0, "dropped/no_advantage": 5.0},
        {"transitions/kept": 8.0, "update/writer/loss": math.nan},
    ],
)
def test_a_loss_that_is_nan_in_every_step_ends_the_run(numbers: dict[str, float]) -> None:
    well = {"transitions/kept": 8.0, "update/writer/loss": 0.5}
    check_patience(2, [well, numbers])
    with pytest.raises(TrainingError, match=r"steps 2 to 3: \d+ non_finite. Look for NaN"):
        check_patience(3, [well, numbers, numbers])


async def test_a_reward_that_the_agent_alone_reports_is_told_once(tmp_path: Path) -> None:
    bench = make_bench(tmp_path, steps=3)
    bench.collector.reports = True
    bench.trainer.on_rollouts = [AlarmName.ASSERTED_TOOL_RESULTS, AlarmName.ASSERTED_REWARDS]

    lines = await messages(bench)

    assert [line.partition(":")[0] for line in lines] == ["step 1"]
    assert [alarm.name for alarm in bench.log.alarms] == [AlarmName.ASSERTED_REWARDS]
    assert bench.metric("alarm/asserted_rewards") == [1.0] * 3


@pytest.mark.parametrize(
    ("is_rewarded", "judges", "alarms"),
    [
        (True, False, {AlarmName.NO_REWARD, AlarmName.NO_CONTRAST}),
        (True, True, {AlarmName.NO_CONTRAST}),
        (False, False, set()),
    ],
    ids=["no reward", "a reward of 0", "imitation"],
)
async def test_alarms_about_rewards_are_for_algorithms_that_look_at_them(
    tmp_path: Path, is_rewarded: bool, judges: bool, alarms: set[AlarmName]
) -> None:
    bench = make_bench(tmp_path, steps=6)
    bench.collector.judges = judges
    bench.collector.reward = lambda rollout: 0.0
    object.__setattr__(bench.trainer.loaded, "is_rewarded", is_rewarded)
    if not is_rewarded:
        bench.trainer.on_rollouts = alarms_of(bench.trainer.loaded)
    await bench.trainer.train()
    assert {alarm.name for alarm in bench.log.alarms} == alarms


async def test_who_waits_for_whom() -> None:
    """The answer follows rollouts as they are queued, run, call a silent model, and use a tool that does not return."""

    async def seen() -> str:
        what, remedy = await who_waits(stack.server.activity(), stack.store)
        assert remedy
        return re.sub(r"\b\d+ s\b", "N s", what)

    async with running_stack() as stack:
        assert await seen() == "no rollout is queued or runs: the trainer does something else"
        key, queue = await stack.lease(), stack.server.queue
        await queue.enqueue([make.rollout("next")])
        await until(lambda: queue.queued)
        busy = "; 1 rollouts wait in the queue, because all workers are busy (1 with 1 attempts, the oldest since N s)"
        assert await seen() == f"1 agent (r0) without a model call, the longest for N s{busy}"
        held = Hold(CallTools([("search", {"query": "it"})]))
        stack.upstream.script(held)
        asking = asyncio.create_task(
            stack.client(key).chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        )
        await held.arrived.wait()
        assert await seen() == f"the engine does not answer 1 model call (r0), the oldest for N s{busy}"
        held.release.set()
        await asking
        assert await seen() == f"1 agent (r0) in the tool 'search', the longest for N s{busy}"
        await queue.cancel([key.rollout])
        assert await seen() == "no worker runs a rollout, and 1 wait in the queue"
        stack.server.relay.disconnect()
        assert await seen() == "no engine answers model calls, so that rollouts wait"


def reported_by(*sources: Source) -> Episode:
    """An episode with a tool result of each of these sources."""
    tool_results = tuple(ToolResult(s.value, "r", 0, "add", ToolStatus.OK, source=s) for s in sources)
    plain = episode()
    return replace(plain, transitions=(replace(plain.transitions[0], tool_results=tool_results),))


def test_a_cache_in_the_agents_client_is_noticed() -> None:
    """The first call of a rollout, and the only one."""
    reply = make.choice(tool_calls=["c1"]).message
    first = make.episode(make.transition(response=reply), rollout="a")
    own = make.episode(
        make.transition(response=make.choice(tool_calls=["c2"]).message, rollout="b"),
        make.transition(1, messages=(make.choice(tool_calls=["c2"]).message,), rollout="b"),
        rollout="b",
    )
    copy = make.episode(make.transition(messages=(reply,), rollout="c"), rollout="c")
    silent = make.episode(rollout="d", ending=Ending.NO_CALL)
    names = [AlarmName.CACHED_REPLIES]
    assert alarms_on([first, own, replace(copy, group="h"), replace(silent, group="i")], names) == []
    assert "2 of 4 rollouts" in alarms_on([first, own, copy, silent], names)[0].seen


@pytest.mark.parametrize("source", [Source.ADAPTER, Source.SPAN, Source.COMMAND])
def test_tool_results_that_only_the_agents_side_tells(source: Source) -> None:
    names = [AlarmName.ASSERTED_TOOL_RESULTS]
    assert alarms_on([reported_by(), reported_by(Source.CONVERSATION)], names) == []
    [alarm] = alarms_on([reported_by(source, Source.CONVERSATION), reported_by(source, source)], names)
    assert f"some of the 4 of this step were ({source} 3)" in alarm.seen
