"""From a TOML file to a configuration in which every key is known, every value valid and every plugin found."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from agl_core import private
from agl_core.config.hub import HUB_NAME
from agl_core.config.models import ModelSection, PolicySection, RunConfig
from agl_core.config.overrides import apply_overrides
from agl_core.config.problems import Report
from agl_core.config.resolve import Chosen, PolicyPlan, Resolver, below
from agl_core.errors import ConfigError
from agl_core.plugins import Kind, Plugins

CONFIG_FILE = "config.toml"
"""The configuration of a run as resolved, in the run's folder."""


@dataclass(frozen=True, eq=False)
class ServerConfig:
    """A configuration as far as a server needs it."""

    config: RunConfig
    """As resolved: settings of plugins with their defaults, secrets left out, paths as they are written."""
    folder: Path
    """Where relative paths and the agent's module start; absolute."""
    plugins: Plugins
    store: Chosen


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

    `overrides` are `KEY=VALUE` texts with dotted keys; `seed` replaces the file's. ConfigError tells everything
    that is wrong, each with its place and the nearest valid names; PluginError if a plugin cannot be imported.

        loaded = load(Path("train.toml"), ["train.steps=20"], seed=1)
        tasks = loaded.tasks["train"].build(loaded.folder, loaded.config.seed)
    """
    config, report = _validated(path, overrides, seed)
    folder = _existing_folder(config, report)
    weights = _all_weights(config.policies, folder, report)
    plugins = Plugins.load(config.plugin_files)
    parts = _resolved(config, Resolver(plugins, folder, report), report)
    assert parts.store is not None
    assert parts.engine is not None
    assert parts.buffer is not None
    return LoadedConfig(
        config=parts.config,
        folder=folder,
        plugins=plugins,
        store=parts.store,
        policies=parts.policies,
        weights=weights,
        engine=parts.engine,
        buffer=parts.buffer,
        tasks=parts.tasks,
        rewards=parts.rewards,
        trackers=parts.trackers,
    )


def load_for_server(path: Path, overrides: Sequence[str] = ()) -> ServerConfig:
    """Read a run's configuration as far as a server needs it.

    Of the plugins that it names only the store has to be installed, and the weights need not be there. Settings of
    what is not installed are left out of `config`, for any of them may be a secret. ConfigError tells what is wrong.
    """
    config, report = _validated(path, overrides)
    folder = config.folder
    assert folder is not None
    plugins = Plugins.load(config.plugin_files)
    parts = _resolved(config, Resolver(plugins, folder, report, required=(Kind.STORE,)), report)
    assert parts.store is not None
    return ServerConfig(parts.config, folder, plugins, parts.store)


def load_for_scoring(path: Path, overrides: Sequence[str] = ()) -> ScoredConfig:
    """Read a run's configuration as far as rewards and credit of recorded rollouts need it.

    Engine, tasks, trackers and weights need not be there, nor plugin files unless they bring what is chosen.
    """
    config, report = _validated(path, overrides)
    folder = config.folder
    assert folder is not None
    plugins = Plugins.load([file for file in config.plugin_files if file.is_file()])
    required = (Kind.STORE, Kind.REWARD, Kind.CREDIT, Kind.ALGORITHM)
    try:
        parts = _resolved(config, Resolver(plugins, folder, report, required=required), report)
    except ConfigError as error:
        missing = ", ".join(str(file) for file in config.plugin_files if not file.is_file())
        raise ConfigError(f"{error}\n  Plugin files that are not there: {missing}.") if missing else error from None
    assert parts.store is not None
    return ScoredConfig(parts.config, folder, plugins, parts.store, parts.policies, parts.rewards)


def load_store(path: Path) -> Chosen:
    """The store of a run's configuration, for those who only read what it has.

    Plugin files are imported only if no installed plugin brings the store.
    """
    config, report = _validated(path, ())
    folder = config.folder
    assert folder is not None
    plugins = Plugins.load()
    if config.store.name not in plugins.components(Kind.STORE):
        plugins = Plugins.load(config.plugin_files)
    _, store = Resolver(plugins, folder, report, required=(Kind.STORE,)).choice(Kind.STORE, ("store",), config.store)
    report.raise_if_any()
    assert store is not None
    return store


def load_for_workers(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration as far as those who run its agent need it, with `folder` absolute.

    The plugins that it names are not looked for, nor are the weights: where agents run there need be no engine, no
    algorithm and no reward. ConfigError tells what is wrong apart from these.
    """
    config, report = _validated(path, overrides)
    _existing_folder(config, report)
    return config


def _validated(path: Path, overrides: Sequence[str], seed: int | None = None) -> tuple[RunConfig, Report]:
    data = _read(path)
    report = Report(path, apply_overrides(data, overrides))
    if seed is not None:
        data["seed"] = seed
    config = report.validated(RunConfig, data)
    report.raise_if_any()
    assert config is not None
    folder = (path.parent / (config.folder or Path()).expanduser()).resolve()
    return config.model_copy(update={"folder": folder}), report


def _existing_folder(config: RunConfig, report: Report) -> Path:
    """Where the agent is; ConfigError if that is no folder."""
    assert config.folder is not None
    if not config.folder.is_dir():
        report.add(
            ("folder",),
            f"there is no folder {config.folder}. If the run was moved away from the agent that it trains, say where "
            f"that is: --set folder=PATH.",
        )
        report.raise_if_any()
    return config.folder


def store_config(config: RunConfig, run_dir: Path) -> None:
    """Write a resolved configuration to a run's folder, whole; it loads back to the same one. Secrets are not in it.

    Paths stay as they are written, and `folder` is relative to the run's: they are found wherever both are moved.
    """
    assert config.folder is not None
    folder = Path(os.path.relpath(config.folder, run_dir.resolve()))
    data = config.model_copy(update={"folder": folder}).model_dump(mode="json", exclude_none=True)
    part = run_dir / f".{CONFIG_FILE}.part"
    private.write(part, tomli_w.dumps(data))
    os.replace(part, run_dir / CONFIG_FILE)


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
    """What each policy starts from."""
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


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a configuration chose, as far as it is installed."""

    config: RunConfig
    policies: Mapping[str, PolicyPlan]
    engine: Chosen | None
    store: Chosen | None
    buffer: Chosen | None
    tasks: Mapping[str, Chosen]
    rewards: Mapping[str, Chosen]
    trackers: Mapping[str, Chosen]


def _resolved(config: RunConfig, resolver: Resolver, report: Report) -> _Parts:
    algorithm_section, algorithm = resolver.choice(Kind.ALGORITHM, ("algorithm",), config.algorithm)
    credit_section, credit = resolver.choice(Kind.CREDIT, ("credit",), config.credit)
    policy_sections, policies = resolver.policies(config.policies, algorithm, credit)
    engine_section, engine = resolver.choice(Kind.ENGINE, ("engine",), config.engine)
    store_section, store = resolver.choice(Kind.STORE, ("store",), config.store)
    buffer_section, buffer = resolver.choice(Kind.BUFFER, ("buffer",), config.buffer)
    task_sections, tasks = resolver.tasks(config.tasks)
    reward_sections, rewards = resolver.rewards(config.rewards)
    tracker_sections, trackers = resolver.trackers(config.trackers)
    report.raise_if_any()
    resolved = config.model_copy(
        update={
            "algorithm": algorithm_section,
            "credit": credit_section,
            "policies": policy_sections,
            "engine": engine_section,
            "store": store_section,
            "buffer": buffer_section,
            "tasks": task_sections,
            "rewards": reward_sections,
            "trackers": tracker_sections,
        }
    )
    return _Parts(resolved, policies, engine, store, buffer, tasks, rewards, trackers)
