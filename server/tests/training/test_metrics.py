"""The numbers of a step, worked by hand, the lines in which they are written, and those of repeated tries."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agl_core.builtin import identical, immediate
from agl_core.errors import CheckpointError
from agl_core.hooks import hookimpl
from agl_core.learning.batch import BatchPlan, PolicyCredit
from agl_core.plugins import Plugins
from agl_core.types import (
    CreditKind,
    DropReason,
    Ending,
    Episode,
    FinishReason,
    PrefixBreak,
    Reward,
    Rollout,
    ToolResult,
    ToolStatus,
    TransitionKey,
)
from agl_server.health.rollouts import contrast_metrics, episode_metrics
from agl_server.health.verdict import MetricsLine, read_metrics, verdict_of
from agl_server.training.evaluation import TaskScore, compare, pass_all, pass_at, passes, sign_test, wilson
from agl_server.training.metrics import MetricsLog, Summary, step_line
from agl_server.training.session import Look, estimate_tokens

from .scripted_training import episode, make_bench


def tool_result(id: str, status: ToolStatus = ToolStatus.OK) -> ToolResult:
    return ToolResult(id, "r", 0, "look", status)


def test_rewards_are_of_all_rollouts_and_one_without_counts_as_nothing() -> None:
    crashed = episode("b", (), dropped=DropReason.ENDING, ending=Ending.CRASHED)
    metrics = episode_metrics([episode("a", terminal=1.0), replace(crashed, terminal=None), episode("c", terminal=0.5)])
    assert (metrics["rollouts"], metrics["reward/mean"]) == (3, 0.5)
    assert metrics["reward/std"] == pytest.approx((1 / 6) ** 0.5)
    assert (metrics["ending/finished"], metrics["ending/crashed"]) == (2, 1)


def earning(*rewards: float, terminal: float = 0.0) -> Episode:
    """An episode whose calls were rewarded one by one."""
    whole = episode("a", (0,) * len(rewards), terminal=terminal)
    calls = tuple(
        replace(t, rewards=(Reward("a", 0, "earned", value, "earned", t.key.call),))
        for t, value in zip(whole.transitions, rewards, strict=True)
    )
    return replace(whole, transitions=calls)


def test_the_reward_of_a_rollout_contains_what_its_calls_earned() -> None:
    """The verdict, the best checkpoint and the end on a plateau go by it."""
    metrics = episode_metrics([earning(0.25, 0.5), earning(0.0, 0.0, terminal=0.25)])
    assert (metrics["reward/mean"], metrics["reward/std"]) == (0.5, 0.25)


def test_a_group_whose_credited_values_differ_by_rounding_alone_has_no_contrast() -> None:
    groups = [
        [episode(terminal=reward) for reward in rewards] for rewards in ((0.3, 0.1 + 0.2), (0.3, 0.31), (0.0, 0.0))
    ]
    groups += [[earning(0.0, 0.5), earning(0.5, 0.5)], [earning(0.0, 0.5), earning(0.5, 0.0)]]
    for rule, kind, share in (
        (identical, CreditKind.RETURN, 3 / 5),
        (immediate, CreditKind.RETURN, 2 / 5),
        (immediate, CreditKind.REWARD, 3 / 5),
    ):
        plan = BatchPlan({"default": PolicyCredit("rule", rule, kind)})
        assert contrast_metrics(groups, plan) == {"groups/no_contrast": pytest.approx(share)}


def test_a_rules_reward_is_its_sum_over_the_rollouts() -> None:
    """Rewards of single calls add up; a rollout without one counts as 0."""
    parts = [Reward("a", 0, "tools", value, "tools", call) for value, call in ((0.25, "a-c0"), (-1.0, "a-c1"))]
    metrics = episode_metrics([replace(episode("a"), rewards=tuple(parts)), episode("b")])
    assert metrics["reward/tools"] == -0.375
    failed = replace(episode("c"), rewards=tuple(parts), dropped=DropReason.REWARD_FAILED)
    assert "reward/tools" not in episode_metrics([failed]), "it is not stored either"


def changed() -> Episode:
    """Three transitions of two calls: two choices of one, and a truncated one with a broken prefix."""
    first, last = episode("a", (0, 0)).transitions
    first = replace(first, prefix_broken=PrefixBreak.REQUEST)
    second = replace(
        first, key=TransitionKey("a", 0, first.key.call, 1), tool_results=(tool_result("1"), tool_result("2"))
    )
    last = replace(
        last, finish_reason=FinishReason.LENGTH, prefix_broken=PrefixBreak.MOVED, parse_error="no JSON", prompt_ids=None
    )
    return replace(episode("a"), transitions=(first, second, last), unjoined=(tool_result("3"),))


def test_lengths_calls_and_tool_results_are_counted_by_transition_call_and_rollout() -> None:
    metrics = episode_metrics([changed(), episode("b", (0,))])
    assert (metrics["rollout/turns"], metrics["rollout/calls"], metrics["rollout/tool_results"]) == (2, 1.5, 1)
    assert (metrics["length/prompt"], metrics["length/response"]) == (2, 3), "a prompt without ids has no length"
    assert (metrics["length/truncated"], metrics["calls/prefix_broken"], metrics["calls/parse_errors"]) == (0.25, 1, 1)
    assert (metrics["calls/prefix_broken/moved"], metrics["calls/prefix_broken/request"]) == (1, 2)
    assert metrics["tool_results/unjoined"] == 1


async def test_a_steps_line_adds_up(tmp_path: Path) -> None:
    """One rollout of two groups of two, with two calls each, crashes before its first call."""
    bench = make_bench(tmp_path, steps=1)

    def ending(rollout: Rollout) -> Ending:
        return Ending.CRASHED if rollout.id == "s1-g1-m0" else Ending.FINISHED

    bench.collector.ending = ending
    await bench.trainer.train()

    [line] = bench.log.lines
    assert line["rollouts"] == line["ending/finished"] + line["ending/crashed"] == 4
    assert line["rollout/calls"] == 6 / 4
    assert line["transitions/kept"] + line["transitions/dropped"] == 6
    assert line["episodes_dropped/ending"] == 1
    assert line["seconds/rollouts"] + line["seconds/update"] <= line["seconds/step"]
    lines = [MetricsLine(1, "train", line)]
    summary = Summary(tmp_path, 0, bench.trainer.state, lines, None, None, None, {}).as_json()
    assert (summary["llm_calls"], summary["rollouts"]) == (6, {"finished": 3, "crashed": 1})
    assert summary["transitions"]["kept"] == line["transitions/kept"]
    assert summary["train_rewards"] == [line["reward/mean"]]


def test_a_row_of_an_update_is_a_call_with_all_that_it_continues(tmp_path: Path) -> None:
    """Two calls of 2 + 2 and 6 + 3 tokens, of which the second repeats the first, and one of 5 + 1 that does not."""
    bench = make_bench(tmp_path, steps=3, groups_per_step=2, group_size=2, eval_every=0)
    first, second, other = episode("a", (0, 0, 0)).transitions
    calls = (
        replace(first, prompt_ids=np.array([1, 2]), response_ids=np.array([3, 4])),
        replace(second, prompt_ids=np.array([1, 2, 3, 4, 5, 6]), response_ids=np.array([7, 8, 9])),
        replace(other, prompt_ids=np.array([1, 2, 3, 5, 5]), response_ids=np.array([7])),
    )
    look = Look([], None, episodes=[replace(episode("a"), transitions=calls)])
    took = {"prefilled": 13.0, "decoded": 6.0, "trained": 0.0}
    bench.trainer.session.evaluator.sets, bench.trainer.session.evaluator.settings = (
        {},
        bench.trainer.loaded.config.eval,
    )
    rollouts, tokens = estimate_tokens(bench.trainer.loaded, bench.trainer.session, look, took)
    assert (rollouts, tokens) == (12, {"prefilled": 13 * 12, "decoded": 6 * 12, "trained": (9 + 6) * 12})


STEP = {"transitions/kept": 8.0, "ending/finished": 8.0, "seconds/rollouts": 1.0, "seconds/update": 2.0}


TRIED = {**STEP, "rollouts": 16.0, "reward/mean": 0.3, "reward/std": 0.46, "groups/no_contrast": 0.25}
SOLVED = {**TRIED, "reward/mean": 1.0, "reward/std": 0.0}
UNTRAINED = {**TRIED, "transitions/kept": 0.0, "dropped/untrained_agent": 16.0}


@pytest.mark.parametrize(
    ("steps", "held_out", "verdict"),
    [
        ([TRIED] * 3, [0.1, 0.9], "learned: the held-out reward (eval/greedy) rose from 0.1 to 0.9"),
        ([TRIED] * 3, [0.3, 0.35], "not yet: the held-out reward (eval/greedy) went from 0.3 to 0.35, which is no"),
        ([TRIED, SOLVED], [], "learned: the training reward rose from 0.3 to 1"),
        ([UNTRAINED] * 3, [], "cannot: nothing was trained on; dropped: 48 untrained_agent. Name agents in"),
    ],
)
def test_a_run_has_a_verdict_in_words(steps: list[dict[str, float]], held_out: list[float], verdict: str) -> None:
    evaluated = {"eval/greedy/rollouts": 20.0, "eval/greedy/reward/std": 0.4}
    lines = [MetricsLine(n, "train", step) for n, step in enumerate(steps, 1)]
    for step, reward in zip((0, len(steps)), held_out, strict=False):
        lines.append(MetricsLine(step, "eval", {**evaluated, "eval/greedy/reward/mean": reward}))
    given = verdict_of(lines)
    assert given is not None
    assert given.text.startswith(verdict)


@pytest.mark.parametrize(
    ("held_out", "losses", "verdict"),
    [
        ([2.0, 0.5], [3.0, 3.0], "learned: the held-out loss (demos) fell from 2 to 0.5 nats per token"),
        ([2.0, 2.5], [3.0, 1.0], "not yet: the held-out loss (demos) rose from 2 to 2.5 nats per token"),
        ([], [3.0, 1.0], "learned: the training loss fell from 3 to 1 nats per token"),
        ([], [3.0], "not yet: one step shows no change"),
    ],
)
def test_what_imitates_is_judged_by_its_loss(held_out: list[float], losses: list[float], verdict: str) -> None:
    lines = [MetricsLine(step, "eval", {"demos/loss": loss}) for step, loss in enumerate(held_out)]
    lines += [MetricsLine(step, "train", {**STEP, "update/loss": loss}) for step, loss in enumerate(losses, 1)]
    given = verdict_of(lines)
    assert given is not None
    assert given.text == verdict
    assert step_line(1, 9, lines[-1].values).startswith(f"step   1/9  loss {losses[-1]:.3f}  rollouts")


async def test_failures_of_lifecycle_hooks_are_counted_by_step(tmp_path: Path) -> None:
    outcomes = iter([RuntimeError("no disk")] * 2 + [None] * 2)

    @hookimpl
    def policy_updated() -> None:
        if error := next(outcomes):
            raise error

    plugins = Plugins()
    plugins.register(type("Plugin", (), {"policy_updated": staticmethod(policy_updated)})(), "a_plugin.py")
    bench = make_bench(tmp_path, plugins=plugins)

    await bench.trainer.train()

    assert bench.metric("hooks/failed") == [1.0, 1.0, 0.0, 0.0]


class Tracker:
    """Raises in its second step and at the end."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.logged.append((step, dict(metrics)))
        if step == 1:
            raise ConnectionError("no route to the tracker")

    def close(self) -> None:
        raise ConnectionError("no route to the tracker")


def test_a_tracker_that_raises_is_reported_once_and_all_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trackers = {"remote": Tracker(), "other": Tracker()}
    log = MetricsLog(tmp_path / "metrics.jsonl", trackers)
    for step in range(3):
        log.write(step, "train", {"loss": 0.5})
    log.write(3, "eval", {"eval/greedy/reward/mean": 0.5})
    log.close()

    steps = [(step, {"train/loss": 0.5}) for step in range(3)]
    for tracker in trackers.values():
        assert tracker.logged == [*steps, (3, {"eval/greedy/reward/mean": 0.5})]
    assert [record.getMessage().splitlines()[0] for record in caplog.records] == [
        f"The tracker '{name}' failed (ConnectionError: no route to the tracker). Training goes on, and the tracker is "
        f"given what comes later; what it misses is in {tmp_path / 'metrics.jsonl'}."
        for name in trackers
    ]


def test_resuming_takes_out_later_steps_and_a_line_that_was_cut_off(tmp_path: Path) -> None:
    """A kill or a full disk cuts the last line at any byte; any other broken line is somebody's mistake."""
    path = tmp_path / "metrics.jsonl"
    for step in range(4):
        MetricsLog(path, {}).write(step, "train", {"loss": 0.5})
    whole = path.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:2])
    for end in (len(whole), *range(len(kept) + 1, len(whole) - len(kept) // 2)):
        path.write_bytes(whole[:end])
        log = MetricsLog(path, {}, restart=1)
        log.forget_after(1)
        assert [line.values["loss"] for line in read_metrics(tmp_path)] == [0.5] * 2
        assert path.read_bytes() == kept, whole[:end]
    path.write_bytes(whole[:-1])
    MetricsLog(path, {}, restart=1).forget_after(3)
    assert path.read_bytes() == whole, "the last line has its end again"

    for broken in (b'{"step":1', b"{}", b"[]", b"3", b""):
        content = kept + broken + b"\n" + kept
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"Line 3 of {path}"):
            MetricsLog(path, {}, restart=1).forget_after(1)
        assert path.read_bytes() == content


# Memory is counted for the process itself, or for those below it.


MIB = 2**20


def run(code: str) -> list[int]:
    """The numbers that a process of its own prints."""
    code = f"from agl_server.engines.child import descendants_bytes, peak_rss_bytes\n{code}"
    return [int(n) for n in subprocess.check_output([sys.executable, "-c", code], text=True).split()]


def test_a_process_counts_what_it_had_and_freed_and_not_what_its_parent_had() -> None:
    of_parent = bytearray(b"x") * (256 * MIB)
    before, after = run(
        f"print(peak_rss_bytes())\ntaken = bytearray(b'x' * {128 * MIB})\ndel taken\nprint(peak_rss_bytes())"
    )
    assert after >= before + 128 * MIB
    assert before < len(of_parent)


def test_a_grandchild_counts_and_the_process_itself_does_not() -> None:
    grandchild = f"taken = b'x' * {128 * MIB}; print(1, flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    alone, with_it, after = run(
        f"import subprocess, sys\n"
        f"own = b'x' * {128 * MIB}\n"
        f"print(descendants_bytes())\n"
        f"below = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=-1, stdout=-1)\n"
        f"below.stdout.readline()\n"
        f"print(descendants_bytes())\n"
        f"below.communicate(b'\\n')\n"
        f"print(descendants_bytes())"
    )
    assert (alone, after) == (0, 0)
    assert 128 * MIB < with_it < 256 * MIB


# pass@k, pass^k and comparisons: against enumeration and the formulas that define them.


@pytest.mark.parametrize(("tries", "k"), [(5, 1), (5, 3), (6, 6)])
def test_the_estimates_are_the_means_over_all_choices_of_k_tries(tries: int, k: int) -> None:
    for solved in range(tries + 1):
        outcomes = [True] * solved + [False] * (tries - solved)
        chosen = list(itertools.combinations(outcomes, k))
        assert pass_at(k, tries, solved) == pytest.approx(sum(map(any, chosen)) / len(chosen))
        assert pass_all(k, tries, solved) == pytest.approx(sum(map(all, chosen)) / len(chosen))


@pytest.mark.parametrize(("share", "count"), [(0.0, 5), (0.2, 10), (0.5, 40), (1.0, 200)])
def test_the_interval_ends_where_the_score_test_does(share: float, count: int) -> None:
    low, high = wilson(share, count)
    for end in {low, high} - {0.0, 1.0}:
        assert abs(share - end) == pytest.approx(1.959963984540054 * math.sqrt(end * (1 - end) / count))
    assert 0 <= low <= share <= high <= 1
    assert high - low > 0, "also where all tasks went one way"


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (3, 9), (12, 2)])
def test_the_sign_test_counts_the_outcomes_as_extreme(gained: int, lost: int) -> None:
    both, extreme = gained + lost, min(gained, lost)
    outcomes = [sum(signs) for signs in itertools.product((0, 1), repeat=both)]
    as_extreme = sum(min(ups, both - ups) <= extreme for ups in outcomes)

    assert sign_test(gained, lost) == pytest.approx(as_extreme / len(outcomes))


def scores(mode: str, *tasks: tuple[str, Sequence[float]]) -> list[TaskScore]:
    return [TaskScore("eval", mode, task, tuple(rewards)) for task, rewards in tasks]


def test_passes_are_of_repeated_tasks_alone() -> None:
    comparison = passes(
        scores("sampled", ("a", [1, 1, 0.5, 0]), ("b", [0, 0, 0, 1])) + scores("greedy", ("a", [1.0])), success=1.0
    )

    assert [(estimate.mode, estimate.k, estimate.tasks, estimate.repeats) for estimate in comparison] == [
        ("sampled", k, 2, 4) for k in (1, 2, 4)
    ]
    assert [estimate.pass_at.value for estimate in comparison] == pytest.approx([3 / 8, (5 / 6 + 1 / 2) / 2, 1])
    assert [estimate.pass_all.value for estimate in comparison] == pytest.approx([3 / 8, (1 / 6) / 2, 0])
    half = passes(scores("sampled", ("a", [1, 1, 0.5, 0])), success=0.5)
    assert half[0].pass_at.value == 0.75


def test_two_policies_are_compared_on_the_tasks_that_both_have() -> None:
    before = scores("greedy", *((name, [float(name in "ab")]) for name in "abcdef"))
    now = scores("greedy", *((name, [float(name in "bcde")]) for name in "abcdeg"))
    (comparison,) = compare(now, before, success=1.0)

    assert comparison.tasks == 5
    assert [outcome.task for outcome in comparison.gained] == ["c", "d", "e"]
    assert [(outcome.task, outcome.before, outcome.now) for outcome in comparison.lost] == [("a", 1.0, 0.0)]
    assert comparison.difference.value == pytest.approx(0.4)
    assert comparison.difference.low <= 0.4 <= comparison.difference.high
    assert comparison.p == sign_test(3, 1)
    assert compare(now, scores("sampled", ("a", [1.0])), success=1.0) == []
    (same,) = compare(now, now, success=1.0)
    assert (same.difference.low, same.difference.high, same.gained, same.lost, same.p) == (0, 0, [], [], 1)
