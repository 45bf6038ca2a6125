"""From a TOML file to a configuration in which every key is known, every value valid and every plugin found."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from agl_core import kinds, private
from agl_core.config.check import check
from agl_core.config.models import RunConfig, UntrainedConfig
from agl_core.config.resolve import LoadedConfig as LoadedConfig
from agl_core.config.resolve import Place, Problems, below, resolve
from agl_core.config.sections import PluginChoice
from agl_core.errors import ConfigError
from agl_core.kinds import Kind
from agl_core.plugins import Plugins

CONFIG_FILE = "config.toml"
"""The configuration of a run as resolved, in the run's folder."""
STORED: tuple[Kind, ...] = (kinds.STORE,)
"""Needed to read a run's records."""
SERVED: tuple[Kind, ...] = (kinds.STORE, kinds.CONFIG_TABLE)
"""Needed by a server without training."""
SCORED: tuple[Kind, ...] = (kinds.STORE, kinds.REWARD, kinds.CREDIT, kinds.ALGORITHM)
"""Needed for rewards and credit of recorded rollouts."""

_CHOICES = {name for name, field in RunConfig.model_fields.items() if field.annotation is PluginChoice}


def load(
    path: Path,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    needs: Collection[Kind] = kinds.KINDS,
    plugins: Plugins | None = None,
) -> LoadedConfig:
    """Read a run's configuration.

    `overrides` are `KEY=VALUE` texts with dotted keys; `seed` replaces the file's. ConfigError lists everything that is
    wrong, each with its place and the nearest valid names; PluginError if a plugin cannot be imported; CapabilityError
    if the parts do not go together.

    With fewer kinds in `needs`, components of other kinds, weights and the agent's folder may be missing. Plugin files
    are imported, so the user has to trust the configuration, unless `plugins` are given.
    """
    is_whole = needs is kinds.KINDS
    config, report = _validated(path, overrides, seed, runs_agent=is_whole)
    if is_whole and isinstance(config, UntrainedConfig):
        raise ConfigError(
            f"{path} has nothing to train: add [tasks.train], [policies] and what else `agl init` writes."
        )
    files = [file for file in config.plugin_files if is_whole or file.is_file()]
    if plugins is None:
        plugins = Plugins.load(files)
        if missing := ", ".join(str(file) for file in config.plugin_files if file not in files):
            report.hint = f"Plugin files that are not there: {missing}."
    elif config.plugins:
        report.hint = (
            "Looking at a run does not run the plugin files that it names: it may be somebody else's. If you trust "
            "them, install them as a package."
        )
    loaded = resolve(config, plugins, report, needs)
    for policy in config.policies if is_whole else ():
        try:
            loaded.weights(policy)
        except ConfigError as error:
            report.add(("policies", policy, "model", "path"), str(error).partition("path: ")[2])
    report.raise_if_any()
    if kinds.ALGORITHM in needs:
        check(loaded)
    return loaded


def read_config(path: Path, overrides: Sequence[str] = (), *, runs_agent: bool = False) -> RunConfig:
    """Read a run's configuration without its plugins, with `folder` absolute; if it `runs_agent`, that has to exist."""
    return _validated(path, overrides, runs_agent=runs_agent)[0]


def _validated(
    path: Path, overrides: Sequence[str], seed: int | None = None, *, runs_agent: bool
) -> tuple[RunConfig, Problems]:
    data = _read(path)
    report = Problems(path, apply_overrides(data, overrides))
    if seed is not None:
        data["seed"] = seed
    if isinstance(file := data.get("prompts"), str):
        folder = path.parent / Path(data.get("folder", "")).expanduser()
        data["prompts"] = _read(below(folder, Path(file))).get("prompts", {})
    # A file for a plugin alone needs no tasks or no model; one with both is to be trained too.
    names = {field.alias or name for name, field in RunConfig.model_fields.items()}
    is_plugins = bool(data.keys() - names) and not {"tasks", "policies"} <= data.keys()
    config = report.validated(UntrainedConfig if is_plugins else RunConfig, data)
    report.raise_if_any()
    assert config is not None
    folder = below(path.parent, config.folder)
    if runs_agent and not folder.is_dir():
        report.add(
            ("folder",),
            f"there is no folder {folder}. If the run was moved away from the agent that it trains, say where that is: "
            f"--set folder=PATH.",
        )
        report.raise_if_any()
    return config.model_copy(update={"folder": folder}), report


def store_config(config: RunConfig, run_dir: Path) -> None:
    """Write a resolved configuration, without secrets, to a run's folder; it loads back to the same one.

    Paths stay as they are written, and `folder` is relative to the run's, so that both may be moved.
    """
    folder = Path(os.path.relpath(config.folder, run_dir.resolve()))
    private.replace(run_dir / CONFIG_FILE, tomli_w.dumps(config.model_copy(update={"folder": folder}).as_file()))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The configuration {path} does not exist (looked in {Path.cwd()}).") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> set[Place]:
    """Change `data` in place by `KEY=VALUE` texts; returns the keys that were set.

    Keys are dotted; a name in one needs quotes only if it has a dot. A value that is no TOML is a plain string.

    >>> data = {"train": {"steps": 100}}
    >>> sorted(apply_overrides(data, ["train.steps=5", "model.path=Qwen/Qwen2.5-0.5B"]))
    [('model', 'path'), ('train', 'steps')]
    >>> data
    {'train': {'steps': 5}, 'model': {'path': 'Qwen/Qwen2.5-0.5B'}}
    """
    return {_apply(data, override) for override in overrides}


def _apply(data: dict[str, Any], override: str) -> Place:
    written, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: must be KEY=VALUE, for instance --set train.steps=20.")
    # TOML wants a name like reinforce++ in quotes, which a shell would take away.
    dotted = written if "'" in written or '"' in written else ".".join(map('"{}"'.format, written.strip().split(".")))
    try:
        parsed: Any = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"--set {override}: '{written}' is not a dotted key, for instance train.steps.") from None
    key: list[str] = []
    while isinstance(parsed, dict):
        [(part, parsed)] = parsed.items()
        key.append(part)
    if key[-1] in _CHOICES and (len(key) == 1 or key[0] == "policies") and not value.strip().startswith("{"):
        key.append("name")  # The table keeps the settings of plugins.
    table = data
    for depth, part in enumerate(key[:-1], start=1):
        if part in _CHOICES and isinstance(table.get(part), str):
            table[part] = {"name": table[part]}
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: '{'.'.join(key[:depth])}' is a value, not a table with keys.")
    try:
        table[key[-1]] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if value.strip()[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"--set {override}: the value is not valid TOML ({error}).") from None
        table[key[-1]] = value.strip()
    return tuple(key)
