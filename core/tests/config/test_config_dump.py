"""Every accepted setting takes effect on the configuration, and survives load → dump → load."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from agl_core.config import CONFIG_FILE, LoadedConfig, RunConfig, load, store_config

CHANGED: dict[str, Any] = {
    "name": "another",
    "runs": "elsewhere",
    "seed": 3,
    "folder": "inside",
    "agent.entry": "other:run",
    "agent.command": "python agent.py --fast",
    "agent.attach": False,
    "tasks.held-out.source": "counting",
    "policies.second.model.path": "weights",
    "policies.default.agents": ["writer", "edit*"],
    "policies.default.algorithm.name": "easy",
    "policies.default.algorithm": {"name": "comparing", "comparing": {"beta": 0.0, "epsilon": 0.3}},
    "policies.default.credit.name": "per_step",
    "policies.default.model.path": "Qwen/Qwen2.5-0.5B",
    "policies.default.model.dtype": "bfloat16",
    "policies.default.model.trust_remote_code": True,
    "policies.default.model.lora.rank": 4,
    "policies.default.model.lora.alpha": 8.5,
    "policies.default.model.lora.targets": ["q_proj"],
    "policies.default.optimizer.learning_rate": 5e-4,
    "policies.default.optimizer.schedule": "cosine",
    "policies.default.optimizer.warmup_steps": 3,
    "policies.default.optimizer.weight_decay": 0.01,
    "policies.default.optimizer.max_grad_norm": 0.3,
    "sampling.temperature": 0.7,
    "sampling.eval_temperature": 0.6,
    "sampling.max_tokens": 64,
    "train.steps": 7,
    "train.groups_per_step": 5,
    "train.group_size": 4,
    "train.min_group_size": 3,
    "train.agents": ["solver", "plan*"],
    "train.checkpoint_every": 2,
    "train.keep_checkpoints": 9,
    "train.deterministic": True,
    "train.endings.crashed": -0.5,
    "async.max_staleness": 3,
    "async.in_flight": 40,
    "buffer.name": "hoarding",
    "eval.every": 4,
    "eval.tasks": 11,
    "eval.modes": ["eval-sampled"],
    "server.host": "localhost",
    "server.port": 8123,
    "server.otlp_port": 4317,
    "server.view_port": 8124,
    "server.lease": 30.0,
    "gateway.max_body_mib": 5,
    "gateway.passthrough.url": "https://embeddings.example/v1",
    "gateway.passthrough.api_key_env": "EMBEDDINGS_KEY",
    "workers.concurrency": 3,
    "workers.embedded": False,
    "workers.isolation": "process",
    "train.patience": 5,
    "train.serving_gap": 0.5,
    "garden.rows": 5,
    "garden.beds.herbs.flower": "rose",
    "garden.beds.rose.petals": 7,
    "workers.memory_mib": 512,
    "workers.timeout": 1.5,
    "workers.attempts": 1,
    "rewards.short.rule": "brevity",
    "rewards.brevity.weight": 0.5,
    "rewards.brevity.modes": ["use"],
    "rewards.brevity.time_limit": 5.0,
    "credit.name": "per_step",
    "algorithm.name": "easy",
    "engine.name": "rich",
    "store.name": "forgetting",
    "trackers.shouting.loud": True,
    "alarms.no_contrast": False,
    "plugins": [str(Path(__file__).with_name("fakes.py")), "mine.py"],
    # settings of plugins
    "tasks.train.limit": 77,
    "rewards.brevity.limit": 5,
    "algorithm.comparing.epsilon": 0.3,
    "algorithm.comparing.beta": 0.0,
    "engine.pretending.threads": 2,
    "engine.pretending.cache.slots": 2,
}

WITHOUT_A_SECOND_VALUE = {"config_version"}


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """Every key of a model, dotted; `*` where a table's names are free."""
    for field_name, field in model.model_fields.items():
        name, inner = field.alias or field_name, list(_models(field.annotation))
        if inner:
            star = "" if _is_model(field.annotation) else ".*"
            yield from (f"{name}{star}.{key}" for each in inner for key in keys_of(each))
        else:
            yield name


def _is_model(annotation: Any) -> bool:
    return any(
        isinstance(each, type) and issubclass(each, BaseModel) for each in (annotation, *get_args(annotation)[:1])
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def covered(key: str) -> bool:
    """Whether CHANGED has a value for a key with `*` in it, or for something inside it."""
    wanted = key.split(".")
    return any(
        len(parts := changed.split(".")) >= len(wanted)
        and all(pattern in ("*", part) for pattern, part in zip(wanted, parts, strict=False))
        for changed in CHANGED
    )


def test_every_setting_has_a_changed_value() -> None:
    missing = {key for key in keys_of(RunConfig) if not covered(key)}

    assert missing == WITHOUT_A_SECOND_VALUE


def at(config: RunConfig, dotted: str) -> Any:
    here: Any = config.model_dump(mode="json")
    for part in dotted.split("."):
        here = here.get(part) if isinstance(here, dict) else None
    return here


@pytest.mark.parametrize("key", CHANGED)
def test_a_changed_setting_survives(
    loaded: Callable[..., LoadedConfig],
    minimal: dict[str, Any],
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    key: str,
) -> None:
    (folder / "mine.py").touch()
    (folder / "inside" / "weights").mkdir(parents=True)
    before = copy.deepcopy(minimal)
    _put(minimal, key, CHANGED[key])
    if key == "credit.name":
        minimal["algorithm"]["name"] = "easy"

    first = loaded(minimal)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    store_config(first.config, elsewhere)
    second = load(elsewhere / CONFIG_FILE)

    assert second.config == first.config
    assert second.folder == first.folder
    assert at(first.config, key) == _resolved(key, first.folder)
    if key != "store.name":
        assert at(first.config, key) != at(loaded(before).config, key)


def _resolved(key: str, folder: Path) -> Any:
    """What a changed value looks like: paths stay as they are written, but for where they start."""
    return str(folder) if key == "folder" else CHANGED[key]


def _put(config: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    if dotted == "policies.second.model.path":
        config["policies"]["second"] = {"model": {"path": value}}
        return
    if dotted == "agent.command":
        del config["agent"]["entry"]
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value


def test_the_resolved_configuration_says_every_setting_of_the_chosen_plugins(
    loaded: Callable[..., LoadedConfig], minimal: dict[str, Any], tmp_path: Path
) -> None:
    store_config(loaded(minimal).config, tmp_path)
    text = (tmp_path / CONFIG_FILE).read_text()

    for line in ("beta = 0.04", "epsilon = 0.2", "slots = 4", "limit = 10", "group_size = 8", "weight_decay = 0.0"):
        assert line in text.splitlines()
