"""`agl rollouts`, `agl show`: everything recorded is there to be read, and nothing of it is obeyed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.cli.shared.screen import Screen
from agl_core.cli.train import print_summary
from agl_core.training.checkpoints import RunState
from agl_core.training.metrics import Summary
from agl_core.types import FinishReason, Reward, Run, Source, Task, ToolResult, ToolStatus, TrainingRecord

TITLE = "\x1b]0;owned\x07"
HOSTILE = f"{TITLE}\x1b[31m\x9b2J\r[/x] [bold] [INST] :smile:"


def test_show_tells_the_provenance_of_every_reward(run: Any) -> None:
    shown = run.agl("show", "s1-g0-m0", "--run=runs/calc").output

    assert "reward look 0.25 (by tools, for call s1-g0-m0-c0)" in shown
    assert "terminal reward: 1 = right 1 (by right)" in shown


@pytest.mark.parametrize(
    ("source", "adapter", "said"),
    [
        (Source.ADAPTER, "langchain", "(by the agent's process, langchain)"),
        (Source.SPAN, "otel", "(by a span over OTLP, otel)"),
        (Source.COMMAND, None, "(by a process of the command)"),
    ],
)
def test_show_and_reward_try_say_who_told_what_a_tool_did(
    source: Source, adapter: str | None, said: str, run: Any
) -> None:
    records = [
        replace(each, source=source, adapter=adapter) if isinstance(each, ToolResult) else each
        for each in run.trained(2, "m0")
    ]
    run.put(*records)
    shown = run.agl("show", "s2-g0-m0", "--run=runs/calc").output
    assert f"{said}\n" in shown
    tried = run.agl("reward", "try", "--yes", "train.toml", "--rollout=s2-g0-m0", "--run=runs/calc").output
    assert said in tried


def test_show_and_reward_try_name_the_rule_that_decided_a_tools_status(run: Any) -> None:
    records = [
        replace(each, status_rule="looks-like-error") if isinstance(each, ToolResult) else each
        for each in run.trained(2, "m0")
    ]
    run.put(*records)
    shown = run.agl("show", "s2-g0-m0", "--run=runs/calc").output
    assert "): ok by looks-like-error  " in shown
    tried = run.agl("reward", "try", "--yes", "train.toml", "--rollout=s2-g0-m0", "--run=runs/calc").output
    assert "look ok by looks-like-error (" in tried


def test_show_weighs_the_terminal_reward_as_the_run_did(run: Any) -> None:
    weights = {"right": {"weight": 0.9}, "brief": {"weight": 0.1}, "odd": {"weight": 0.0}}
    run.put(
        Run("calc", 0, 0.0, {"rewards": weights}),
        Reward("s1-g0-m0", 0, "brief.words", 0.5, "brief"),
        Reward("s1-g0-m0", 0, "odd", 3.0, "odd"),
        Reward("s1-g0-m0", 0, "mood", 0.25, "agent"),
    )

    shown = run.agl("show", "s1-g0-m0", "--run=runs/calc").output

    [line] = [line for line in shown.splitlines() if "terminal reward" in line]
    said, terms = line.split(" = ")
    assert said == "  terminal reward: 0.95"  # 0.9 · 1 + 0.1 · 0.5
    terms, reported = terms.split("; ")
    assert sorted(terms.split(" + ")) == sorted(
        ["0.9 · right 1 (by right)", "0.1 · brief.words 0.5 (by brief)", "0 · odd 3 (by odd)"]
    )
    assert reported == "the agent reported mood 0.25 (by agent)"


def test_show_tells_what_a_rollout_was_compared_with(run: Any) -> None:
    shown = run.agl("show", "s1-g0-m1", "--run=runs/calc").output

    # The returns of the three are 1.25, -0.25 and 0.75: mean 1.75 / 3, squares of the deviations 0.58333 · 2.
    assert "group s1-g0, step 1: mean credit 0.5833, standard deviation 0.7638, over 3 rollouts: 1.25  -0.25  0.75" in (
        shown
    )


def test_credit_that_differs_within_rollouts_counts_each_rollout_once(run: Any) -> None:
    run.put(
        replace(_use("m0", 0), credit=4.0),  # m0: 4 and 1.25, mean 2.625; m1 -0.25; m2 0.75
        replace(_use("m1", 1), credit=9.0, advantage=None, weight=0.0, dropped="stale"),  # never got there
    )

    shown = run.agl("show", "s1-g0-m0", "--run=runs/calc").output

    assert "mean credit 1.042" in shown
    assert "over 3 rollouts: 4/1.25  -0.25  0.75" in shown


def test_show_prints_what_rounding_leaves_of_a_zero_as_zero(run: Any) -> None:
    noise = 0.1 + 0.2 - 0.3
    run.put(
        replace(_use("m0", 0), credit=noise, advantage=-noise),
        replace(_use("m0", 1), credit=0.0),
        Reward("s1-g0-m0", 0, "brief", noise, "brief"),
    )

    shown = run.agl("show", "s1-g0-m0", "--run=runs/calc").output

    assert "credit 0  advantage 0  weight" in shown
    assert "brief 0 (by brief)" in shown
    assert "over 3 rollouts: 0  -0.25" in shown, "what is shown alike is shown once"
    assert "e-1" not in shown


def test_show_survives_a_malformed_tool_call_and_tells_of_rewards_without_a_call(run: Any) -> None:
    rollout, attempt, first, *_ = run.trained(6, "m0")
    broken = {"role": "assistant", "tool_calls": [7, {"function": "look"}, {"function": {"name": "look"}}]}
    call = replace(first, choices=(replace(first.choices[0], message=broken),))
    run.put(rollout, attempt, call, Reward(rollout.id, 0, "late", 0.5, "mine", call="gone"))

    result = run.agl("show", rollout.id, "--run=runs/calc")

    assert result.exit_code == 0, result.exception
    assert "reward late 0.5 (by mine, for call gone, which does not count)" in result.output


@pytest.mark.parametrize(
    "command",
    [
        ("rollouts", "runs/calc"),
        ("show", "s7-g0-m0", "--run=runs/calc", "--width=2000"),
        ("reward", "try", "--yes", "train.toml", "--rollout=s7-g0-m0", "--set=rewards.right.bonus=1.0"),
    ],
    ids=["rollouts", "show", "reward try"],
)
def test_what_agents_said_reaches_no_terminal_as_a_command(run: Any, command: tuple[str, ...]) -> None:
    run.put(*_hostile(run.trained(7, "m0")))

    result = run.agl(*command)

    assert result.exit_code == 0, result.exception
    assert [c for c in result.output if not c.isprintable() and c != "\n"] == []
    assert "[/x] [bold]" in result.output


def test_show_names_what_is_not_seen_whole(run: Any) -> None:
    rollout, attempt, first, second, *_ = run.trained(6, "m0")
    run.put(
        rollout,
        replace(attempt, passed_through={"embeddings": 3}, bypassed={"https://api.openai.com/v1/responses": 2}),
        replace(first, undelivered=True),
        replace(second, stamped=False, agent=None, parent_span=None),
    )

    result = run.agl("show", rollout.id, "--run=runs/calc", "--width=200")

    assert result.exit_code == 0, result.exception
    assert "undelivered, before turn 0:" in result.output
    assert "passed through and not recorded: 3 embeddings" in result.output
    assert "past agl, and not recorded: 2 calls to https://api.openai.com/v1/responses" in result.output
    assert "unobserved (calls" in result.output
    assert "1 calls came from a client that agl does not know" in " ".join(result.output.split())


def test_what_adapters_said_is_text_in_the_summary(tmp_path: Path) -> None:
    screen = Screen()
    screen.file = io.StringIO()

    print_summary(screen, Summary(tmp_path, 0, RunState(), None, None, 0, {HOSTILE: 2}))

    assert "[/x] [bold] [INST] :smile: (2 times)" in screen.file.getvalue()
    assert "\x1b" not in screen.file.getvalue()


def _use(member: str, number: int) -> TrainingRecord:
    returns = {"m0": 1.25, "m1": -0.25}[member]
    return TrainingRecord(f"s1-g0-{member}", 0, f"s1-g0-{member}-c{number}", 0, 1, returns, 0.0, 1.0)


def _hostile(records: list[Any]) -> list[Any]:
    """The same rollout, with such a string wherever an agent, a model or a tool has a say."""
    rollout, attempt, first, second, tool_result, right, look, *training_records = records
    asked = {"id": f"{rollout.id}-t", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    said = {"role": "assistant", "content": HOSTILE, "tool_calls": [asked]}
    choice = replace(first.choices[0], message=said, finish_reason=FinishReason.STOP, parse_error=HOSTILE)
    request = {"messages": [{"role": HOSTILE, "content": [{"type": "text", "text": HOSTILE}]}]}
    return [
        replace(rollout, task=Task(HOSTILE, {HOSTILE: HOSTILE}, metadata={"answer": "42"})),
        replace(attempt, error=HOSTILE, result={HOSTILE: HOSTILE}),
        replace(first, request=request, choices=(choice,), agent=HOSTILE, state={HOSTILE: HOSTILE}),
        second,
        replace(
            tool_result,
            tool=HOSTILE,
            arguments={HOSTILE: HOSTILE},
            status=ToolStatus.ERROR,
            error=HOSTILE,
            status_rule=HOSTILE,
        ),
        replace(tool_result, id="unjoined", tool=HOSTILE, tool_call_id=HOSTILE, adapter=HOSTILE),
        right,
        replace(look, name=HOSTILE, source=HOSTILE),
        Reward(rollout.id, 0, HOSTILE, 0.5, HOSTILE),
        Reward(rollout.id, 0, HOSTILE, 0.5, HOSTILE, call=HOSTILE),
        *training_records,
    ]


def test_the_verdict_is_shown_listed_and_asked_for(run: Any) -> None:
    assert "healthy" in run.agl("show", "s1-g0-m0", "--run", "runs/calc").output
    listed = json.loads(run.agl("rollouts", "runs/calc", "--json").output)
    verdicts = {each["id"]: each["health"]["verdict"] for each in listed}
    assert len(verdicts) == 3
    for verdict in ("healthy", "unhealthy", "unobserved"):
        found = json.loads(run.agl("rollouts", "runs/calc", "--verdict", verdict, "--json").output)
        assert [each["id"] for each in found] == [id for id in verdicts if verdicts[id] == verdict]
    assert "unhealthy (tools failed)" in run.agl("rollouts", "runs/calc", "--verdict", "unhealthy").output
