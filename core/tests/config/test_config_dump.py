"""A configuration survives load → store → load, whatever is set in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agl_core.config import CONFIG_FILE, LoadedConfig, load, store_config

Load = Callable[..., LoadedConfig]

CHANGED = {
    "seed=3", "folder=inside", 'agent.command=["python", "agent.py"]', "agent.attach=false",
    "tasks.held-out.source=counting", "tasks.train.limit=77", "async.max_staleness=3", "async.in_flight=40",
    "policies.second.model.path=Qwen/Qwen2.5-0.5B", 'policies.default.agents=["writer", "edit*"]',
    "policies.default.algorithm.comparing.beta=0.0", "policies.default.credit.name=per_step",
    "policies.default.model.lora.alpha=8.5", 'policies.default.model.lora.targets=["q_proj"]',
    "policies.default.optimizer.learning_rate=5e-4", "sampling.temperature=0.7", "train.endings.crashed=-0.5",
    'eval.modes=["eval-sampled"]', "gateway.passthrough.url=https://embeddings.example/v1",
    "workers.memory_mib=512", "rewards.short.rule=brevity", "rewards.short.limit=5", "rewards.brevity.weight=0.5",
    "buffer.name=hoarding", "credit.name=per_step", "algorithm.name=easy", "engine.pretending.cache.slots=2",
    "trackers.shouting.loud=true", "trackers.tensorboard=false", "alarms.no_contrast=false", "alarms.stall=9.5",
}  # fmt: skip
"""One of every type of value, and of every way in which a table names its plugin."""


def test_what_is_stored_is_what_was_loaded(
    loaded: Load, minimal: dict[str, Any], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "inside" / "weights").mkdir(parents=True)
    del minimal["agent"]

    first = loaded(minimal, *CHANGED)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    store_config(first.config, elsewhere)
    second = load(elsewhere / CONFIG_FILE)

    assert second.config == first.config
    assert second.folder == first.folder == folder / "inside"
    plain = first.config.model_dump(mode="json")
    assert (plain["async"]["in_flight"], plain["alarms"]["stall"]) == (40, 9.5)
    assert (plain["rewards"]["short"]["limit"], plain["tasks"]["train"]["limit"]) == (5, 77)
    assert plain["policies"]["default"]["algorithm"]["comparing"] == {"beta": 0.0, "epsilon": 0.2}


def test_it_says_every_setting_of_the_chosen_plugins(loaded: Load, minimal: dict[str, Any], tmp_path: Path) -> None:
    store_config(loaded(minimal).config, tmp_path)
    lines = (tmp_path / CONFIG_FILE).read_text().splitlines()
    assert {"beta = 0.04", "epsilon = 0.2", "slots = 4", "limit = 10", "group_size = 8"} <= set(lines)
