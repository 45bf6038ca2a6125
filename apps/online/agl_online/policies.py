"""Versions of policies by name: what an engine loads of them, and exporting them.

Names are `calc@40`, `calc@latest`, `calc@best` and `calc@stable`. The first part is the run's folder: a path, or a
name below ./runs. In a run with several policies the policy's name follows after a colon: `debate:solver@40`. Step 0 is
what training started from.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import orjson

from agl_core import kinds
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load
from agl_core.config.sections import HUB_NAME
from agl_core.errors import ConfigError
from agl_core.kinds import Capability
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, EngineContext, PolicySpec
from agl_core.reading.runs import find_run, policy_names
from agl_core.reading.words import one_line
from agl_core.training.checkpoints import CHECKPOINTS, Checkpoints, RunState, read_state

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class Version:
    """One set of weights that a run made, or, with step 0, started from."""

    run: Path
    policy: str
    step: int
    checkpoint: Path | None
    """None: what training started from."""

    @classmethod
    def find(cls, text: str) -> Version:
        """The version that a name means now; without `@` the latest. An AglError says if there is none."""
        name, at, which = text.rpartition("@")
        run, policy = find_policy(name if at else text)
        checkpoint = Checkpoints(run / CHECKPOINTS, keep=1).meant_by(which if at else "latest")
        return cls(run, policy, 0 if checkpoint is None else read_state(checkpoint).step, checkpoint)

    def __str__(self) -> str:
        return f"{name_of(self.run, self.policy)}@{self.step}"

    @property
    def saved(self) -> Path | None:
        """The folder with the weights as transformers, or peft for an adapter, loads them."""
        return None if self.checkpoint is None else self.checkpoint / self.policy / "model"

    @property
    def is_adapter(self) -> bool:
        """Whether what was saved is an adapter of other weights."""
        return self.saved is not None and (self.saved / _ADAPTER).is_file()


def find_policy(name: str) -> tuple[Path, str]:
    """The run's folder, and its policy, that a name without a version means. ConfigError if there is none."""
    before, _, policy = name.rpartition(":")
    run = find_run(Path(before or name))
    known = policy_names(run)
    if before and policy in known:
        return run, policy
    if before or len(known) != 1:
        raise ConfigError(
            f"'{name}' names no policy of {run}. It trains {', '.join(known) or 'none: it is a recording'}; of "
            f"several, one is named as {run.name}:POLICY."
        )
    return run, known[0]


def name_of(run: Path, policy: str) -> str:
    """What a policy is called: its run's name, and after a colon its own where the run has several."""
    name = run.resolve().name
    return name if len(policy_names(run)) == 1 else f"{name}:{policy}"


@dataclass(frozen=True, eq=False)
class Source:
    """The run that a version comes from, as far as its policies need it."""

    loaded: LoadedConfig

    @classmethod
    def of(cls, run: Path, overrides: Sequence[str] = (), plugins: Plugins | None = None) -> Source:
        """Read the run's configuration, with `KEY=VALUE` texts that override it."""
        return cls(load(run / CONFIG_FILE, overrides, needs=(), plugins=plugins or Plugins.load()))

    def spec(self, version: Version) -> PolicySpec:
        """What to load. ConfigError if the weights below an adapter are gone."""
        model = self.loaded.config.policies[version.policy].model
        saved, adapter = version.saved, None
        if saved is None or version.is_adapter:
            weights = self.loaded.weights(version.policy)
            adapter = None if saved is None else str(saved.resolve())
        else:
            weights = str(saved.resolve())
        return PolicySpec(
            weights, model.dtype, model.trust_remote_code, name=model.path, adapter=adapter, version=version.step
        )

    def engine(self, folder: Path) -> Engine:
        """An engine without policies: the run's, else any that is installed. ConfigError if none serves policies.

        `folder` is for its log.
        """
        chosen = self.loaded.single["engine"]
        if chosen is not None and Capability.POLICIES in chosen.component.provides:
            build, options = chosen.component.build, chosen.options
        else:
            known = self.loaded.plugins.components(kinds.ENGINE).values()
            found = next((component for component in known if Capability.POLICIES in component.provides), None)
            if found is None:
                raise ConfigError("No engine is installed here that serves policies without a run. Install agl-torch.")
            own: Any = self.loaded.config.engine.tables.get(found.name, {})
            build, options = found.build, found.options.model_validate(own)
        context = EngineContext(folder, self.loaded.config.seed, {}, False, (), api_key=os.urandom(16).hex())
        engine: Engine = build(options, context)
        return engine


def export(version: Version, folder: Path, overrides: Sequence[str] = ()) -> None:
    """Write a version as it was saved: all weights, or its adapter, which names its base as it is found here.

    The folder appears whole or not at all. ConfigError if it exists, if the weights below an adapter are gone, or for
    step 0.
    """
    if version.saved is None or version.checkpoint is None:
        raise ConfigError(f"{version} is what training started from, which nothing has to be written of.")
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists. Remove it, or name another folder with --out.")
    loaded = Source.of(version.run, overrides).loaded
    base = loaded.weights(version.policy) if version.is_adapter else None
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        shutil.copytree(version.saved, part, copy_function=shutil.copyfile)
        if base is not None:
            described = orjson.loads((part / _ADAPTER).read_bytes()) | {"base_model_name_or_path": base}
            (part / _ADAPTER).write_bytes(orjson.dumps(described, option=orjson.OPT_INDENT_2))
        (part / "README.md").write_text(_model_card(version, read_state(version.checkpoint), loaded), encoding="utf-8")
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _model_card(version: Version, state: RunState, loaded: LoadedConfig) -> str:
    """The folder's README.md, with the front matter that the Hugging Face hub reads."""
    base = loaded.config.policies[version.policy].model.path
    is_public = HUB_NAME.fullmatch(base) is not None and not Path(base).exists()
    front = [f"base_model: {base}"] if is_public else []
    front += [f"library_name: {'peft' if version.is_adapter else 'transformers'}", "pipeline_tag: text-generation"]
    what = "A LoRA adapter: it needs its base model." if version.is_adapter else "All weights."
    lines = [
        *("---", *front, "tags:", "- agl", "- reinforcement-learning", "---", ""),
        *(f"# {version}", ""),
        f"{what} agl {installed('agl-core')} trained it by reinforcement learning, in the run "
        f"`{version.run.resolve().name}`. The licence of the base model is that of the base model's own card.",
        *("", "| | |", "|---|---|"),
        f"| base model | {_cell(base if is_public else Path(base).name)} |",
        *(f"| {key} | {_cell(value)} |" for key, value in _facts(version, state.config)),
        *("", "The mean reward on tasks held out from training; *before* is that of the base model.", ""),
        *("| tasks | sampling | rollouts | before | this version |", "|---|---|--:|--:|--:|"),
        *_evaluations(version, state),
    ]
    return "\n".join(lines) + "\n"


def _facts(version: Version, config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What made the version; the configuration is that of the checkpoint's own step."""
    policy = config["policies"][version.policy]
    algorithm = (policy.get("algorithm") or config["algorithm"])["name"]
    credit = (policy.get("credit") or config["credit"])["name"]
    yield "step", f"{version.step} of {config['train']['steps']}"
    yield "algorithm", f"{algorithm}, credit {credit}"
    yield "rollouts of a step", f"{config['train']['groups_per_step']} tasks × {config['train']['group_size']}"
    yield "tasks", ", ".join(f"{name} ({section['source']})" for name, section in config["tasks"].items())
    yield "rewards", ", ".join(config["rewards"]) or "the agent's own"
    yield "seed", str(config["seed"])


def _evaluations(version: Version, state: RunState) -> Iterator[str]:
    def at(step: int) -> dict[tuple[str, str], dict[str, Any]]:
        return {(entry["set"], entry["mode"]): entry for entry in state.evaluations if entry["step"] == step}

    before = at(0)
    for (name, mode), entry in at(version.step).items():
        was = f"{before[name, mode]['reward']:.3f}" if (name, mode) in before else ""
        yield f"| {_cell(name)} | {mode} | {entry['rollouts']} | {was} | {entry['reward']:.3f} |"


def _cell(text: str) -> str:
    """Text of a configuration as one cell of a table."""
    return one_line(text, 200).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
