"""What there is in a user's agent file: the callable, what it takes, and its framework."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_core.capture import installed_adapters
from agl_core.errors import AgentError
from agl_core.worker import agent_environment, client_variables
from agl_core.worker.agent import load_agent

_USUAL = ("solve", "run", "answer", "agent", "main")
"""What agents are called, the likeliest first."""
_NOWHERE = "http://127.0.0.1:9"
"""Clients that the file makes when it is imported need an address; nothing is sent there."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class AgentFile:
    """An agent that can be imported and called with a task's input."""

    file: Path
    function: str
    is_async: bool
    keys: Sequence[str]
    """The keys that it reads of its input; none if the input is a text."""
    frameworks: Sequence[str]
    """Those among the frameworks that it imports for which an adapter is installed."""

    @property
    def entry(self) -> str:
        """As a configuration names it."""
        return f"{self.file.stem}:{self.function}"


def read_agent_file(file: Path, function: str | None, choose: Callable[[Sequence[str]], str | None]) -> AgentFile:
    """Look at an agent file, and import it.

    `choose` is asked if several functions could be the agent, and may answer None. AgentError if the file cannot be
    imported, has no such function, or does not say which of them is the agent.
    """
    if not file.is_file() or file.suffix != ".py" or not file.stem.isidentifier():
        raise AgentError(f"{file} is not a Python file that can be imported (its name would be '{file.stem}').")
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        raise AgentError(f"{file} is not valid Python: {error}.") from error
    functions = {each.name: each for each in tree.body if isinstance(each, Function)}
    chosen = function or _chosen(file, tree, functions, choose)
    adapters, before = installed_adapters(), set(sys.modules)
    with agent_environment(client_variables(_NOWHERE)):
        agent = load_agent(f"{file.stem}:{chosen}", file.parent)
    frameworks = [each.framework for each in adapters if each.framework in sys.modules.keys() - before]
    found = functions.get(chosen)
    return AgentFile(file, chosen, agent.is_async, () if found is None else _keys(found), sorted(set(frameworks)))


def _chosen(
    file: Path, tree: ast.Module, functions: dict[str, Function], choose: Callable[[Sequence[str]], str | None]
) -> str:
    callable_ = [name for name, each in functions.items() if not name.startswith("_") and _takes_one(each)]
    possible = [name for name in callable_ if not _is_tool(functions[name]) and not _is_used(name, tree)] or callable_
    usual = [name for name in _USUAL if name in possible]
    if usual or len(possible) == 1:
        return (usual or possible)[0]
    if not possible:
        raise AgentError(
            f"{file} has no function that takes a task's input as its only argument. Write one, for instance "
            f"`def solve(task_input): …`, or name a callable with --entry."
        )
    chosen = choose(possible)
    if chosen is None:
        raise AgentError(f"{file} has several functions that could be the agent. Name one: --entry {possible[0]}.")
    return chosen


def _is_tool(function: Function) -> bool:
    """Whether a decorator says so: `@tool`, `@function_tool(…)`, `@agent.tool`."""
    return any("tool" in ast.unparse(each).partition("(")[0].lower() for each in function.decorator_list)


def _is_used(name: str, tree: ast.Module) -> bool:
    """Whether something else in the file calls it or hands it on, as with helpers and tools; `if __name__ …` aside."""
    others = [each for each in tree.body if not isinstance(each, ast.If) and getattr(each, "name", None) != name]
    return any(isinstance(node, ast.Name) and node.id == name for each in others for node in ast.walk(each))


def _takes_one(function: Function) -> bool:
    """Whether it can be called with one argument, but for the context."""
    arguments = function.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    needed = [name for name in named[: len(named) - len(arguments.defaults)] if name != "context"]
    return len(needed) == 1 or (not needed and bool(named))


def _keys(function: Function) -> list[str]:
    """The keys of its first argument that it names: `task["question"]`, `task.get("question")`."""
    arguments = [*function.args.posonlyargs, *function.args.args]
    found: dict[str, None] = {}
    for node in ast.walk(function):
        match node:
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str(key))):
                pass
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=name), attr="get"), args=[ast.Constant(value=str(key)), *_]
            ):
                pass
            case _:
                continue
        if arguments and name == arguments[0].arg:
            found[key] = None
    return list(found)
