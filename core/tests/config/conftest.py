"""A plugin file with one small component of every kind that a configuration chooses, and a configuration using it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import tomli_w

from agl_core.config.load import LoadedConfig, load

PLUGIN_FILE = Path(__file__).with_name("fakes.py")

MINIMAL: dict[str, Any] = {
    "config_version": 1,
    "plugins": [str(PLUGIN_FILE)],
    "agent": {"entry": "my_agent:solve"},
    "tasks": {"train": {"source": "counting"}},
    "policies": {"default": {"model": {"path": "weights"}}},
    "credit": {"name": "whole"},
    "algorithm": {"name": "comparing"},
    "engine": {"name": "pretending"},
    "store": {"name": "forgetting"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the configuration, with the weights it names."""
    (tmp_path / "weights").mkdir()
    return tmp_path


@pytest.fixture
def loaded(folder: Path) -> Callable[..., LoadedConfig]:
    """Writes a configuration to `train.toml` and loads it: the minimal one with changes, by dotted keys, or a text.

    A key whose value is None is taken out.
    """

    def write_and_load(
        changes: Mapping[str, Any] | str = MappingProxyType({}), *overrides: str, seed: int | None = None
    ) -> LoadedConfig:
        file = folder / "train.toml"
        file.write_text(changes if isinstance(changes, str) else tomli_w.dumps(changed(changes)))
        return load(file, overrides, seed)

    return write_and_load


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(MINIMAL)
    for dotted, value in changes.items():
        *parents, key = dotted.split(".")
        table = config
        for parent in parents:
            table = table.setdefault(parent, {})
        if value is None:
            del table[key]
        else:
            table[key] = value
    return config
