"""Options and output that the commands of runs share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agl_core.cli.screen import Screen
from agl_core.config.sections import ServerSection
from agl_core.plugins import Plugins
from agl_server.http.keys import is_loopback
from agl_server.training.metrics import Advance, Observer, numbered

Command = TypeVar("Command", bound=Callable[..., Any])

# Runs and configurations
Run = Annotated[Path, typer.Argument(help="The run: its folder, or its name below ./runs.")]
NewestRun = Annotated[Path | None, typer.Argument(help="The run; by default the newest below ./runs.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs: folders, or names below ./runs.")]
Seed = Annotated[int | None, typer.Option(help="Overrides the file's seed.")]
HarnessName = Annotated[
    str | None,
    typer.Option("--harness", metavar="NAME", help="A program known by name, such as codex (`agl plugins` has all)."),
]

# A server
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")]

# A model server
UpstreamUrl = Annotated[
    str | None,
    typer.Option(
        "--upstream", metavar="URL", help="An OpenAI-compatible server; by default what OPENAI_BASE_URL says."
    ),
]
KeyVariable = Annotated[
    str | None,
    typer.Option(
        "--upstream-key-env",
        metavar="NAME",
        help="The environment variable with the upstream's API key; by default OPENAI_API_KEY.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The upstream's model that answers, whatever the agent asks for; by default its only one, or the one "
        "that the agent asks for.",
    ),
]


def filtered(*names: str) -> Callable[[Command], Command]:
    """Give a command options for these fields of its keyword `query`, with their help; by default for all."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        query, parameters = signature.parameters["query"], list[inspect.Parameter]()
        fields = get_type_hints(query.annotation, include_extras=True)
        options = [_option(name, *get_args(fields[name])) for name in names or fields]
        for parameter in signature.parameters.values():
            parameters += options if parameter is query else [parameter]

        @functools.wraps(command)
        def with_query(**values: Any) -> Any:
            return command(query=query.annotation(**{it.name: values.pop(it.name) for it in options}), **values)

        with_query.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_query  # type: ignore[return-value]

    return decorate


def _option(name: str, kind: Any, text: str) -> inspect.Parameter:
    annotation: Any = Annotated[kind, typer.Option(help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class ConsoleObserver(Observer):
    """A run's messages, a line each, and on a terminal a bar of its phase, with the reward so far."""

    def __init__(self, console: Screen, steps: int, address: str | None = None) -> None:
        self._console, self._steps, self._address = console, steps, address

    @contextmanager
    def phase(self, name: str, step: int) -> Iterator[Advance]:
        if not self._console.is_terminal:
            yield lambda share, note: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            title = f"{numbered(step, self._steps)}  {name}"
            bar = progress.add_task(title, total=1.0, note="")
            yield lambda share, note: progress.update(bar, completed=share, note=note)

    def begun(self) -> None:
        if self._address is not None:
            self._console.print(f"view:   {self._address}")

    def say(self, text: str) -> None:
        self._console.print(text)


@asynccontextmanager
async def show_in_browser(run_dir: Path, server: ServerSection, operator_key: str | None) -> AsyncIterator[str | None]:
    """Show the run in the browser at this address, if a plugin can; on other machines only with the operator's key."""
    if is_loopback(server.host) or operator_key is None:
        host, key = "127.0.0.1", None
    else:
        host, key = server.host, operator_key
    async with Plugins.load().show_run(run_dir, host, server.view_port, key) or nullcontext() as address:
        yield address
