"""The model card of an exported version: what trained it, on what, from what, and how it was evaluated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Literal

from agl_core.config.load import LoadedConfig
from agl_core.config.sections import HUB_NAME
from agl_core.errors import ConfigError
from agl_core.reading.metrics import read_metrics
from agl_core.reading.words import one_line
from agl_core.training.checkpoints import read_state
from agl_online.policies.details import evaluations_of
from agl_online.policies.naming import Version

Form = Literal["full", "merged", "adapter"]
_LICENCE = re.compile(r"^license:[ \t]*[\"']?([A-Za-z0-9][\w.+-]*)[\"']?[ \t]*$", re.MULTILINE)
_WHAT = {
    "full": "All weights",
    "merged": "All weights, with the trained LoRA adapter merged into them",
    "adapter": "A LoRA adapter: it needs its base model",
}


def model_card(version: Version, loaded: LoadedConfig, form: Form) -> str:
    """The folder's README.md, with the front matter that the Hugging Face hub reads."""
    base = loaded.config.policies[version.policy].model.path
    try:
        weights: str | None = loaded.weights(version.policy)
    except ConfigError:
        weights = None
    licence = None if weights is None else licence_of(weights)
    is_public = HUB_NAME.fullmatch(base) is not None and weights == base
    head = {
        "base_model": base if is_public else None,
        "license": licence,
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
    }
    front = [f"{key}: {value}" for key, value in head.items() if value] + ["tags:", "- agl", "- reinforcement-learning"]
    shown = base if is_public else Path(base).name
    facts = dict(_facts(version, loaded))
    lines = [
        *("---", *front, "---", ""),
        *(f"# {version}", ""),
        f"{_WHAT[form]}. agl trained it by reinforcement learning, in the run `{version.run.resolve().name}`.",
        "",
        *("| | |", "|---|---|"),
        f"| base model | {_cell(shown)} |",
        f"| licence of the base | {licence or 'unknown: look at the base model'} |",
        *(f"| {key} | {_cell(value)} |" for key, value in facts.items()),
        *("", "## Evaluation", ""),
        *_evaluation(version),
        *("", "## Use", ""),
        *_use(form),
    ]
    return "\n".join(lines) + "\n"


def licence_of(weights: str) -> str | None:
    """The licence that a model's own card states; `weights` is a folder or a hub name. None if it is not known here."""
    folder = Path(weights) if Path(weights).is_dir() else downloaded(weights)
    try:
        card = (folder / "README.md").read_text(encoding="utf-8") if folder is not None else ""
    except (OSError, UnicodeDecodeError):
        return None
    front = card.split("\n---", 1)[0] if card.startswith("---") else ""
    found = _LICENCE.search(front)
    return found[1] if found else None


def downloaded(model: str) -> Path | None:
    """The folder of a hub model's revision in huggingface_hub's cache, if any is there."""
    home = os.environ.get("HF_HOME", f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    revisions = (cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/config.json")
    return next((file.parent for file in revisions), None)


def _facts(version: Version, loaded: LoadedConfig) -> Iterator[tuple[str, str]]:
    """What made the version; the configuration is that of the checkpoint's own step."""
    config: Mapping[str, Any] = read_state(version.checkpoint).config if version.checkpoint is not None else {}
    config = config or loaded.config.model_dump(mode="json")
    policy = config["policies"][version.policy]
    algorithm = (policy.get("algorithm") or config["algorithm"])["name"]
    credit = (policy.get("credit") or config["credit"])["name"]
    yield "step", f"{version.step} of {config['train']['steps']}"
    yield "algorithm", f"{algorithm}, credit {credit}"
    yield "rollouts of a step", f"{config['train']['groups_per_step']} tasks × {config['train']['group_size']}"
    yield "tasks", ", ".join(f"{name} ({section['source']})" for name, section in config["tasks"].items())
    yield "rewards", ", ".join(config["rewards"]) or "the agent's own"
    agent = config["agent"].get("entry") or config["agent"].get("command") or ""
    yield "agent", agent if isinstance(agent, str) else " ".join(agent)
    if lora := policy["model"].get("lora"):
        yield "LoRA", f"rank {lora['rank']}, alpha {lora['alpha']:g}"
    rate = policy["optimizer"]["learning_rate"]
    yield "learning rate", "as suits the model's size" if rate is None else f"{rate:g}"
    yield "seed", str(config["seed"])
    yield "agl", installed("agl-core")


def _evaluation(version: Version) -> Iterator[str]:
    lines = read_metrics(version.run)
    before = {(each.set, each.mode): each.reward for each in evaluations_of(lines, 0)}
    found = evaluations_of(lines, version.step)
    if not found:
        yield "This version was not evaluated."
        return
    yield "The mean reward on tasks held out from training; *before* is that of the base model."
    yield ""
    yield "| tasks | sampling | rollouts | before | this version |"
    yield "|---|---|--:|--:|--:|"
    for each in found:
        was = before.get((each.set, each.mode))
        rollouts = "" if each.rollouts is None else str(each.rollouts)
        first = "" if was is None else f"{was:.3f}"
        yield f"| {_cell(each.set)} | {each.mode} | {rollouts} | {first} | {each.reward:.3f} |"


def _use(form: Form) -> Iterator[str]:
    yield "```python"
    if form == "adapter":
        yield "from peft import AutoPeftModelForCausalLM"
    yield f"from transformers import {'' if form == 'adapter' else 'AutoModelForCausalLM, '}PreTrainedTokenizerFast"
    yield ""
    yield 'tokenizer = PreTrainedTokenizerFast.from_pretrained("FOLDER")'
    yield f'model = {"AutoPeft" if form == "adapter" else "Auto"}ModelForCausalLM.from_pretrained("FOLDER")'
    yield "```"
    if form == "adapter":
        yield ""
        yield "`base_model_name_or_path` in adapter_config.json says where the base model is: change it when it moves."


def _cell(text: str) -> str:
    """Text of a configuration as one cell of a table."""
    return one_line(text, 200).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
