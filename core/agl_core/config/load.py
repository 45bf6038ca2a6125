"""From a TOML file to a configuration in which every key is known, every value valid and every plugin found."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import tomli_w

from agl_core import kinds, private
from agl_core.config.models import RunConfig, UntrainedConfig
from agl_core.config.policies import ModelSection, PolicySection
from agl_core.config.problems import Report
from agl_core.config.resolve import Chosen, PolicyPlan, below, resolve, resolve_store
from agl_core.config.sections import HUB_NAME
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins

CONFIG_FILE = "config.toml"
"""The configuration of a run as resolved, in the run's folder."""

Key: TypeAlias = tuple[str, ...]
"""A dotted key, as its parts."""


@dataclass(frozen=True, eq=False)
class ServerConfig:
    """A configuration as far as a server needs it."""

    config: RunConfig
    """As resolved: settings of plugins with their defaults, secrets left out, paths as they are written."""
    folder: Path
    """Where relative paths and the agent's module start; absolute."""
    plugins: Plugins
    store: Chosen
    sections: Mapping[str, Chosen]
    """Tables of plugins, by name."""


@dataclass(frozen=True, eq=False)
class PolicyConfig:
    """A configuration as far as the policies that a run trained need it."""

    config: RunConfig
    folder: Path
    """Where relative paths start; absolute."""
    plugins: Plugins
    engine: Chosen | None
    """None: it is not installed here."""

    def weights(self, policy: str) -> str:
        """What a policy started from: a folder, absolute, or a hub name. ConfigError if that folder is gone."""
        model = self.config.policies[policy].model
        found = _weights(model, self.folder)
        if found is None:
            raise ConfigError(
                f"The weights that the policy '{policy}' started from are gone: there is no folder "
                f"{below(self.folder, Path(model.path))}. Put them back, or say where they are: "
                f"--set policies.{policy}.model.path=FOLDER."
            )
        return found


@dataclass(frozen=True, eq=False)
class ScoredConfig(ServerConfig):
    """A configuration as far as rewards and credit of recorded rollouts need it."""

    policies: Mapping[str, PolicyPlan]
    """How each policy learns."""
    rewards: Mapping[str, Chosen]
    """By the name of the table, which need not be the rule's."""


@dataclass(frozen=True, eq=False)
class LoadedConfig(ScoredConfig):
    """A configuration, read and resolved."""

    weights: Mapping[str, str]
    """What each policy starts from: a folder, absolute, or a hub name."""
    engine: Chosen
    buffer: Chosen
    tasks: Mapping[str, Chosen]
    """By the name of the set."""
    trackers: Mapping[str, Chosen]


def load(path: Path, overrides: Sequence[str] = (), seed: int | None = None) -> LoadedConfig:
    """Read a run's configuration.

    `overrides` are `KEY=VALUE` texts with dotted keys; `seed` replaces the file's. ConfigError lists everything
    that is wrong, each with its place and the nearest valid names; PluginError if a plugin cannot be imported.

        loaded = load(Path("train.toml"), ["train.steps=20"], seed=1)
        tasks = loaded.tasks["train"].build(loaded.folder, loaded.config.seed)
    """
    config, folder, report = _validated(path, overrides, seed)
    if isinstance(config, UntrainedConfig):
        raise ConfigError(
            f"{path} has nothing to train: add [tasks.train], [policies] and what else `agl init` writes."
        )
    _check_folder(folder, report)
    weights = _all_weights(config.policies, folder, report)
    plugins = Plugins.load(config.plugin_files)
    config, chosen = resolve(config, plugins, folder, report)
    return LoadedConfig(config=config, folder=folder, plugins=plugins, weights=weights, **_only(LoadedConfig, chosen))


def load_for_server(path: Path, overrides: Sequence[str] = ()) -> ServerConfig:
    """Read a run's configuration as far as a server needs it.

    Of the plugins that it names only the store and those of its sections have to be installed, and the weights need not
    be there. Settings of what is not installed are left out of `config`: any of them may be a secret. ConfigError says
    what is wrong.
    """
    config, folder, report = _validated(path, overrides)
    plugins = Plugins.load(config.plugin_files)
    config, chosen = resolve(config, plugins, folder, report, (kinds.STORE, kinds.SECTION))
    return ServerConfig(config=config, folder=folder, plugins=plugins, **_only(ServerConfig, chosen))


def load_for_scoring(path: Path, overrides: Sequence[str] = ()) -> ScoredConfig:
    """Read a run's configuration as far as rewards and credit of recorded rollouts need it.

    Engine, tasks, trackers and weights need not be there, nor plugin files unless they bring what is chosen. Those that
    are there are imported: for configurations that the user trusts.
    """
    config, folder, report = _validated(path, overrides)
    missing = ", ".join(str(file) for file in config.plugin_files if not file.is_file())
    plugins = Plugins.load([file for file in config.plugin_files if file.is_file()])
    required = (kinds.STORE, kinds.REWARD, kinds.CREDIT, kinds.ALGORITHM)
    try:
        config, chosen = resolve(config, plugins, folder, report, required)
    except ConfigError as error:
        raise ConfigError(f"{error}\n  Plugin files that are not there: {missing}.") if missing else error from None
    return ScoredConfig(config=config, folder=folder, plugins=plugins, **_only(ScoredConfig, chosen))


def load_for_policies(path: Path, overrides: Sequence[str] = (), plugins: Plugins | None = None) -> PolicyConfig:
    """Read a run's configuration as far as the policies that it trained need it.

    No plugin has to be installed, and no plugin file is imported; `plugins` are those that the run itself has loaded.
    """
    config, folder, report = _validated(path, overrides)
    plugins = plugins or Plugins.load()
    config, chosen = resolve(config, plugins, folder, report, ())
    return PolicyConfig(config, folder, plugins, chosen["engine"])


def load_store(path: Path) -> Chosen:
    """The store of a run's configuration, for those who only read what it has.

    No plugin file is imported: the run may be somebody else's. ConfigError if no installed plugin brings the store.
    """
    config, folder, report = _validated(path, ())
    plugins = Plugins.load()
    if config.store.name not in plugins.components(kinds.STORE) and config.plugins:
        report.add(
            ("store", "name"),
            f"no installed plugin brings the store '{config.store.name}'. Looking at a run does not run the plugin "
            f"files that it names: it may be somebody else's. If you trust them, install them as a package.",
        )
    report.raise_if_any()
    return resolve_store(config, plugins, folder, report)


def _only(model: type[ServerConfig], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The parts among the chosen ones that such a configuration has."""
    return {each.name: chosen[each.name] for each in fields(model) if each.name in chosen}


def read_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration, with `folder` absolute; none of what it names is looked for or imported."""
    return _validated(path, overrides)[0]


def load_for_workers(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration as far as those who run its agent need it, with `folder` absolute.

    The plugins that it names are not looked for, nor are the weights: where agents run there need be no engine, no
    algorithm and no reward. ConfigError says what is wrong apart from these.
    """
    config, folder, report = _validated(path, overrides)
    _check_folder(folder, report)
    return config


def _validated(path: Path, overrides: Sequence[str], seed: int | None = None) -> tuple[RunConfig, Path, Report]:
    """The configuration with its `folder` absolute, that folder, and where to report what else is wrong."""
    data = _read(path)
    report = Report(path, apply_overrides(data, overrides))
    if seed is not None:
        data["seed"] = seed
    # What is for a plugin alone needs no tasks and no model; with either of them, it is to be trained too.
    names = {field.alias or name for name, field in RunConfig.model_fields.items()}
    is_plugins = bool(data.keys() - names) and not {"tasks", "policies"} & data.keys()
    config = report.validated(UntrainedConfig if is_plugins else RunConfig, data)
    report.raise_if_any()
    assert config is not None
    folder = (path.parent / (config.folder or Path()).expanduser()).resolve()
    return config.model_copy(update={"folder": folder}), folder, report


def _check_folder(folder: Path, report: Report) -> None:
    """ConfigError if the agent's folder is not there."""
    if not folder.is_dir():
        report.add(
            ("folder",),
            f"there is no folder {folder}. If the run was moved away from the agent that it trains, say where that is: "
            f"--set folder=PATH.",
        )
        report.raise_if_any()


def store_config(config: RunConfig, run_dir: Path) -> None:
    """Write a resolved configuration to a run's folder, whole; it loads back to the same one. Secrets are not in it.

    Paths stay as they are written, and `folder` is relative to the run's: they are found wherever both are moved.
    """
    assert config.folder is not None
    folder = Path(os.path.relpath(config.folder, run_dir.resolve()))
    left_out = {"tasks", "policies"} if isinstance(config, UntrainedConfig) else None
    data = config.model_copy(update={"folder": folder}).model_dump(mode="json", exclude_none=True, exclude=left_out)
    private.replace(run_dir / CONFIG_FILE, tomli_w.dumps(data))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The configuration {path} does not exist (looked in {Path.cwd()}).") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _all_weights(policies: Mapping[str, PolicySection], folder: Path, report: Report) -> dict[str, str]:
    found = {}
    for name, policy in policies.items():
        weights = _weights(policy.model, folder)
        if weights is not None:
            found[name] = weights
            continue
        report.add(
            ("policies", name, "model", "path"),
            f"there is no folder {below(folder, Path(policy.model.path))}, and '{policy.model.path}' is not a "
            f"hub name like 'Qwen/Qwen2.5-0.5B-Instruct'.",
        )
    return found


def _weights(model: ModelSection, folder: Path) -> str | None:
    local = below(folder, Path(model.path))
    if local.is_dir():
        return str(local)
    return model.path if HUB_NAME.fullmatch(model.path) and not local.exists() else None


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> set[Key]:
    """Change `data` in place by `KEY=VALUE` texts; returns the keys that were set.

    A key is dotted. A value is a TOML value, or else a plain string. A name in a key needs quotes only if it has a dot.

    >>> data = {"train": {"steps": 100}}
    >>> sorted(apply_overrides(data, ["train.steps=5", "model.path=Qwen/Qwen2.5-0.5B"]))
    [('model', 'path'), ('train', 'steps')]
    >>> data
    {'train': {'steps': 5}, 'model': {'path': 'Qwen/Qwen2.5-0.5B'}}
    """
    return {_apply(data, override) for override in overrides}


def _apply(data: dict[str, Any], override: str) -> Key:
    written, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: must be KEY=VALUE, for instance --set train.steps=20.")
    key = _parse_key(written, override)
    table = data
    for depth, part in enumerate(key[:-1], start=1):
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: '{'.'.join(key[:depth])}' is a value, not a table with keys.")
    table[key[-1]] = _parse_value(value.strip(), override)
    return key


def _parse_key(written: str, override: str) -> Key:
    try:
        parsed: Any = tomllib.loads(f"{written} = 0")
    except tomllib.TOMLDecodeError:
        names = written.strip().split(".")
        if all(names) and not set(written.strip()) & set("\"' \t\n[]{}#"):
            return tuple(names)  # Of names that TOML wants in quotes, which a shell would take away: reinforce++.
        raise ConfigError(f"--set {override}: '{written}' is not a dotted key, for instance train.steps.") from None
    parts: list[str] = []
    while isinstance(parsed, dict):
        if len(parsed) != 1:
            raise ConfigError(f"--set {override}: sets more than one key; write one --set for each.")
        [(part, parsed)] = parsed.items()
        parts.append(part)
    return tuple(parts)


def _parse_value(value: str, override: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if value[:1] in ("[", "{", '"', "'"):
            raise ConfigError(f"--set {override}: the value is not valid TOML ({error}).") from None
        return value
    if parsed.keys() != {"value"}:
        raise ConfigError(f"--set {override}: sets more than one key; write one --set for each.")
    return parsed["value"]
