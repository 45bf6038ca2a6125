"""Environments for the package verifiers, as the Environments Hub has them: rows are tasks, a rubric is the reward.

`python -m agl_harnesses.verifiers ENVIRONMENT` serves an environment's tools, by MCP over standard input and output.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

import agl_core
from agl_core.capture.status import message_text
from agl_core.errors import ConfigError
from agl_core.types import Episode, Task
from agl_core.types.forms import dump_json

_SERVER = "environment"
"""The name of the server of an environment's tools."""


@agl_core.task_source(name="verifiers")
def verifiers_tasks(
    *,
    package: Annotated[str, Field(description="Its module, which has `load_environment`.")],
    arguments: Annotated[dict[str, Any] | None, Field(description="The arguments of `load_environment`.")] = None,
    split: Annotated[Literal["train", "eval"], Field(description="The environment's dataset.")] = "train",
) -> Iterator[Task]:
    """Rows of an environment for verifiers 0.1, as the Environments Hub has them (`agl-harnesses[verifiers]`).

    It has a single turn, or tools, which a harness gets as an MCP server. The reward `verifiers` scores them.
    """
    origin: Any = {"package": package, "arguments": arguments or {}}
    environment = _load(dump_json(origin))
    words = ["-P", "-m", "agl_harnesses.verifiers", dump_json(origin)]
    server = {"command": "{python}", "args": words}
    servers = {"mcp_servers": {_SERVER: server}} if _has_tools(environment) else {}
    if split == "eval" and environment.eval_dataset_source is None:
        raise ConfigError(f"'{package}' has no rows for evaluation, and would give those of training.")
    for row in environment.get_dataset() if split == "train" else environment.get_eval_dataset():
        messages = [{"content": row["prompt"]}] if isinstance(row["prompt"], str) else row["prompt"]
        prompt = "\n\n".join(message_text(message["content"]) for message in messages)
        metadata = {"verifiers": {**origin, "row": row}}
        yield Task(f"{package}-{split}-{row['example_id']}", {"prompt": prompt, **servers}, metadata=metadata)


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
        form = _own_message if _has_tools(environment) else _Message
        completion = list(map(form, (*last.messages[said:], last.response)))
    row = {**row, "info": json.loads(row["info"])} if isinstance(row.get("info"), str) else row
    state = State(input=row)
    state.update({"prompt": row["prompt"], "completion": completion, "task": row, "trajectory": []})
    await environment.rubric.score_rollout(state)
    return float(state["reward"])


class _Message(dict[str, Any]):
    """A message as both kinds of rubrics read it: written for releases with objects, or for those with dictionaries."""

    __getattr__ = dict.get


def _own_message(message: Any) -> Any:
    """A message as verifiers has it, with the tools' own names, before which programs write the server's."""
    from verifiers.utils.message_utils import from_raw_message

    own = from_raw_message(message)
    for call in own.get("tool_calls") or ():
        call.name = re.sub(rf"^(mcp__)?{_SERVER}_+", "", call.name)
    return own


@functools.cache
def _load(described: str) -> Any:
    """The environment that a JSON object describes. ConfigError if it is not installed, or cannot be played."""
    package, arguments = map(json.loads(described).get, ("package", "arguments"))
    try:
        import verifiers

        environment = importlib.import_module(package).load_environment(**arguments)
        is_single = isinstance(environment, verifiers.SingleTurnEnv)
        has_groups = environment.rubric.has_group_rewards
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The task source 'verifiers' needs the package {error.name}, which is not installed: "
            f"pip install 'agl-harnesses[verifiers]', and the environment's package."
        ) from error
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"'{package}' is no environment for verifiers 0.1 with such arguments: {error}") from error
    if not is_single and not _has_tools(environment):
        kind = type(environment).__name__
        raise ConfigError(
            f"'{package}' is a {kind} with turns or states of its own: no SingleTurnEnv or plain ToolEnv."
        )
    if has_groups:
        raise ConfigError(f"'{package}' rewards by comparing the rollouts of a row. 'verifiers' scores each alone.")
    return environment


def _has_tools(environment: Any) -> bool:
    """True for a `ToolEnv` that changes nothing but rows, tools and rewards."""
    from verifiers import ToolEnv

    own = ("setup_state", "get_prompt_messages", "env_response", "call_tool", "rollout")
    return all(getattr(type(environment), name, None) is getattr(ToolEnv, name) for name in own)


async def _serve(described: str) -> None:
    """Serve the tools until the standard input ends."""
    from mcp.server.lowlevel import Server
    from mcp.server.stdio import stdio_server
    from mcp.types import TextContent, Tool

    server: Any = Server(_SERVER)
    async with stdio_server() as (reader, writer):
        sys.stdout = sys.stderr  # Tools may print.
        environment = _load(described)

        async def list_tools() -> list[Tool]:
            tools = environment.tool_defs
            return [Tool(name=t.name, description=t.description, inputSchema=t.parameters) for t in tools]

        async def call_tool(name: str, arguments: dict[str, Any]) -> list[TextContent]:
            try:
                message = await environment.call_tool(name, arguments, "")
            except Exception as error:  # Not every program says that a result is an error: its text has to.
                raise RuntimeError(f"Error: {environment.error_formatter(error)}") from error
            return [TextContent(type="text", text=message_text(message.content))]

        server.list_tools()(list_tools)
        server.call_tool()(call_tool)
        await server.run(reader, writer, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
