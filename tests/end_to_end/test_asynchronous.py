"""Asynchronous training by the real command on the real engine: late rollouts, mixed versions, and what is too old."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agl_core.types import Ending, Mode, RolloutState

from .conftest import recorded, write_run

AGENT = '''
import asyncio
import json
import pathlib

import openai

METRICS = pathlib.Path(__file__).parent / "runs" / "run" / "metrics.jsonl"
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
STEPS, STALENESS = 8, 4


@pytest.mark.storm
def test_late_rollouts_carry_over_and_span_versions_and_those_too_old_are_dropped(agl: Any, tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "policies": {"default": {"model": {"path": "policy"}, "optimizer": {"learning_rate": 1e-3}}},
        "async": {"max_staleness": STALENESS},
        "algorithm": {"name": "grpo", "grpo": {"beta": 0.0, "importance_cap": 2.0}},
    }
    output = agl.run("train", write_run(tmp_path, AGENT, STEPS, **sections))
    run = tmp_path / "runs" / "run"
    records = recorded(run, Mode.TRAIN)
    rollouts, calls, training_records = records.rollouts, records.calls, records.training

    assert "caution" not in output
    assert len(rollouts) == STEPS * 2 * 4
    assert all(rollout.state is RolloutState.DONE for rollout in rollouts.values())
    assert {(a.error, a.ending) for tried in records.attempts.values() for a in tried} == {(None, Ending.FINISHED)}
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

    steps = [line for line in agl.metrics("run") if line["kind"] == "train"]
    assert sum(line.get("episodes_dropped/stale", 0) for line in steps) == len(stale)
    assert max(line["staleness/max"] for line in steps) == max(ages.values())
    assert sum(line["groups/carried_over"] for line in steps) > 0
    assert all("update/importance_mean" in line for line in steps)

    evaluated = recorded(run, Mode.EVAL_SAMPLED).calls
    at = {id: {call.version for call in found} for id, found in evaluated.items()}
    assert {id: {int(id.split("-")[0][1:])} for id in at} == at, "weights do not move during an evaluation"
    assert all(one.started <= other.started for found in calls.values() for one, other in pairwise(found))
