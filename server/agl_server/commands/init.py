"""`agl init`: files to begin the training of an agent with, which run as they are."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from agl_core import kinds
from agl_core.capture import installed_adapters
from agl_core.client.agent import agent_environment, client_variables, load_agent, load_module
from agl_core.config.load import load
from agl_core.errors import AgentError, ConfigError
from agl_core.kinds import Kind
from agl_core.plugins import Plugins
from agl_server.builtin.tasks import FileOptions, RowTasks, jsonl_tasks

File = Annotated[Path, typer.Argument(help="The Python file of your agent; the new files are written beside it.")]
Entry = Annotated[str | None, typer.Option(help="The function in it that takes a task's input; found by default.")]
Model = Annotated[str, typer.Option(help="The model to train: a folder, or a Hugging Face hub name.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite train.toml and reward.py if they are there.")]

FIRST_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
"""Small, and it can call tools."""
_NUMBER = r"\s*[-+]?[\d,]*\.?\d+(e[-+]?\d+)?\s*"
_USUAL = ("solve", "run", "answer", "agent", "main")
"""Names of agents, the likeliest first."""
_NOWHERE = "http://127.0.0.1:9"
"""An address for clients that the file makes at its import; nothing is sent there."""
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
plugins = ["{reward}"]           # your own reward rules

[agent]
entry = {entry}

[tasks.train]                     # what the agent is trained on
source = "jsonl"                  # also: csv, hf (which reads Parquet too), reasoning_gym: tasks with verifiers
path = "{tasks}"
{columns}
[tasks.eval]                      # what is measured before and after: put tasks here that training never sees
source = "jsonl"
path = "{tasks}"
{columns}
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

{rule}

[algorithm]
name = "grpo"
"""

_NUMBERS = """\
[rewards.numeric_match]           # 1 if the last number of the agent's result is the expected one
field = {answer}"""
_WORDS = "[rewards.right]                   # in {reward}"

_REWARD = '''\
"""The reward of a rollout. Try it on what was recorded: agl reward try {config}"""

import re

import agl_core


@agl_core.reward_rule
def right(episode):
    """1 if the agent's result has the expected answer in it, word by word. It counts as [rewards.right]."""
    expected = str(episode.task.metadata[{answer}])  # beside the input in {tasks}; the agent does not see it
    alone = rf"(?<!\\w)(?!(?<=[-.,])\\d){{re.escape(expected)}}(?!\\w|[.,]\\d)"  # 3 is neither in -3 nor in 3,000
    return float(re.search(alone, str(episode.result), re.IGNORECASE) is not None)
'''
_INPUTS = ("question", "prompt", "instruction", "problem", "query")
_ANSWERS = ("answer", "result", "expected", "solution", "target", "label", "output")
"""Usual names of keys of a task, the likeliest first."""


@dataclass(frozen=True, slots=True)
class AgentFile:
    """An agent that can be imported and called with a task's input."""

    file: Path
    function: str
    is_async: bool
    keys: Sequence[str]
    """Keys of its input; none if the input is a text."""
    frameworks: Sequence[str]
    """Imported frameworks with an installed adapter."""


def init(agent: File, entry: Entry = None, model: Model = FIRST_MODEL, force: Force = False) -> None:
    """Write train.toml, reward.py and tasks.jsonl for your agent: they run as they are, and are yours to change.

    A tasks.jsonl that is there is kept and used.

    For instance: agl init my_agent.py --model Qwen/Qwen2.5-0.5B-Instruct
    """
    own = read_agent_file(agent, entry)
    kind = "async def" if own.is_async else "def"
    takes = f"an object with {', '.join(own.keys)}" if own.keys else "a text"
    typer.echo(f"agent: {kind} {own.function} in {own.file}, which takes {takes}")
    unknown = "none that an installed adapter knows; its LLM calls are recorded all the same"
    typer.echo(f"framework: {', '.join(own.frameworks) or unknown}")
    can_train = "torch" in Plugins.load().components(kinds.ENGINE)
    written = write_files(own, model, force=force, needs=kinds.KINDS if can_train else (kinds.TASK_SOURCE,))
    for path in written:
        typer.echo(f"wrote {path}")
    typer.echo(f"model: {model}; any other folder or hub name will do, in {CONFIG}")
    if (tasks := own.file.parent / TASKS) in written:
        typer.echo(
            "tasks: the eight sums in tasks.jsonl only show the form. Without tasks of your own yet, take some of "
            'reasoning-gym\'s hundred kinds, which have verifiers: source = "reasoning_gym" (docs/data.md)'
        )
    else:
        typer.echo(f"tasks: {tasks} was there, and is used as it is")
    typer.echo(f"next: agl {'train' if can_train else 'doctor'} {own.file.parent / CONFIG}")


def read_agent_file(file: Path, function: str | None) -> AgentFile:
    """Import an agent file; AgentError if that fails, or if it is not clear which function is the agent."""
    if not file.exists():
        raise AgentError(f"There is no file {file} (looked in {Path.cwd()}). Name the Python file of your agent.")
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise AgentError(f"{file} is not a Python file that can be imported (its name would be '{file.stem}').")
    adapters, before = installed_adapters(), set(sys.modules)
    with agent_environment(client_variables(_NOWHERE)):
        module = load_module(file.stem, file.parent, str(file))
    frameworks = {adapter.framework for adapter in adapters} & (sys.modules.keys() - before)
    chosen = function or _chosen(file, module)
    agent = load_agent(f"{file.stem}:{chosen}", file.parent)
    keys = _keys(agent.function) if inspect.isfunction(agent.function) else ()
    return AgentFile(file, chosen, agent.is_async, keys, sorted(frameworks))


def _chosen(file: Path, module: ModuleType) -> str:
    """The function with a usual name, or the only undecorated one that can be called with a task's input."""
    possible = []
    for name, function in inspect.getmembers(module, inspect.isfunction):
        is_own = (function.__module__, function.__name__) == (module.__name__, name) and not name.startswith("_")
        if is_own and not inspect.getsource(function).startswith("@"):
            with suppress(AgentError):
                load_agent(f"{file.stem}:{name}", file.parent)
                possible.append(name)
    usual = [name for name in _USUAL if name in possible]
    if usual or len(possible) == 1:
        return (usual or possible)[0]
    raise AgentError(
        f"It is not clear which function in {file} is the agent, which takes a task's input as its only argument "
        f"({', '.join(possible) or 'there is none'}). Name it: --entry FUNCTION."
    )


def _keys(function: Callable[..., object]) -> list[str]:
    """The keys that its code has of its first argument: `task["question"]`, `task.get("question")`."""
    argument = next(iter(inspect.signature(function).parameters))
    named = re.findall(rf"""\b{argument}(?:\[|\.get\()\s*(["'])(.+?)\1""", inspect.getsource(function))
    return list(dict.fromkeys(key for _, key in named))


def write_files(agent: AgentFile, model: str, *, force: bool, needs: Collection[Kind] = kinds.KINDS) -> list[Path]:
    """Write the files, if they make a run; ConfigError, with no change, if not or if one is there (unless `force`)."""
    folder = agent.file.parent
    files = {folder / name: text for name, text in _texts(agent, _model(model, folder)).items()}
    if agent.file in files:
        raise ConfigError(f"{agent.file} has the name of a file that is to be written. Rename your agent's file.")
    before = {path: path.read_bytes() for path in files if path.exists()}
    if before and not force:
        names = ", ".join(str(path) for path in before)
        raise ConfigError(f"{names}: there already. Nothing was written; --force overwrites.")
    try:
        for path, text in files.items():
            path.write_text(text, encoding="utf-8")
        load(folder / CONFIG, needs=needs)
    except BaseException:
        for path in files:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path, content in before.items():
            path.write_bytes(content)
        raise
    return list(files)


def _texts(agent: AgentFile, model: str) -> Mapping[str, str]:
    """The files to write; tasks only if there are none."""
    sums, columns = list[dict[str, Any]](), ""
    for number in range(8):
        a, b = 2 + number, 3 * number % 7 + 1
        question = f"What is {a} + {b}?"
        task_input = dict.fromkeys(agent.keys, question) if agent.keys else question
        sums.append({"id": f"sum-{number}", "input": task_input, "answer": str(a + b)})
    answer, answers = "answer", [str(task["answer"]) for task in sums]
    if is_kept := (agent.file.parent / TASKS).exists():
        tasks, columns = _read_tasks(agent)
        metadata = tasks.task(0).metadata
        answer = next((name for name in (*_ANSWERS, *metadata) if name in metadata), answer)
        answers = [str(tasks.task(index).metadata.get(answer)) for index in range(tasks.size)]
    rule = _WORDS if any(re.fullmatch(_NUMBER, value) is None for value in answers) else _NUMBERS
    names = {"config": CONFIG, "reward": REWARD, "tasks": TASKS, "columns": columns, "answer": json.dumps(answer)}
    configuration = _CONFIG.format(
        **names,
        file=agent.file.name,
        name=json.dumps(agent.file.stem.lstrip("_") or "agent"),
        entry=json.dumps(f"{agent.file.stem}:{agent.function}"),
        model=json.dumps(model, ensure_ascii=False),
        rule=rule.format(**names),
    )
    files = {CONFIG: configuration, REWARD: _REWARD.format(**names)}
    return files if is_kept else {**files, TASKS: "\n".join(map(json.dumps, sums)) + "\n"}


def _read_tasks(agent: AgentFile) -> tuple[RowTasks, str]:
    """The tasks that are there, and the line for input keys other than `input`; ConfigError names a bad line."""
    folder, columns = agent.file.parent, dict[str, str | tuple[str, ...]]()
    with suppress(TypeError, ValueError), (folder / TASKS).open(encoding="utf-8") as lines:
        row = json.loads(next(lines, "{}"))
        usual = [name for name in _INPUTS if name in row]
        if "input" not in row and agent.keys and {*agent.keys} <= {*row}:
            columns = {"input": tuple(agent.keys)}
        elif "input" not in row and usual:
            columns = {"input": usual[0]}
    line = f"columns = {{ input = {json.dumps(columns['input'])} }}\n" if columns else ""
    return jsonl_tasks(FileOptions(path=Path(TASKS), columns=columns), folder, 0), line


def _model(model: str, folder: Path) -> str:
    """A folder relative to that of the configuration; a hub name as it is."""
    path = Path(model).expanduser()
    return os.path.relpath(path.resolve(), folder.resolve()) if path.is_dir() else model
