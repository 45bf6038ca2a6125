"""From a TOML file to a configuration in which every key is known, every value valid and every plugin found."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import tomli_w

from agl_core import kinds, private
from agl_core.config.check import check
from agl_core.config.models import RunConfig, UntrainedConfig
from agl_core.config.resolve import Chosen, PolicyPlan, Problems, below, resolve
from agl_core.config.sections import HUB_NAME
from agl_core.errors import ConfigError
from agl_core.kinds import Capability, Kind
from agl_core.plugins import Plugins

CONFIG_FILE = "config.toml"
"""The configuration of a run as resolved, in the run's folder."""
STORED: tuple[Kind, ...] = (kinds.STORE,)
"""Needed to read a run's records."""
SERVED: tuple[Kind, ...] = (kinds.STORE, kinds.SECTION)
"""Needed by a server without training."""
SCORED: tuple[Kind, ...] = (kinds.STORE, kinds.REWARD, kinds.CREDIT, kinds.ALGORITHM)
"""Needed for rewards and credit of recorded rollouts."""

Key: TypeAlias = tuple[str, ...]
"""A dotted key, as its parts."""


@dataclass(frozen=True, eq=False)
class LoadedConfig:
    """A configuration, read and resolved, with the components that it chose.

    One that was loaded for a part of a run alone may lack the others: their tables are empty, and asking for the
    `engine`, `store` or `buffer` is a ConfigError.
    """

    config: RunConfig
    """As resolved: settings of plugins with their defaults, secrets left out, paths as they are written; `folder`,
    where these start, is absolute."""
    plugins: Plugins
    is_whole: bool
    """True if everything that it names was needed."""
    single: Mapping[str, Chosen | None]
    """Of the kinds of which a run has one, by the name of their table."""
    policies: Mapping[str, PolicyPlan]
    """How each policy learns."""
    tasks: Mapping[str, Chosen]
    """By the name of the set."""
    rewards: Mapping[str, Chosen]
    """By the name of the table, which need not be the rule's."""
    trackers: Mapping[str, Chosen]
    sections: Mapping[str, Chosen]
    """Tables of plugins, by name."""

    @property
    def engine(self) -> Chosen:
        return self._one(kinds.ENGINE)

    @property
    def store(self) -> Chosen:
        return self._one(kinds.STORE)

    @property
    def buffer(self) -> Chosen:
        return self._one(kinds.BUFFER)

    def _one(self, kind: Kind) -> Chosen:
        chosen = self.single[kind]
        if chosen is None:
            raise ConfigError(f"[{kind}] name: {self.plugins.unknown(kind, getattr(self.config, kind).name)}")
        return chosen

    @property
    def imitates(self) -> bool:
        """True if all policies imitate recorded replies, of which rewards and log-probabilities mean nothing."""
        return all(Capability.DEMONSTRATIONS in plan.algorithm.needs for plan in self.policies.values())

    @property
    def trains_on_texts(self) -> bool:
        """True if no policy's algorithm asks with which log-probabilities a recorded reply was sampled."""
        return all(Capability.RECORDED_TEXTS in plan.algorithm.component.provides for plan in self.policies.values())

    @property
    def is_rewarded(self) -> bool:
        """True if the algorithm of a policy looks at credited values; otherwise rewards mean nothing to training."""
        return any(plan.algorithm.takes is not None for plan in self.policies.values())

    def weights(self, policy: str) -> str:
        """The initial weights of a policy: an absolute folder, or a hub name. ConfigError if that folder is gone."""
        path = self.config.policies[policy].model.path
        local = below(self.config.folder, Path(path))
        if local.is_dir():
            return str(local)
        if not HUB_NAME.fullmatch(path) or local.exists():
            raise ConfigError(
                f"[policies.{policy}.model] path: there is no folder {local}, and '{path}' is not a hub name like "
                f"'Qwen/Qwen2.5-0.5B-Instruct'. If the weights were moved, say where they are: "
                f"--set policies.{policy}.model.path=FOLDER."
            )
        return path


def load(
    path: Path,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    *,
    needs: Collection[Kind] = kinds.KINDS,
    plugins: Plugins | None = None,
) -> LoadedConfig:
    """Read a run's configuration.

    `overrides` are `KEY=VALUE` texts with dotted keys; `seed` replaces the file's. ConfigError lists everything
    that is wrong, each with its place and the nearest valid names; PluginError if a plugin cannot be imported;
    CapabilityError if the parts do not go together.

    With fewer kinds in `needs`, what other kinds lack is no error (nor that weights, or the agent's folder, are gone):
    that component is missing. Plugin files that are there are imported, unless `plugins` are given: for configurations
    that the user trusts.

        loaded = load(Path("train.toml"), ["train.steps=20"], seed=1)
        tasks = loaded.tasks["train"].build(loaded.config.folder, loaded.config.seed)
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
    resolved, chosen = resolve(config, plugins, report, needs)
    loaded = LoadedConfig(resolved, plugins, is_whole, **chosen)
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
    """Read a run's configuration, with `folder` absolute; none of the plugins that it names is looked for or imported.

    It is all that those need who run its agent, whose folder has to be there.
    """
    return _validated(path, overrides, runs_agent=runs_agent)[0]


def _validated(
    path: Path, overrides: Sequence[str], seed: int | None = None, *, runs_agent: bool
) -> tuple[RunConfig, Problems]:
    """The configuration with `folder` absolute, which has to be there if the agent runs, and its report of problems."""
    data = _read(path)
    report = Problems(path, apply_overrides(data, overrides))
    if seed is not None:
        data["seed"] = seed
    if isinstance(file := data.get("prompts"), str):
        folder = path.parent / Path(data.get("folder", "")).expanduser()
        data["prompts"] = _read(below(folder, Path(file))).get("prompts", {})
    # What is for a plugin alone needs no tasks or no model; with both, it is to be trained too.
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
    """Write a resolved configuration to a run's folder, whole; it loads back to the same one. Secrets are not in it.

    Paths stay as they are written, and `folder` is relative to the run's: they are found wherever both are moved.
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
    table = data
    for depth, part in enumerate(key[:-1], start=1):
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
