"""`agl rollouts`, `agl show`: everything recorded is there to be read, and nothing of it is obeyed."""

from __future__ import annotations

import asyncio
import io
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from running_servers import run_worker

from agl_core.cli.screen import Screen
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import (
    Attempt,
    FinishReason,
    Recomputed,
    Reward,
    Run,
    Source,
    Task,
    ToolResult,
    ToolStatus,
    TrainingRecord,
)
from agl_core.wire import WORKER_KEY
from agl_server.commands.train import print_summary
from agl_server.health.certificate import digest
from agl_server.store.sqlite import SqliteStore
from agl_server.testing import running_stack
from agl_server.training.checkpoints import RunState
from agl_server.training.metrics import Summary

HOSTILE = "\x1b]0;owned\x07\x1b[31m\x9b2J\r[/x] [bold] [INST] :smile:"


def shown(run: Any, rollout: str = "s1-g0-m0", *options: str) -> str:
    result = run.agl("show", "runs/calc", rollout, *options)
    assert result.exit_code == 0, result.exception
    return str(result.output)


def test_rewards_have_their_provenance_and_the_group_its_credit(run: Any) -> None:
    text = shown(run)

    assert "reward look 0.25 (by tools, for call s1-g0-m0-c0)" in text
    assert "terminal reward: 1 = right 1 (by right)" in text
    # The returns of the three are 1.25, -0.25 and 0.75: mean 1.75 / 3, squares of the deviations 0.58333 · 2.
    assert "group s1-g0, step 1, by plain: mean credit 0.5833, standard deviation 0.7638" in text
    assert "over 3 rollouts: 1.25  -0.25  0.75" in text
    assert run.agl("show", "s1-g0-m0").output == text, "the newest run"
    algorithm = {"name": "grpo", "grpo": {"beta": 0.0, "epochs": 2}}
    run.put(Run("calc", 0, 0.0, {"policies": {}, "algorithm": algorithm}))
    assert "step 1, by grpo (epochs = 2): mean credit" in shown(run), "the settings that are no defaults"
    run.put(Run("calc", 0, 0.0, {"policies": {}, "algorithm": {"name": "own", "own": {"epochs": 2}}}))
    assert "step 1, by own: mean credit" in shown(run), "its defaults are not known"
    assert "agl show RUN ID" in run.agl("show", "runs/calc", "s1-g0-m0", "more").output


def test_the_evidence_of_a_rule_is_below_its_reward(run: Any) -> None:
    run.put(Reward("s1-g0-m0", 0, "right", 1.0, "right", evidence=f"2 of 3 tests passed\n{HOSTILE}"))
    lines = shown(run).splitlines()
    place = lines.index("  terminal reward: 1 = right 1 (by right)")
    assert lines[place + 1 : place + 3] == ["    2 of 3 tests passed", "    ·]0;owned··[31m·2J"]


def test_each_error_of_an_attempt_has_a_line(run: Any) -> None:
    run.put(
        *(replace(r, error="crash " * 60 + "\nrule") if isinstance(r, Attempt) else r for r in run.trained(1, "m0"))
    )
    lines = shown(run).splitlines()
    assert lines[[line.startswith("  crash") for line in lines].index(True) :].count("  rule") == 1


def test_conversations_are_a_tree_and_a_sub_agents_call_is_explained_like_any_other(run: Any) -> None:
    rollout, attempt, first, *_ = run.trained(3, "m0")
    offered = [{"type": "function", "function": {"name": "ask"}}]
    delegated = {"id": "t", "type": "function", "function": {"name": "ask", "arguments": '{"prompt": "What is 6?"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [delegated]}
    task, told = first.request["messages"], {"role": "tool", "tool_call_id": "t", "content": "six"}
    conversations: list[Any] = [
        ({"role": "assistant", "content": "A sum"}, [{"role": "user", "content": "A title?"}], {"program": "claude"}),
        (asked, [{"role": "system", "content": "Work."}, *task], {"tools": offered}),
        ({"role": "assistant", "content": "six"}, [{"role": "user", "content": "What is 6?"}], {}),
        ({"role": "assistant", "content": "42"}, [{"role": "system", "content": "Work."}, *task, asked, told], {}),
    ]
    calls = [
        replace(
            first,
            id=f"c{number}",
            sequence=number,
            agent=None,
            program=more.get("program"),
            request={"messages": messages, "tools": more.get("tools", [])},
            choices=(replace(first.choices[0], message=reply),),
        )
        for number, (reply, messages, more) in enumerate(conversations)
    ]
    used = [
        TrainingRecord(rollout.id, 0, f"c{n}", 0, 3, 1.0, advantage, 0.5) for n, advantage in ((1, 0.25), (2, -0.75))
    ]
    dropped = TrainingRecord(rollout.id, 0, "c0", 0, 3, None, None, 0.0, dropped="housekeeping")
    run.put(rollout, attempt, *calls, *used, dropped)

    lines = [line.rstrip() for line in shown(run, rollout.id).splitlines()]

    assert "  conversations: 1 main, 1 sub-agent, 1 housekeeping (by structure 1)" in lines
    heads = [line for line in lines if line.lstrip().startswith("turn ")]
    assert heads == [
        "    turn 0  unnamed agent  (default v0)  housekeeping (by structure)",
        "  turn 1  unnamed agent  (default v0)",
        "    turn 2  unnamed agent  (default v0)  sub-agent of turn 1, its turn 0",
        "  turn 3  unnamed agent  (default v0)",
    ]
    below = lines[lines.index(heads[2]) : lines.index(heads[3])]
    assert "      step 3: credit 1  advantage -0.75  weight in the loss 0.5" in below
    assert "      step 3: dropped: housekeeping" in lines[: lines.index(heads[1])]


TEAM = """
import asyncio, json
import agl_core
from openai import AsyncOpenAI

async def talk(agent, prompt, answer):
    messages = [{"role": "system", "content": agent}, {"role": "user", "content": prompt}]
    while True:
        with agl_core.agent(agent):
            reply = (await AsyncOpenAI().chat.completions.create(model="any", messages=messages)).choices[0].message
        if not reply.tool_calls:
            return reply.content
        results = await asyncio.gather(*(answer(json.loads(call.function.arguments)) for call in reply.tool_calls))
        told = zip(reply.tool_calls, results, strict=True)
        messages.append(reply.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result} for call, result in told]

async def look(arguments):
    return "found"

async def ask(arguments):
    return await talk(arguments["agent"], arguments["prompt"], look)

async def solve(task):
    return await talk("lead", task, ask)
"""


def test_sub_agents_side_by_side_are_credited_apart_and_lead_to_what_their_parent_earns(run: Any) -> None:
    """A lead asks a reader, who uses a tool, and a writer. A tool that works earns 0.25, the right answer 1."""
    (run.folder / "team.py").write_text(TEAM)
    asked = [("ask", {"agent": name, "prompt": f"What would a {name} say of 6 * 7?"}) for name in ("reader", "writer")]
    says = {
        "lead": [CallTools(asked), Say("42")],
        "reader": [CallTools([("look", {})]), Say("6")],
        "writer": [Say("7")],
    }

    async def play() -> None:
        async with SqliteStore(run.store) as store, running_stack(store=store) as stack:
            stack.upstream.answer = lambda received: says[received.items[0]["content"]][received.turns]
            key = {WORKER_KEY: stack.server.worker_key}
            await run_worker(stack, run.planned(4, "m0"), run.folder, "--set=agent.entry=team:solve", **key)

    asyncio.run(play())

    drawn = [line.rstrip() for line in shown(run, "s4-g0-m0").splitlines()]
    assert "  conversations: 1 main, 2 sub-agent" in drawn
    assert sum(line.startswith("    turn ") and "sub-agent of turn 0" in line for line in drawn) == 3
    rule = "--set=credit={name='discounted', discounted={gamma=0.9}}"
    tried = run.agl("reward", "try", "--yes", "train.toml", "--rollout=s4-g0-m0", rule).output
    credit = sorted(re.findall(r"^ \d +(\w+).* → (\S+) \* *$", tried, re.MULTILINE))
    assert credit == sorted([
        ("lead", "1"),
        ("reader", "0.9"),  # 0.9 · 1: the lead goes on with what it said.
        ("reader", "1.06"),  # 0.25 + 0.9 · 0.9
        ("writer", "0.9"),  # 0.9 · 1, however long the reader takes.
        ("lead", "1.625"),  # 0.5 + 0.9 · (1 + 0.25)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"source": Source.ADAPTER, "adapter": "langchain"}, "ok (by the agent's process, langchain)"),
        ({"source": Source.SPAN, "adapter": "otel"}, "ok (by a span over OTLP, otel)"),
        ({"source": Source.COMMAND}, "ok (by a process of the command)"),
        ({"status_rule": "contradicted"}, "ok by contradicted (by the agent's process)"),
    ],
)
def test_who_told_what_a_tool_did_and_by_which_rule(run: Any, fields: dict[str, Any], expected: str) -> None:
    records = run.trained(2, "m0")
    run.put(*(replace(record, **fields) if isinstance(record, ToolResult) else record for record in records))

    status, _, source = expected.partition(" (")
    assert f"): {status}  " in shown(run, "s2-g0-m0")
    assert f"({source}\n" in shown(run, "s2-g0-m0")
    tried = run.agl("reward", "try", "--yes", "train.toml", "--rollout=s2-g0-m0", "--run=runs/calc").output
    assert f"look {expected}" in tried


def test_the_terminal_reward_is_weighed_as_the_run_did(run: Any) -> None:
    weights = {"right": {"weight": 0.9}, "brief": {"weight": 0.1}, "odd": {"weight": 0.0}}
    run.put(
        Run("calc", 0, 0.0, {"rewards": weights, "policies": {}, "algorithm": {"name": "plain"}}),
        Reward("s1-g0-m0", 0, "brief.words", 0.5, "brief"),
        Reward("s1-g0-m0", 0, "odd", 3.0, "odd"),
        Reward("s1-g0-m0", 0, "mood", 0.25, "agent"),
    )

    [line] = [line for line in shown(run).splitlines() if "terminal reward" in line]

    total, terms = line.split(" = ")
    assert total == "  terminal reward: 0.95"  # 0.9 · 1 + 0.1 · 0.5
    terms, reported = terms.split("; ")
    assert set(terms.split(" + ")) == {
        "0.9 · right 1 (by right)", "0.1 · brief.words 0.5 (by brief)", "0 · odd 3 (by odd)",
    }  # fmt: skip
    assert reported == "the agent reported mood 0.25 (by agent)"


def use(member: str, number: int, **changes: Any) -> TrainingRecord:
    credit = {"m0": 1.25, "m1": -0.25}[member]
    record = TrainingRecord(f"s1-g0-{member}", 0, f"s1-g0-{member}-c{number}", 0, 1, credit, 0.0, 1.0)
    return replace(record, **changes)


def test_credit_that_differs_within_rollouts_counts_each_rollout_once(run: Any) -> None:
    run.put(
        use("m0", 0, credit=4.0),  # m0: 4 and 1.25, mean 2.625; m1 -0.25; m2 0.75
        use("m1", 1, credit=9.0, advantage=None, weight=0.0, dropped="stale"),  # never got there
    )

    assert "mean credit 1.042" in shown(run)
    assert "over 3 rollouts: 4/1.25  -0.25  0.75" in shown(run)


def test_the_rounding_error_of_a_zero_is_zero(run: Any) -> None:
    noise = 0.1 + 0.2 - 0.3
    run.put(
        use("m0", 0, credit=noise, advantage=-noise),
        use("m0", 1, credit=0.0),
        Reward("s1-g0-m0", 0, "brief", noise, "brief"),
    )

    text = shown(run)

    assert "credit 0  advantage 0  weight" in text
    assert "brief 0 (by brief)" in text
    assert "over 3 rollouts: 0  -0.25" in text, "what is shown alike is shown once"
    assert "e-1" not in text


def certified(records: list[Any], **changes: Any) -> list[Any]:
    """The rollout's second call with five tokens, trained on as they were sampled; `changes` are of the call."""
    rollout, attempt, first, second, *others = records
    logprobs = np.array([-0.5, -1.5, -0.25, -2.5, -4.0], np.float32)
    choice = replace(second.choices[0], response_ids=np.arange(11, 16, dtype=np.int32), logprobs=logprobs)
    of = digest(second.prompt_ids, choice.response_ids, logprobs)
    computed = logprobs + np.array([0.0, 1e-5, np.nan, -1e-5, 0.0], np.float32)
    recomputed = Recomputed(3, of, changes.pop("precision", "float32"), computed + changes.pop("shift", 0.0))
    choice = replace(choice, **changes.pop("choice", {}))
    record = replace(others.pop(), recomputed=changes.pop("recomputed", recomputed))
    second = replace(second, **{"version": 3, "choices": (choice,), **changes})
    return [rollout, attempt, first, second, *others, record]


OTHER_IDS = np.array([11, 12, 13, 99, 15], np.int32)


@pytest.mark.parametrize(
    ("changes", "proofs"),
    [
        ({}, "4 exact (100%)"),
        ({"shift": 0.01}, "0 exact (0%), 4 different"),
        ({"shift": np.array([0, 0.01, 0, 0, 0], np.float32)}, "3 exact (75%), 1 different"),
        ({"shift": 0.1, "precision": "bfloat16"}, "4 exact (100%)"),
        ({"shift": -np.inf, "precision": "bfloat16"}, "0 exact (0%), 4 different"),
        ({"choice": {"response_ids": OTHER_IDS}}, "0 exact (0%), 4 other_tokens"),
        ({"choice": {"logprobs": np.full(5, -0.5, np.float32)}}, "0 exact (0%), 4 other_tokens"),
        ({"prompt_ids": OTHER_IDS}, "0 exact (0%), 4 other_tokens"),
        ({"choice": {"logprobs": None}}, "0 exact (0%), 4 not_known"),
        ({"version": 2}, "0 exact (0%), 4 other_version"),
        ({"version": None}, "0 exact (0%), 4 other_version"),
        ({"recomputed": None}, "0 exact (0%), 5 not_known"),
    ],
)  # fmt: skip
def test_tokens_are_proved_to_be_what_was_sampled_or_are_not(run: Any, changes: dict[str, Any], proofs: str) -> None:
    run.put(*certified(run.trained(2, "m0"), **changes))

    lines = shown(run, "s2-g0-m0", "--tokens").splitlines()

    _, start = [i for i, line in enumerate(lines) if "tokens trained on" in line]
    assert lines[start].endswith(f" tokens trained on: {proofs}")
    rows = [line.split(maxsplit=5) for line in lines[start + 2 : start + 7]]
    counted = Counter(row[5] for row in rows if row[5] != "not trained on")
    listed = re.sub(r" \(.*?%\)|0 exact \(0%\), ", "", proofs)
    assert ", ".join(f"{count} {proof}" for proof, count in counted.items()) == listed
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    if not changes:
        assert rows[1] == ["1", "12", "v3", "-1.50000", "-1.49999", "exact"]
        assert rows[2] == ["2", "13", "v3", "-0.25000", "nan", "not trained on"]


def test_what_is_broken_or_not_seen_whole_is_named(run: Any) -> None:
    rollout, attempt, first, second, *_ = run.trained(6, "m0")
    broken = {"role": "assistant", "tool_calls": [7, {"function": "look"}, {"function": {"name": "look"}}]}
    run.put(
        rollout,
        replace(attempt, passed_through={"embeddings": 3}, bypassed={"https://api.openai.com/v1/responses": 2}),
        replace(first, undelivered=True),
        replace(second, stamped=False, agent=None, choices=(replace(first.choices[0], message=broken),)),
        Reward(rollout.id, 0, "late", 0.5, "mine", call="gone"),
    )

    text = shown(run, rollout.id, "--width=200")

    assert "undelivered, before turn 0:" in text
    assert "passed through and not recorded: 3 embeddings" in text
    assert "past agl, and not recorded: 2 calls to https://api.openai.com/v1/responses" in text
    assert "unobserved (calls" in text
    assert "1 calls came from a client that agl does not know" in " ".join(text.split())
    assert "reward late 0.5 (by mine, for call gone, which does not count)" in text


@pytest.mark.parametrize(
    "command",
    [
        ("rollouts", "runs/calc"),
        ("show", "runs/calc", "s7-g0-m0", "--width=2000"),
        ("reward", "try", "--yes", "train.toml", "--rollout=s7-g0-m0", "--set=rewards.right.bonus=1.0"),
    ],
    ids=["rollouts", "show", "reward try"],
)
def test_what_agents_said_reaches_no_terminal_as_a_command(run: Any, command: tuple[str, ...]) -> None:
    run.put(*hostile(run.trained(7, "m0")))

    result = run.agl(*command)

    assert result.exit_code == 0, result.exception
    assert [c for c in result.output if not c.isprintable() and c != "\n"] == []
    assert "[/x] [bold]" in result.output


def hostile(records: list[Any]) -> list[Any]:
    """The same rollout, with such a string wherever an agent, a model or a tool has a say."""
    rollout, attempt, first, second, tool_result, right, look, *training_records = records
    tool_call = {"id": f"{rollout.id}-t", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    message = {"role": "assistant", "content": HOSTILE, "tool_calls": [tool_call]}
    choice = replace(first.choices[0], message=message, finish_reason=FinishReason.STOP, parse_error=HOSTILE)
    request = {"messages": [{"role": HOSTILE, "content": [{"type": "text", "text": HOSTILE}]}]}
    failed = {"status": ToolStatus.ERROR, "error": HOSTILE, "status_rule": HOSTILE}
    return [
        replace(rollout, task=Task(HOSTILE, {HOSTILE: HOSTILE}, metadata={"answer": "42"})),
        replace(attempt, error=HOSTILE, result={HOSTILE: HOSTILE}),
        replace(first, request=request, choices=(choice,), agent=HOSTILE, state={HOSTILE: HOSTILE}),
        second,
        replace(tool_result, tool=HOSTILE, arguments={HOSTILE: HOSTILE}, **failed),
        replace(tool_result, id="unjoined", tool=HOSTILE, tool_call_id=HOSTILE, adapter=HOSTILE),
        right,
        replace(look, name=HOSTILE, source=HOSTILE),
        Reward(rollout.id, 0, HOSTILE, 0.5, HOSTILE),
        Reward(rollout.id, 0, HOSTILE, 0.5, HOSTILE, call=HOSTILE),
        *training_records,
    ]


def test_what_adapters_said_is_text_in_the_summary(tmp_path: Path) -> None:
    screen = Screen()
    screen.file = io.StringIO()

    print_summary(screen, Summary(tmp_path, 0, RunState(), [], None, None, None, {HOSTILE: 2}))

    assert "[/x] [bold] [INST] :smile: (2 times)" in screen.file.getvalue()
    assert "\x1b" not in screen.file.getvalue()
