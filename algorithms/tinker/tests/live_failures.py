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

from .skyrl_tx import KEY, ROOT, SkyrlTx, skyrl_tx

TIMEOUT = 20.0
"""`engine.tinker.timeout` of these runs, in seconds."""
STEPS = 3
pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[SkyrlTx]:
    os.environ["TINKER_API_KEY"] = KEY
    with skyrl_tx(tmp_path / "server") as running:
        yield running


def lines(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    # While the run goes on, the last line may be half there: it is whole once its newline is.
    whole = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [line for line in map(json.loads, whole) if line["kind"] == "train"]


def is_asked(run: Path, step: int) -> bool:
    """True while a rollout of this step has made a call."""
    if not (run / "checkpoints" / f"step-{step - 1:06d}").exists():
        return False
    store = read_store(run / "store.sqlite")
    of_step = {rollout.id for rollout in store.rollouts if rollout.step == step}
    return any(call.rollout in of_step for call in store.calls)


def test_a_run_whose_server_dies_says_so_and_is_resumed_when_it_is_back(own_server: SkyrlTx, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "calc"
    settings = {
        "engine.tinker.base_url": own_server.url,
        "engine.tinker.base_model": own_server.base,
        "engine.tinker.timeout": TIMEOUT,
        "policies.default.model.path": own_server.policy,
        "policies.default.model.lora.rank": 8,
        "sampling.max_tokens": 16,
        "train.steps": STEPS,
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
        trains.until(lambda: is_asked(run, step=2))
        own_server.kill()
        died = time.monotonic()
        assert trains.wait(300) != 0
        took = time.monotonic() - died
    finally:
        trains.stop()
    print(trains.output(), took)
    assert took < 3 * TIMEOUT
    assert f"agl train --resume {run}" in trains.output()
    assert own_server.url in trains.output()
    assert [line["step"] for line in lines(run)] == [1]
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["step-000001"]

    own_server.start()
    resumed = Command.start("train", "--resume", run, log=tmp_path / "second.txt")
    try:
        assert resumed.wait(400) == 0, resumed.output()
    finally:
        resumed.stop()
    print(resumed.output())
    assert [line["step"] for line in lines(run)] == [1, 2, 3]
