"""A server that dies in the middle of a step: the run ends and says what to do; with the server back, it goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agl_command import Command
from testing_aids import read_store

from agl_core.config.sections import LoraSection
from agl_core.errors import EngineError
from agl_core.testing.engines import EngineCase, Row, batch_of, engine_context
from agl_core.types import RolloutState
from agl_tinker.plugin import TinkerEngine, TinkerOptions

from .skyrl_tx import KEY, ROOT, SkyrlTx, skyrl_tx

TIMEOUT = 60.0
"""`engine.tinker.timeout` here, in seconds: a server that compiles on a busy machine is not dead."""
MOST_SECONDS = 2 * TIMEOUT
"""Until it ends: 47 seconds were measured with a TIMEOUT of 40."""
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SkyrlTx]:
    os.environ["TINKER_API_KEY"] = KEY
    with skyrl_tx(tmp_path / "server") as running:
        yield running


async def test_an_update_whose_server_dies_ends_with_the_remedy(own_server: SkyrlTx, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    changes: dict[str, Any] = {"algorithm": "grpo", "algorithm_options": {"epochs": 2}}
    context = engine_context(tmp_path, str(own_server.policy), lora=LoraSection(rank=8), **changes)
    engine = TinkerEngine(TinkerOptions(base_url=own_server.url, base_model=own_server.base, timeout=TIMEOUT), context)
    died = list[float]()

    def kill(share: float) -> None:
        if not died:
            own_server.kill()
            died.append(time.monotonic())

    try:
        case = EngineCase(engine, await engine.start(), context, tmp_path)
        batch = batch_of([Row((5, 6, 7), (8, 9), (-6.0, -6.0), value) for value in (0.0, 1.0)])
        with pytest.raises(EngineError, match=r"does not answer, .* the run resumes from its last checkpoint"):
            await engine.update(case.policy, batch, kill)
        assert time.monotonic() - died[0] < MOST_SECONDS
        assert await case.version() == 0
    finally:
        await engine.stop()


def lines(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    # While the run goes on, the last line may be half there: it is whole once its newline is.
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [line for line in map(json.loads, whole) if line["kind"] == "train"]


def is_sampling(run: Path, step: int) -> bool:
    rollouts = read_store(run / "store.sqlite").rollouts
    return any(rollout.step == step and rollout.state is RolloutState.RUNNING for rollout in rollouts)


def checkpoints(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "checkpoints").iterdir())


def test_a_run_whose_server_dies_says_so_and_is_resumed_when_it_is_back(own_server: SkyrlTx, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "calc"
    settings = {
        "engine.tinker.base_url": own_server.url,
        "engine.tinker.base_model": own_server.base,
        "engine.tinker.timeout": TIMEOUT,
        "policies.default.model.path": own_server.policy,
        "policies.default.model.lora.rank": 8,
        "sampling.max_tokens": 16,
        "train.steps": 3,
        "train.groups_per_step": 2,
        "train.group_size": 2,
        "train.checkpoint_every": 1,
        "eval.every": 0,
        "runs": run.parent,
    }
    given = [f"--set={key}={value}" for key, value in settings.items()]
    command = ["train", ROOT / "examples" / "calc" / "train.toml", "--engine", "tinker", *given]
    trains = Command.start(*command, log=tmp_path / "first.txt")
    try:
        trains.until((run / "checkpoints" / "step-000001").exists)
        own_server.pause()
        trains.until(lambda: is_sampling(run, step=2))
        own_server.kill()
        died = time.monotonic()
        assert trains.wait(300) == 2, trains.output()
        assert time.monotonic() - died < MOST_SECONDS
    finally:
        trains.stop()
    assert f"agl train --resume {run}" in trains.output()
    assert own_server.url in trains.output()
    assert [line["step"] for line in lines(run)] == [1]
    assert checkpoints(run) == ["step-000001"]

    own_server.start()
    resumed = Command.start("train", "--resume", run, log=tmp_path / "second.txt")
    try:
        assert resumed.wait(400) == 0, resumed.output()
    finally:
        resumed.stop()
    assert [line["step"] for line in lines(run)] == [1, 2, 3]
    assert checkpoints(run)[-1] == "step-000003"
    state = json.loads((run / "checkpoints" / "step-000003" / "default" / "tinker.json").read_text())
    assert state["version"] == 3
