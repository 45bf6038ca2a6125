"""Environments for the package verifiers, as the Environments Hub has them: rows are tasks, a rubric is the reward."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

import agl_core
from agl_core.capture.status import message_text
from agl_core.errors import ConfigError
from agl_core.types import Episode, Task
from agl_core.types.forms import dump_json


@agl_core.task_source(name="verifiers")
def verifiers_tasks(
    *,
    package: Annotated[str, Field(description="Its module, which has `load_environment`.")],
    arguments: Annotated[dict[str, Any] | None, Field(description="The arguments of `load_environment`.")] = None,
    split: Annotated[Literal["train", "eval"], Field(description="The environment's dataset.")] = "train",
) -> Iterator[Task]:
    """Rows of a single-turn environment for verifiers 0.1, as the Environments Hub has them (needs `verifiers<0.2`).

    The reward `verifiers` scores them.
    """
    origin: Any = {"package": package, "arguments": arguments or {}}
    environment = _load(dump_json(origin))
    if split == "eval" and environment.eval_dataset_source is None:
        raise ConfigError(f"'{package}' has no rows for evaluation, and would give those of training.")
    for row in environment.get_dataset() if split == "train" else environment.get_eval_dataset():
        messages = [{"content": row["prompt"]}] if isinstance(row["prompt"], str) else row["prompt"]
        prompt = "\n\n".join(message_text(message["content"]) for message in messages)
        metadata = {"verifiers": {**origin, "row": row}}
        yield Task(f"{package}-{split}-{row['example_id']}", {"prompt": prompt}, metadata=metadata)


@agl_core.reward_rule(name="verifiers")
async def verifiers_reward(episode: Episode) -> float:
    """The score that a task's own environment gives the recorded conversation; for the task source `verifiers`."""
    task: Any = episode.task.metadata.get("verifiers")
    if task is None:
        raise ConfigError(f"Task '{episode.task.id}' has no `verifiers` in its metadata. Take tasks from that source.")
    environment, row = _load(dump_json({"package": task["package"], "arguments": task["arguments"]})), task["row"]
    from verifiers.types import State

    completion = list[Any]()
    if episode.transitions:
        last = episode.transitions[-1]
        said = next(
            (n for n, message in enumerate(last.messages) if message["role"] == "assistant"), len(last.messages)
        )
        completion = [*last.messages[said:], last.response]
    row = {**row, "info": json.loads(row["info"])} if isinstance(row.get("info"), str) else row
    state = State(input=row)
    state.update(
        {"prompt": row["prompt"], "completion": list(map(_Message, completion)), "task": row, "trajectory": []}
    )
    await environment.rubric.score_rollout(state)
    return float(state["reward"])


class _Message(dict[str, Any]):
    """A message as both kinds of rubrics read it: written for releases with objects, or for those with dictionaries."""

    __getattr__ = dict.get


@functools.cache
def _load(described: str) -> Any:
    """The environment that a JSON object describes. ConfigError if it is not installed, or not one of a single turn."""
    package, arguments = map(json.loads(described).get, ("package", "arguments"))
    try:
        import verifiers

        environment = importlib.import_module(package).load_environment(**arguments)
        is_single = isinstance(environment, verifiers.SingleTurnEnv)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The task source 'verifiers' needs the package {error.name}, which is not installed: "
            f"pip install 'verifiers>=0.1.14,<0.2', and the environment's package."
        ) from error
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"'{package}' is no environment for verifiers 0.1 with such arguments: {error}") from error
    if not is_single:
        raise ConfigError(f"'{package}' has tools or turns of its own. The source 'verifiers' takes single turns.")
    return environment
