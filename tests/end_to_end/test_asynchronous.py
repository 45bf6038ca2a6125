"""Asynchronous training by the real command on the real engine: late rollouts, mixed versions, and what is too old."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tomli_w

from agl_core.builtin.credit import identical
from agl_core.learning import BatchPlan, PolicyCredit, make_batches
from agl_core.protocols import EngineContext, PolicySpec
from agl_core.store.sqlite import SqliteStore
from agl_core.types import (
    AttemptKey,
    Batch,
    Call,
    CreditKind,
    Ending,
    Episode,
    FinishReason,
    Mode,
    Rollout,
    RolloutState,
    Task,
    TrainingRecord,
    Transition,
    TransitionKey,
)
from agl_torch.engine import TorchEngine
from agl_torch.plugin import TorchOptions

from .engine_stack import make_policy

AGENT = '''
import asyncio
import json
import pathlib

import openai

METRICS = pathlib.Path(__file__).parent / "runs" / "late" / "metrics.jsonl"
WAITS = {"s1-g0-m0": 2, "s1-g1-m0": 6}
"""Which rollouts go on only after which step was trained."""

def trained():
    # The trainer appends meanwhile, and a line may be half there: it is whole once its newline is.
    lines = METRICS.read_text().rpartition("\\n")[0].splitlines() if METRICS.exists() else []
    return max((line["step"] for line in map(json.loads, lines) if line["kind"] == "train"), default=0)

async def solve(task_input, context):
    client = openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key)

    async def ask(text):
        reply = await client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    first = await ask(task_input)
    while trained() < WAITS.get(context.rollout, 0):
        await asyncio.sleep(0.02)
    return await ask(first or "nothing")
'''
REWARDS = '''
import agl_core

@agl_core.reward_rule
def brevity(episode):
    """The shorter, the better; seldom the same for two answers."""
    return 1 / (1 + len(episode.result or ""))
'''
STEPS, STALENESS = 8, 4


def configuration(folder: Path, **sections: Any) -> Path:
    (folder / "late_agent.py").write_text(AGENT)
    (folder / "late_rewards.py").write_text(REWARDS)
    (folder / "tasks.jsonl").write_text('{"input": "Hello, how are you?"}\n{"input": "The weather today"}\n')
    make_policy(folder / "policy")
    file = folder / "late.toml"
    file.write_text(
        tomli_w.dumps(
            {
                "config_version": 1,
                "name": "late",
                "plugins": ["late_rewards.py"],
                "agent": {"entry": "late_agent:solve", "attach": False},
                "tasks": {
                    "train": {"source": "jsonl", "path": "tasks.jsonl"},
                    "eval": {"source": "jsonl", "path": "tasks.jsonl"},
                },
                "policies": {"default": {"model": {"path": "policy"}, "optimizer": {"learning_rate": 1e-3}}},
                "sampling": {"max_tokens": 16},
                "train": {"steps": STEPS, "groups_per_step": 2, "group_size": 4, "checkpoint_every": 100},
                "async": {"max_staleness": STALENESS},
                "eval": {"every": 2, "tasks": 2, "modes": ["eval-sampled"]},
                "rewards": {"brevity": {}},
                "algorithm": {"name": "grpo", "grpo": {"beta": 0.0, "importance_cap": 2.0}},
                "engine": {"name": "torch", "torch": {"cache_mib": 32, "threads": 1}},
                "trackers": {"tensorboard": False},
                **sections,
            }
        )
    )
    return file


def recorded(
    run: Path, mode: Mode
) -> tuple[dict[str, Rollout], dict[str, list[Call]], dict[str, list[TrainingRecord]]]:
    """Rollouts by id, and by rollout its calls and what was made of them; the agent failed on none."""

    async def read() -> Any:
        async with SqliteStore(run / "store.sqlite", read_only=True) as store:
            rollouts = {each.id: each for each in await store.rollouts(mode=mode)}
            ended = {a.error: a.ending for id in rollouts for a in await store.attempts(id)}
            assert ended == {None: Ending.FINISHED}
            keys = [AttemptKey(each.id, each.counted_attempt or 0) for each in rollouts.values()]
            calls, training_records = await store.calls(keys), await store.training_records(keys)
            return (
                rollouts,
                {id: [call for call in calls if call.rollout == id] for id in rollouts},
                {id: [record for record in training_records if record.rollout == id] for id in rollouts},
            )

    found: tuple[dict[str, Rollout], dict[str, list[Call]], dict[str, list[TrainingRecord]]] = asyncio.run(read())
    return found


@pytest.mark.storm
def test_late_rollouts_carry_over_and_span_versions_and_those_too_old_are_dropped(agl: Any, tmp_path: Path) -> None:
    output = agl.run("train", configuration(tmp_path))
    run = tmp_path / "runs" / "late"
    rollouts, calls, training_records = recorded(run, Mode.TRAIN)

    assert "caution" not in output
    assert len(rollouts) == STEPS * 2 * 4
    assert all(rollout.state is RolloutState.DONE for rollout in rollouts.values())
    versions = {id: [call.version or 0 for call in calls[id]] for id in rollouts}
    assert all(len(found) == 2 and found == sorted(found) for found in versions.values())
    # The update that a rollout was used in made version `step`; it began with the one before.
    ages = {id: rollout.step - 1 - versions[id][0] for id, rollout in rollouts.items()}

    # It was late: begun for step 1, answered by two versions, and trained on.
    assert versions["s1-g0-m0"][0] == 0
    assert versions["s1-g0-m0"][1] >= 2
    assert 2 < rollouts["s1-g0-m0"].step <= 1 + STALENESS
    # It was later than that.
    assert ages["s1-g1-m0"] > STALENESS
    stale = {id for id in rollouts if any(record.dropped == "stale" for record in training_records[id])}
    assert stale == {id for id, age in ages.items() if age > STALENESS}
    assert stale >= {"s1-g1-m0", "s1-g1-m1", "s1-g1-m2", "s1-g1-m3"}
    assert all(len(training_records[id]) == 2 for id in rollouts), "every call was trained on or has its reason"
    assert all(record.weight > 0 for record in training_records["s1-g0-m0"])

    steps = [line for line in agl.metrics("late") if line["kind"] == "train"]
    assert sum(line.get("episodes_dropped/stale", 0) for line in steps) == len(stale)
    assert max(line["staleness/max"] for line in steps) == max(ages.values())
    assert sum(line["groups/carried_over"] for line in steps) > 0
    assert all("update/importance_mean" in line for line in steps)

    _, evaluated, _ = recorded(run, Mode.EVAL_SAMPLED)
    at = {id: {call.version for call in found} for id, found in evaluated.items()}
    assert {id: {int(id.split("-")[0][1:])} for id in at} == at, "weights do not move during an evaluation"
    assert all(one.started <= other.started for found in calls.values() for one, other in pairwise(found))


async def test_replies_begun_before_an_update_are_finished_by_the_version_that_began_them(tmp_path: Path) -> None:
    make_policy(tmp_path / "policy")
    context = EngineContext(
        tmp_path,
        0,
        {"default": PolicySpec(str(tmp_path / "policy"), optimizer={"learning_rate": 1e-2})},
        False,
        (),
        "key",
    )
    engine = TorchEngine(TorchOptions(threads=1, cache_mib=32), context)
    try:
        upstream = await engine.start()
        client = openai.AsyncOpenAI(base_url=upstream.urls[0], api_key=upstream.api_key)

        async def ask() -> Any:
            return await client.chat.completions.create(
                model=upstream.models["default"],
                messages=[{"role": "user", "content": "Hello, how are you?"}],
                n=64,
                max_tokens=400,
                seed=1,
                logprobs=True,
                extra_body={"return_token_ids": True},
            )

        alone = await ask()
        asking = await under_way(engine, ask)
        result = await engine.update("default", two_rewards(alone), "grpo", {})
        reply, later = await asking, await ask()
    finally:
        await engine.stop()

    assert result.version == 1
    assert result.weight_N.all()
    assert reply.model_extra["agl"]["version"] == 0
    assert [tokens(each) for each in reply.choices] == [tokens(each) for each in alone.choices]
    assert later.model_extra["agl"]["version"] == 1
    assert [tokens(each) for each in later.choices] != [tokens(each) for each in alone.choices]


async def under_way(engine: TorchEngine, ask: Callable[[], Coroutine[Any, Any, Any]]) -> asyncio.Task[Any]:
    """A request of which the engine has decoded something, and that is not answered yet."""
    while True:
        before = (await engine.stats())["tokens_decoded"]
        asking = asyncio.create_task(ask())
        while (await engine.stats())["tokens_decoded"] == before and not asking.done():
            pass
        if not asking.done():
            return asking


def tokens(choice: Any) -> list[int]:
    found: list[int] = choice.model_extra["token_ids"]
    return found


def two_rewards(reply: Any) -> Batch:
    """A group of two rollouts that both made this call, and were rewarded differently."""
    transition = Transition(
        key=TransitionKey("r0", 0, "c", 0),
        agent=None,
        turn=0,
        agent_turn=0,
        policy="default",
        version=0,
        messages=(),
        response={},
        finish_reason=FinishReason.STOP,
        temperature=1.0,
        prompt_ids=np.array(reply.model_extra["prompt_token_ids"], np.int32),
        response_ids=np.array(tokens(reply.choices[0]), np.int32),
        logprobs=np.array([entry.logprob for entry in reply.choices[0].logprobs.content], np.float32),
    )
    task = Task("t", None)
    group = [
        Episode(f"r{member}", 0, "g", member, task, Mode.TRAIN, Ending.FINISHED, (transition,), terminal=float(member))
        for member in (0, 1)
    ]
    credit = {"default": PolicyCredit("identical", identical, CreditKind.RETURN)}
    return make_batches([group], BatchPlan(credit)).batches["default"]
