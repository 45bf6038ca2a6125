"""From a TOML file to a configuration in which every key is known, every value valid and every plugin found."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from agl_core.config.models import ModelSection, PolicySection, RunConfig
from agl_core.config.overrides import apply_overrides
from agl_core.config.problems import Report
from agl_core.config.resolve import Chosen, PolicyPlan, Resolver, below
from agl_core.errors import ConfigError
from agl_core.plugins import Kind, Plugins

CONFIG_FILE = "config.toml"
"""The configuration of a run as resolved, in the run's folder."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True, eq=False)
class ServedConfig:
    """A configuration as far as a server needs it, and those who look at what that stored."""

    config: RunConfig
    """As resolved: settings of plugins with their defaults, paths absolute, secrets left out."""
    folder: Path
    """Where relative paths and the agent's module start; absolute."""
    plugins: Plugins
    store: Chosen


@dataclass(frozen=True, eq=False)
class LoadedConfig(ServedConfig):
    """A configuration, read and resolved."""

    policies: Mapping[str, PolicyPlan]
    """How each policy learns."""
    engine: Chosen
    buffer: Chosen
    tasks: Mapping[str, Chosen]
    """By the name of the set."""
    rewards: Mapping[str, Chosen]
    """By the name of the table, which need not be the rule's."""
    trackers: Mapping[str, Chosen]


def load(path: Path, overrides: Sequence[str] = (), seed: int | None = None) -> LoadedConfig:
    """Read a run's configuration.

    `overrides` are `KEY=VALUE` texts with dotted keys; `seed` replaces the file's. ConfigError tells everything
    that is wrong, each with its place and the nearest valid names; PluginError if a plugin cannot be imported.

        loaded = load(Path("train.toml"), ["train.steps=20"], seed=1)
        tasks = loaded.tasks["train"].build(loaded.folder, loaded.config.seed)
    """
    config, report = _validated(path, overrides, seed)
    folder = config.folder
    assert folder is not None
    config = config.model_copy(update={"policies": _policies(config.policies, folder, report)})
    plugins = Plugins.load(config.plugins)
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
        engine=parts.engine,
        buffer=parts.buffer,
        tasks=parts.tasks,
        rewards=parts.rewards,
        trackers=parts.trackers,
    )


def load_for_server(path: Path, overrides: Sequence[str] = ()) -> ServedConfig:
    """Read a run's configuration as far as a server needs it, and those who look at what that stored.

    Of the plugins that it names only the store has to be installed, and the weights need not be there. Settings of
    what is not installed are left out of `config`, for any of them may be a secret. ConfigError tells what is wrong.
    """
    config, report = _validated(path, overrides)
    folder = config.folder
    assert folder is not None
    plugins = Plugins.load(config.plugins)
    parts = _resolved(config, Resolver(plugins, folder, report, required=(Kind.STORE,)), report)
    assert parts.store is not None
    return ServedConfig(parts.config, folder, plugins, parts.store)


def load_for_workers(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's configuration as far as those who run its agent need it, with `folder` and `plugins` absolute.

    The plugins that it names are not looked for, nor are the weights: where agents run there need be no engine, no
    algorithm and no reward. ConfigError tells what is wrong apart from these.
    """
    return _validated(path, overrides)[0]


def _validated(path: Path, overrides: Sequence[str], seed: int | None = None) -> tuple[RunConfig, Report]:
    data = _read(path)
    report = Report(path, apply_overrides(data, overrides))
    if seed is not None:
        data["seed"] = seed
    config = report.validated(RunConfig, data)
    report.raise_if_any()
    assert config is not None
    folder = (path.parent / (config.folder or Path()).expanduser()).resolve()
    plugins = tuple(below(folder, file) for file in config.plugins)
    return config.model_copy(update={"folder": folder, "plugins": plugins}), report


def dump(config: RunConfig) -> str:
    """A resolved configuration as TOML, which loads back to the same one, from any folder. Secrets are not in it."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"The configuration {path} does not exist (looked in {Path.cwd()}).") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The configuration {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _policies(policies: Mapping[str, PolicySection], folder: Path, report: Report) -> dict[str, PolicySection]:
    """The policies with absolute paths to the weights that are folders here."""
    resolved = {}
    for name, policy in policies.items():
        found = _weights(policy.model, folder)
        if found is None:
            report.add(
                ("policies", name, "model", "path"),
                f"there is no folder {below(folder, Path(policy.model.path))}, and '{policy.model.path}' is not a "
                f"hub name like 'Qwen/Qwen2.5-0.5B-Instruct'.",
            )
            continue
        resolved[name] = policy.model_copy(update={"model": policy.model.model_copy(update={"path": found})})
    return resolved


def _weights(model: ModelSection, folder: Path) -> str | None:
    local = below(folder, Path(model.path))
    if local.is_dir():
        return str(local)
    return model.path if _HUB_NAME.fullmatch(model.path) and not local.exists() else None


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
    tracker_sections, trackers = resolver.trackers(config.trackers, must_exist="trackers" in config.model_fields_set)
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
