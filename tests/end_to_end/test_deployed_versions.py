"""Sessions answered by saved versions with real weights, while they are swapped."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tomli_w
import torch
from transformers import AutoModelForCausalLM

from agl_core.config.load import SERVED, load
from agl_core.server import LightningServer
from agl_core.training.checkpoints import Checkpoints, RunState
from agl_core.training.server import local_server
from agl_core.types import AttemptKey, Call, Mode
from agl_online.deployed import DeployedVersions
from agl_online.sessions import sessions_of
from agl_online.versions import By, Decision, Ledger, State
from agl_online.wire import ApplicationKeys

from ..settings.tiny_policy import make_checkpoint

POLICY = "default"


def make_run(folder: Path) -> Ledger:
    """A run with checkpoints of the steps 1 and 2, deployed with what it started from."""
    base = make_checkpoint(folder.parent / "base", seed=0)
    folder.mkdir()
    config = {
        "config_version": 1,
        "agent": {"entry": "agent:solve"},
        "tasks": {"train": {"source": "jsonl", "path": "tasks.jsonl"}},
        "policies": {POLICY: {"model": {"path": str(base)}}},
        "sampling": {"max_tokens": 12},
        "engine": {"name": "torch", "torch": {"device": "cpu"}},
        "online": {"applications": {"shop": 1}},
        "learn": {"canary": {"share": 0.5}},
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    checkpoints = Checkpoints(folder / "checkpoints", keep=9)
    for step in (1, 2):
        part = checkpoints.begin(step)
        make_checkpoint(part / POLICY / "model", seed=step)
        checkpoints.commit(part, RunState(step=step))
    ledger = Ledger(folder)
    ledger.begin(0, "What training started from.")
    return ledger


def decide(ledger: Ledger, step: int, *states: State) -> None:
    for state in states:
        ledger.record(Decision(step, state, By.GATE if state is State.PASSED else By.CANARY, "A test."))


async def ask(http: httpx.AsyncClient, server: LightningServer, name: str) -> None:
    key = ApplicationKeys(server.keys, {"shop": 1}).of_application("shop")
    reply = await http.post(
        f"{server.base_url}/v1/chat/completions",
        json={"model": "any", "messages": [{"role": "user", "content": "w5 w6 w7"}]},
        headers={
            "Authorization": f"Bearer {key}",
            "x-agl-session": name,
        },
    )
    assert reply.status_code == 200, reply.text


@torch.no_grad()
def difference(model: Any, call: Call) -> float:
    """The largest difference between recorded log-probabilities and those of this model."""
    (choice,) = call.choices
    assert call.prompt_ids is not None
    assert choice.response_ids is not None
    assert choice.logprobs is not None
    ids = torch.from_numpy(np.concatenate([call.prompt_ids, choice.response_ids]).astype(np.int64))
    start = len(call.prompt_ids)
    found = torch.log_softmax(model(input_ids=ids[None]).logits[0], -1)[start - 1 : -1]
    sampled = found.gather(-1, ids[start:, None])[:, 0].numpy()
    return float(np.abs(sampled - choice.logprobs).max())


@pytest.mark.storm
async def test_recorded_calls_are_those_of_the_version_that_they_name(tmp_path: Path) -> None:
    ledger = make_run(tmp_path / "run")
    decide(ledger, 1, State.PASSED, State.CANARY)
    loaded = load(ledger.run / "config.toml", needs=SERVED)
    async with (
        DeployedVersions(ledger.run, loaded, 0.5) as deployed,
        local_server(loaded, ledger.run, sessions_of(loaded, ledger.run, deployed, print)) as server,
        httpx.AsyncClient(trust_env=False, timeout=60) as http,
    ):
        names = [f"user-{number}" for number in range(12)]
        await asyncio.gather(*(ask(http, server, name) for name in names))

        async def use_on() -> None:
            for turn in range(4):
                await asyncio.gather(*(ask(http, server, name) for name in (*names, f"during-{turn}")))

        using = asyncio.create_task(use_on())
        decide(ledger, 1, State.STABLE)
        decide(ledger, 2, State.PASSED, State.CANARY)
        await deployed.refresh()
        await using
        late = [f"late-{number}" for number in range(12)]
        await asyncio.gather(*(ask(http, server, name) for name in late))
        rollouts = {each.id: each for each in await server.store.rollouts(mode=Mode.USE)}
        calls = await server.store.calls([AttemptKey(id, 0) for id in rollouts])

    versions: dict[str, set[int | None]] = {}
    for call in calls:
        versions.setdefault(rollouts[call.rollout].task.metadata["session"], set()).add(call.version)
    assert len(calls) == 12 * 6 + 4
    assert {len(each) for each in versions.values()} == {1}, "a session keeps its version"
    assert {version for name in names for version in versions[name]} == {0, 1}
    assert {version for name in late for version in versions[name]} == {1, 2}
    folders = {step: ledger.run / f"checkpoints/step-00000{step}" / POLICY / "model" for step in (1, 2)}
    models = {
        step: AutoModelForCausalLM.from_pretrained(folder) for step, folder in {0: tmp_path / "base", **folders}.items()
    }
    for call in calls[:: max(1, len(calls) // 20)]:
        assert call.version is not None
        assert difference(models[call.version], call) < 1e-4
        assert difference(models[(call.version + 1) % 3], call) > 1e-2, "another version says something else"
