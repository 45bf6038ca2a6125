"""Several policies in one run, by the real command: who answers whom, what moves, and what stays bit-identical."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from agl_core.store.sqlite import SqliteStore
from agl_core.types import AttemptKey, Call, Mode, Rollout, TrainingRecord
from agl_core.wire.headers import HEADER_AGENT

from .engine_stack import make_policy

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
REWARDS = '''
import agl_core

@agl_core.reward_rule
def brevity(episode):
    """The shorter, the better; seldom the same for two answers."""
    return 1 / (1 + len(episode.result or ""))
'''
POLICY = {"writer": "writer", "critic-1": "critic"}
"""Whose calls which policy answers."""
STEPS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An agent, a reward, tasks and a policy that babbles."""
    (tmp_path / "writing_agent.py").write_text(AGENT)
    (tmp_path / "writing_rewards.py").write_text(REWARDS)
    (tmp_path / "tasks.jsonl").write_text('{"input": "Hello, how are you?"}\n{"input": "The weather today"}\n')
    make_policy(tmp_path / "policy")
    return tmp_path


def configuration(folder: Path, name: str, train: Mapping[str, Any], **policies: Mapping[str, Any]) -> Path:
    """A file for a short run in which Adam and weight decay would move whatever they touch."""
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1}
    file = folder / f"{name}.toml"
    file.write_text(
        tomli_w.dumps(
            {
                "config_version": 1,
                "name": name,
                "plugins": ["writing_rewards.py"],
                "agent": {"entry": "writing_agent:solve", "attach": False},
                "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
                "policies": {policy: {"optimizer": optimizer, **table} for policy, table in policies.items()},
                "sampling": {"max_tokens": 24},
                "train": {
                    "steps": STEPS,
                    "groups_per_step": 2,
                    "group_size": 4,
                    "checkpoint_every": 1,
                    "keep_checkpoints": 10,
                    **train,
                },
                "rewards": {"brevity": {}},
                "engine": {"name": "torch", "torch": {"cache_mib": 32, "threads": 1}},
                "trackers": {"tensorboard": False},
            }
        )
    )
    return file


def recorded(run: Path) -> tuple[dict[str, Rollout], list[Call], dict[str, TrainingRecord], dict[str, float]]:
    """Training rollouts by id, their calls, what was made of each call, and the terminal rewards."""

    async def read() -> Any:
        async with SqliteStore(run / "store.sqlite", read_only=True) as store:
            rollouts = {each.id: each for each in await store.rollouts(mode=Mode.TRAIN)}
            keys = [AttemptKey(each.id, each.counted_attempt or 0) for each in rollouts.values()]
            calls, training_records, rewards = (
                await store.calls(keys),
                await store.training_records(keys),
                await store.rewards(keys),
            )
            return (
                rollouts,
                calls,
                {record.call: record for record in training_records},
                {each.rollout: each.value for each in rewards},
            )

    found: tuple[dict[str, Rollout], list[Call], dict[str, TrainingRecord], dict[str, float]] = asyncio.run(read())
    return found


def weights(run: Path, step: int, policy: str, file: str = "model.safetensors") -> Path:
    return run / "checkpoints" / f"step-{step:06d}" / policy / "model" / file


def trainer_state(run: Path, step: int, policy: str) -> dict[str, Any]:
    path = run / "checkpoints" / f"step-{step:06d}" / policy / "trainer.pt"
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def moved(before: Path, after: Path) -> bool:
    one, other = load_file(before), load_file(after)
    assert one.keys() == other.keys()
    return any(not torch.equal(one[name], other[name]) for name in one)


def test_a_frozen_policy_stays_byte_identical_while_another_is_trained(agl: Any, folder: Path) -> None:
    policy = {"model": {"path": "policy"}}
    file = configuration(
        folder,
        "frozen",
        {"agents": ["writer"]},
        writer={**policy, "agents": ["writer"], "algorithm": {"name": "ppo"}},
        critic={**policy, "agents": ["critic-*"]},
    )
    agl.run("train", file)
    run = folder / "runs" / "frozen"

    start = (folder / "policy" / "model.safetensors").read_bytes()
    for step in range(1, STEPS + 1):
        assert weights(run, step, "critic").read_bytes() == start
        assert moved(
            weights(run, step - 1, "writer") if step > 1 else folder / "policy" / "model.safetensors",
            weights(run, step, "writer"),
        )
        assert trainer_state(run, step, "critic")["version"] == 0
        assert trainer_state(run, step, "writer")["version"] == step
    rollouts, calls, training_records, rewards = recorded(run)
    assert len(calls) == 3 * len(rollouts) == 3 * 8 * STEPS
    for call in calls:
        assert call.policy == POLICY[call.agent or ""]
        assert call.version == (rollouts[call.rollout].step - 1 if call.policy == "writer" else 0)
        record = training_records[call.id]
        # Untrained, the critic's calls still have their share of the return, as the run's rule gives it.
        assert record.credit == pytest.approx(rewards[call.rollout])
        assert (record.dropped == "untrained_agent") == (call.policy == "critic")
    assert sum(record.weight for record in training_records.values()) > 0
