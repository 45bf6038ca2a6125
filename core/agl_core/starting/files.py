"""The files that a run begins with: a configuration, a reward rule and some tasks, which run as they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agl_core.config import check, load
from agl_core.errors import ConfigError
from agl_core.starting.agent_file import AgentFile

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
