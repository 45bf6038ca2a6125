"""`agl reward try`: what another reward or credit configuration would make of a recorded run."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core import save_episodes
from agl_core.errors import ConfigError, PluginError, StoreError
from agl_core.plugins import Plugins
from agl_core.types import Call, DropReason, Ending, Episode, Mode, Reward, Rollout, RolloutState, Run, TrainingRecord
from agl_server.reading.runs import write_capture
from agl_server.store.sqlite import SqliteStore
from agl_server.training.rollouts import recorded_episodes

TRY = ("reward", "try", "--yes", "train.toml")
LOOKED = "solver: look ok (by the agent's process)"


def cells(output: str) -> list[list[str]]:
    """The rows of the tables: what stands between runs of two spaces or more."""
    return [re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if line.strip()]


def test_the_same_configuration_changes_nothing(run: Any) -> None:
    other = replace(run.trained(1, "m0")[0], id="s1-g01-m0", group="s1-g01", step=9)
    run.put(replace(other, state=RolloutState.DONE, counted_attempt=0, ending=Ending.FINISHED))

    result = run.agl(*TRY, "--rollout=s1-g0")

    assert result.exit_code == 0, result.output
    assert re.findall(r"rollout (\S+)  task", result.output) == [f"s1-g0-m{member}" for member in range(3)], "the group"
    assert "0 of 3 rollouts change; mean reward 0.666667 → 0.666667" in result.output
    assert "rollout s1-g0-m1  unchanged, reward 0" in run.agl(*TRY, "--step=1").output


@pytest.mark.parametrize(
    ("setting", "mean", "expected"),
    [
        # Only what changes is marked.
        ("rewards.tools.worth=0.5", "1 → 1", [["1", "solver", "0", "1.25 → 1.5 *"], ["end", "terminal reward", "1"]]),
        # A weight counts in the terminal reward alone.
        ("rewards.right.weight=0.5", "1 → 0.5", [["end", "terminal reward", "1 → 0.5 *"], ["right (by right)", "1"]]),
        # G_1 = 1; G_0 = 0.25 + 0.5 · G_1
        (
            "credit={name='discounted', discounted={gamma=0.5}}",
            "1 → 1",
            [
                ["0", LOOKED, "0.25", "1.25 → 0.75 *"],
                ["1", "solver", "0", "1.25 → 1 *"],
                ["end", "terminal reward", "1"],
            ],
        ),
        # The answer of m1, which was not asked for, is shorter.
        (
            "rewards.shortest.weight=0.5",
            "1 → 1",
            [["shortest (by shortest)", "- → 0 *"], ["end", "terminal reward", "1"]],
        ),
        # Returns 1.25, -0.25, 0.75: z = 2/3 / 0.763763. The first call is common to all: from there 1.2, -0.25 and 0.7
        # are earned, with γ = 0.95. The second prompt is shared by m0 and m2, which earn 1 from there.
        (
            "credit.name=gigpo",
            "1 → 1",
            [["0", LOOKED, "0.25", "1.25 → 1.52287 *"], ["1", "solver", "0", "1.25 → 0.87287 *"]],
        ),
        # What would be dropped says why, and counts as zero.
        (
            "train.endings.finished=drop",
            "1 → 0",
            [["end", "terminal reward", "1 → dropped: ending *"], ["1", "solver", "0", "1.25 → dropped: ending *"]],
        ),
    ],
)
def test_a_setting_changes_what_follows_from_it_alone(
    run: Any, setting: str, mean: str, expected: list[list[str]]
) -> None:
    """The whole group is judged, though one member is asked for."""
    result = run.agl(*TRY, f"--set={setting}", "--rollout=s1-g0-m0")
    assert result.exit_code == 0, (result.output, result.exception)

    rows = cells(result.output)
    for row in expected:
        assert row in [cells[: len(row)] for cells in rows], rows
    assert f"mean reward {mean}" in result.output


def test_what_the_agent_reported_stays(run: Any) -> None:
    run.put(Reward("s1-g0-m0", 0, "effort", 0.125, "agent"))
    run.write("reported.toml", rewards={})

    result = run.agl("reward", "try", "--yes", "reported.toml", "--rollout=s1-g0-m0")

    rows = cells(result.output)
    assert ["effort (by agent)", "0.125"] in rows
    assert ["right (by right)", "1 → - *"] in rows
    assert ["reported (by reported)", "- → 0.125 *"] in rows
    assert ["end", "terminal reward", "1 → 0.125 *"] in rows
    assert ["look (by tools)", "0.25 → - *"] in rows


def test_what_the_agent_reported_of_a_call_counts_if_no_rule_does(run: Any) -> None:
    run.put(Reward("s1-g0-m0", 0, "effort", 0.125, "agent", call="s1-g0-m0-c1"))
    run.write("reported.toml", rewards={}, credit={"name": "immediate"})

    reported = cells(run.agl("reward", "try", "--yes", "reported.toml", "--rollout=s1-g0-m0").output)
    by_rules = cells(run.agl(*TRY, "--rollout=s1-g0-m0").output)

    assert ["effort (by reported)", "- → 0.125 *"] in reported
    assert ["1", "solver", "0 → 0.125 *", "1.25 → 0.125 *"] in [row[:4] for row in reported]
    assert ["end", "terminal reward", "1 → 0 *"] in reported
    assert ["1", "solver", "0", "1.25"] in [row[:4] for row in by_rules]


def test_a_rule_that_fails_is_named_and_the_others_are_shown(run: Any) -> None:
    result = run.agl(*TRY, "--set=rewards.shaky.weight=1.0")

    assert isinstance(result.exception, PluginError)
    assert re.search(
        r"The reward rule 'shaky' failed on rollout s1-g0-m1\. KeyError: 'score' \(\S+\.py:\d+: .*\)",
        str(result.exception),
    )
    assert "-m0." not in str(result.exception)
    assert ["end", "terminal reward", "0 → dropped: reward_failed *"] in cells(result.output)
    # m0 and m2 stay as they are, but for a new component of 0.
    assert ["shaky (by shaky)", "- → 0 *"] in cells(result.output)
    torn = run.agl(*TRY, "--set=credit.name=torn").exception
    assert isinstance(torn, PluginError)
    assert re.search(r"credit rule 'torn' failed on group s1-g0: IndexError: no such place", str(torn))


def test_the_last_complete_step_is_the_default_and_another_can_be_named(run: Any) -> None:
    run.put(*run.trained(2, "m0"), *run.trained(2, "m1"), run.planned(3, "m0"), *run.trained(3, "m1"))

    assert "rollout s2-g0-m0" in run.agl(*TRY).output
    assert "s1-g0" not in run.agl(*TRY).output
    assert "rollout s1-g0-m2" in run.agl(*TRY, "--step=1").output
    for unfinished in ("--step=3", "--rollout=s3-g0-m1"):
        assert "1 rollouts of their groups are not done" in run.agl(*TRY, unfinished).output
    run.put(Run("calc", 1, 1.0, {}, resumed_step=1))
    assert "rollout s1-g0-m0" in run.agl(*TRY).output, "the others are superseded"


def test_what_cannot_be_tried_is_refused(run: Any) -> None:
    run.put(run.planned(4, "m0", state=RolloutState.RUNNING))
    writer = run.write("other.toml", policies={"writer": {"model": {"path": "weights"}}})

    for arguments, what in (
        ((*TRY, "--rollout=s1-g0-m9"), "No rollout in"),
        ((*TRY, "--rollout=s4-g0-m0"), "no such rollout that has ended"),
        ((*TRY, "--step=9"), "no such rollout that has ended"),
        ((*TRY, "--rollout=s1-g0-m0", "--step=1"), "not both"),
        ((*TRY, "--set=name=clac"), "no run 'clac' below runs. Did you mean 'calc'?"),
        (("reward", "try", "--yes", writer), "the configuration does not have"),
    ):
        error = run.agl(*arguments).exception
        assert isinstance(error, ConfigError | StoreError)
        assert what in str(error)


def recorded_elsewhere(run: Any, mode: Mode) -> list[Any]:
    """The records of m0, as something else than training: no rewards, no uses."""
    records = [r for r in run.trained(1, "m0") if not isinstance(r, Reward | TrainingRecord)]
    answered = [replace(r, policy="gpt-of-yours") if isinstance(r, Call) else r for r in records]
    return [replace(answered[0], mode=mode), *answered[1:]]


def test_an_evaluation_is_judged_and_gets_no_credit(run: Any) -> None:
    moved = "s0-eval-g0-m0"
    run.put(*(replace(r, **{"id" if isinstance(r, Rollout) else "rollout": moved})
              for r in recorded_elsewhere(run, Mode.EVAL_GREEDY)))  # fmt: skip

    result = run.agl(*TRY, f"--rollout={moved}")

    rows = cells(result.output)
    assert ["0", LOOKED, "0 → 0.25 *"] in rows
    assert ["right (by right)", "- → 1 *"] in rows
    assert ["end", "terminal reward", "- → 1 *"] in rows
    assert moved not in run.agl(*TRY).output


@pytest.mark.parametrize("configured", [False, True])
def test_what_agl_run_recorded_is_judged_whoever_answered_it(run: Any, configured: bool) -> None:
    folder = Path("runs/found")
    folder.mkdir(parents=True)
    write_capture(folder, {"command": ["python", "agent.py"]})
    if configured:
        (folder / "config.toml").write_text(Path("train.toml").read_text())
    run.put(*recorded_elsewhere(run, Mode.EVAL_SAMPLED), to=folder / "store.sqlite")

    result = run.agl(*TRY, "--run=runs/found")

    assert result.exit_code == 0, result.output
    assert ["1", "solver", "0"] in cells(result.output)
    assert "1 of 1 rollouts change; mean reward 0 → 1" in result.output


def test_episodes_in_a_file_are_judged_and_those_of_training_credited(run: Any) -> None:
    async def recorded() -> list[Episode]:
        async with SqliteStore(run.store, read_only=True) as store:
            return await recorded_episodes(store, await store.rollouts(), Plugins().hook, "drop")

    first, second, third = asyncio.run(recorded())
    rewards = [Reward(second.rollout, 0, name, value, source) for name, value, source in (
        ("effort", 0.125, "agent"), ("right", 0.5, "right"),
    )]  # fmt: skip
    evaluated = replace(second, mode=Mode.EVAL_SAMPLED, rewards=tuple(rewards), terminal=0.5)
    save_episodes("episodes.jsonl", [first, evaluated, third])

    result = run.agl(*TRY, "--run=episodes.jsonl", "--set=credit.name=discounted", "--set=credit.discounted.gamma=0.5")

    rows = [row[:4] for row in cells(result.output)]
    assert ["0", LOOKED, "0 → 0.25 *", "- → 0.75 *"] in rows
    assert ["0", "solver: look error (by the agent's process)", "0 → -0.25 *"] in rows
    assert ["end", "terminal reward", "0.5 → 0 *"] in rows
    assert ["effort (by agent)", "0.125"] in rows
    assert "recorded in: episodes.jsonl" in result.output
    assert "3 of 3 rollouts change" in result.output
    assert "s1-g0-m1" not in run.agl(*TRY, "--run=episodes.jsonl", "--rollout=s1-g0-m0").output
    run.write("train")
    assert run.agl(*TRY[:-1], "train").exit_code == 0, "a configuration needs no suffix"


def test_a_rollout_that_was_too_old_for_training_stays_out_of_its_group(run: Any) -> None:
    training_records = [
        TrainingRecord("s1-g0-m1", 0, f"s1-g0-m1-c{n}", 0, 1, None, None, 0.0, DropReason.STALE) for n in (0, 1)
    ]
    run.put(*training_records)

    assert "0 of 3 rollouts change; mean reward 0.666667 → 0.666667" in run.agl(*TRY).output
    changed = cells(run.agl(*TRY, "--set=rewards.right.bonus=1.0").output)
    assert changed.count(["1", "solver", "0", "dropped: stale"]) == 1
