"""`agl init`: the files with which the training of one's own agent begins; they run as they are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.agent_file import AgentFile, read_agent_file
from agl_core.config import check, load
from agl_core.errors import ConfigError

File = Annotated[Path, typer.Argument(help="The Python file of your agent; the new files are written beside it.")]
Entry = Annotated[str | None, typer.Option(help="The function in it that takes a task's input; found by default.")]
Model = Annotated[
    str | None,
    typer.Option(help="The model to train: a folder, or a Hugging Face hub name. Offered if absent: a small one."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")]

_FIRST_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""Small, and it can call tools."""
CONFIG = "train.toml"
REWARD = "reward.py"
TASKS = "tasks.jsonl"

_CONFIG = """\
# Train the agent in {file}: agl train {config}
#
# Paths are relative to this file. docs/configuration.md has every key. Any of them can be overridden for one run:
# --set train.steps=20

config_version = 1
name = {name}
plugins = ["{reward}"]          # your reward rule

[agent]
entry = {entry}

[tasks.train]                     # what the agent is trained on
source = "jsonl"                  # also: csv, parquet, hf, and reasoning_gym: tasks with verifiers, without a file
path = "{tasks}"

[tasks.eval]                      # what is measured before and after: put tasks here that training never sees
source = "jsonl"
path = "{tasks}"

[policies.default.model]          # its size decides the step size, unless optimizer.learning_rate does
path = {model}

[sampling]
max_tokens = 64                   # of one reply

[train]                           # small, so that a first run is over soon
steps = 3
groups_per_step = 4               # tasks per step,
group_size = 4                    # and rollouts of each, which are compared

[eval]
every = 0                         # 0: only `agl eval` evaluates

[rewards.right]                   # in {reward}

[algorithm]
name = "grpo"
"""

_REWARD = '''\
"""What a rollout is worth. Try it on what was recorded: agl reward try {config}"""

import agl_core


@agl_core.reward_rule
def right(episode):
    """1 if the agent's result has the expected answer in it."""
    expected = episode.task.metadata["answer"]  # beside "input" in {tasks}; the agent does not see it
    return float(str(expected) in str(episode.result))
'''


def init(agent: File, entry: Entry = None, model: Model = None, force: Force = False) -> None:
    """Write train.toml, reward.py and tasks.jsonl for your agent: they run as they are, and are yours to change.

    For instance: agl init my_agent.py --model Qwen/Qwen2.5-0.5B-Instruct
    """
    found = read_agent_file(agent, entry, _choose)
    kind = "async def" if found.is_async else "def"
    takes = f"an object with {', '.join(found.keys)}" if found.keys else "a text"
    typer.echo(f"agent: {kind} {found.function} in {found.file}, which takes {takes}")
    unknown = "none that an installed adapter knows; its LLM calls are recorded all the same"
    typer.echo(f"framework: {', '.join(found.frameworks) or unknown}")
    if model is None:
        typer.echo(
            f"model: to start with, {_FIRST_MODEL} (1 GB from the Hugging Face hub; it knows tools). Smaller, but "
            f"without tools: HuggingFaceTB/SmolLM2-135M-Instruct. Any other folder or hub name will do."
        )
        model = typer.prompt("Model to train", default=_FIRST_MODEL) if sys.stdin.isatty() else _FIRST_MODEL
    for path in write_files(found, model, force=force):
        typer.echo(f"wrote {path}")
    typer.echo(
        "tasks: the eight sums in tasks.jsonl only show the form. Without tasks of your own yet, take some of "
        'reasoning-gym\'s hundred kinds, which have verifiers: source = "reasoning_gym" (docs/data.md)'
    )
    typer.echo(f"next: agl train {found.file.parent / CONFIG}")


def _choose(functions: Sequence[str]) -> str | None:
    if not sys.stdin.isatty():
        return None
    answer = ""
    while answer not in functions:
        answer = typer.prompt(f"Which function is the agent ({', '.join(functions)})?")
    return answer


def write_files(agent: AgentFile, model: str, *, force: bool) -> list[Path]:
    """Write the three files beside the agent's, and check that they make a run.

    ConfigError if one of them is there already (unless `force`), or if the run cannot be configured so; then no file
    is left that was not there.
    """
    folder = agent.file.parent
    files = {folder / name: text for name, text in _texts(agent, _model(model, folder)).items()}
    if agent.file in files:
        raise ConfigError(f"{agent.file} has the name of a file that is to be written. Rename your agent's file.")
    there = {path: path.read_bytes() for path in files if path.exists()}
    if there and not force:
        names = ", ".join(str(path) for path in there)
        raise ConfigError(f"{names}: there already. Nothing was written; --force overwrites.")
    try:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        check(load(folder / CONFIG))
    except BaseException:
        for path in files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path, content in there.items():
            path.write_bytes(content)
        raise
    return list(files)


def _texts(agent: AgentFile, model: str) -> Mapping[str, str]:
    names = {"config": CONFIG, "reward": REWARD, "tasks": TASKS}
    configuration = _CONFIG.format(
        **names,
        file=agent.file.name,
        name=json.dumps(agent.file.stem.lstrip("_") or "agent"),
        entry=json.dumps(agent.entry),
        model=json.dumps(model, ensure_ascii=False),
    )
    return {CONFIG: configuration, REWARD: _REWARD.format(**names), TASKS: _tasks(agent.keys)}


def _tasks(keys: Sequence[str]) -> str:
    lines = []
    for number in range(8):
        a, b = 2 + number, 3 * number % 7 + 1
        question = f"What is {a} + {b}?"
        task_input = dict.fromkeys(keys, question) if keys else question
        lines.append(json.dumps({"id": f"sum-{number}", "input": task_input, "answer": str(a + b)}))
    return "\n".join(lines) + "\n"


def _model(model: str, folder: Path) -> str:
    """A folder relative to that of the configuration; a hub name as it is."""
    path = Path(model).expanduser()
    return os.path.relpath(path.resolve(), folder.resolve()) if path.is_dir() else model
