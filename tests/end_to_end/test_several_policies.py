"""Several policies in one run, by the real command: who answers whom, what moves, and what stays bit-identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agl_core.types import Mode
from agl_core.wire.headers import HEADER_AGENT

from .conftest import recorded, write_run

AGENT = f'''
import openai

async def solve(task_input, context):
    """A writer drafts, a critic comments, the writer writes again; none knows what policies there are."""
    client = openai.AsyncOpenAI(base_url=context.base_url, api_key=context.api_key)

    async def ask(agent, text):
        reply = await client.chat.completions.create(
            model="gpt-4o",
            messages=[{{"role": "user", "content": text}}],
            extra_headers={{"{HEADER_AGENT}": agent}},
        )
        return reply.choices[0].message.content

    draft = await ask("writer", task_input)
    opinion = await ask("critic-1", draft or "nothing")
    return await ask("writer", opinion or "nothing")
'''
POLICY = {"writer": "writer", "critic-1": "critic"}
"""Whose calls which policy answers."""
STEPS = 2


def weights(run: Path, step: int, policy: str) -> Path:
    return run / "checkpoints" / f"step-{step:06d}" / policy / "model" / "model.safetensors"


def trainer_state(run: Path, step: int, policy: str) -> dict[str, Any]:
    path = run / "checkpoints" / f"step-{step:06d}" / policy / "trainer.pt"
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def moved(before: Path, after: Path) -> bool:
    one, other = load_file(before), load_file(after)
    assert one.keys() == other.keys()
    return any(not torch.equal(one[name], other[name]) for name in one)


def test_a_frozen_policy_stays_byte_identical_while_another_is_trained(agl: Any, tmp_path: Path) -> None:
    # Adam and weight decay would move whatever they touch.
    policy = {"model": {"path": "policy"}, "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.1}}
    policies = {
        "writer": {**policy, "agents": ["writer"], "algorithm": {"name": "ppo"}},
        "critic": {**policy, "agents": ["critic-*"]},
    }
    agl.run("train", write_run(tmp_path, AGENT, STEPS, train={"agents": ["writer"]}, policies=policies))
    run = tmp_path / "runs" / "run"

    start = tmp_path / "policy" / "model.safetensors"
    for step in range(1, STEPS + 1):
        assert weights(run, step, "critic").read_bytes() == start.read_bytes()
        assert moved(weights(run, step - 1, "writer") if step > 1 else start, weights(run, step, "writer"))
        assert trainer_state(run, step, "critic")["version"] == 0
        assert trainer_state(run, step, "writer")["version"] == step
    records = recorded(run, Mode.TRAIN)
    training = {record.call: record for found in records.training.values() for record in found}
    assert len(records.rollouts) == 8 * STEPS
    for rollout in records.rollouts.values():
        assert len(records.calls[rollout.id]) == 3
        for call in records.calls[rollout.id]:
            assert call.policy == POLICY[call.agent or ""]
            assert call.version == (rollout.step - 1 if call.policy == "writer" else 0)
            # Untrained, the critic's calls still have their share of the return, as the run's rule gives it.
            assert training[call.id].credit == pytest.approx(records.rewards[rollout.id])
            assert (training[call.id].dropped == "untrained_agent") == (call.policy == "critic")
    assert sum(record.weight for record in training.values()) > 0
