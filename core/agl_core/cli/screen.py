"""Options and output that commands share; the terminal never obeys agents' text."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agl_core.cli.words import harmless, plain
from agl_core.config.sections import ServerSection
from agl_core.plugins import Plugins
from agl_core.training.metrics import Advance, Observer, numbered
from agl_core.types import Ending, Mode, ToolStatus, Verdict

Command = TypeVar("Command", bound=Callable[..., Any])

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

# Runs and configurations
Run = Annotated[Path, typer.Argument(help="The run: its folder, or its name below ./runs.")]
NewestRun = Annotated[Path | None, typer.Argument(help="The run; by default the newest below ./runs.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs: folders, or names below ./runs.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, e.g. train.steps=20. Repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="Overrides the file's seed.")]

# A server
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")]

# Filters of rollouts
FILTERS: Mapping[str, tuple[Any, str, str]] = {
    "step": (int, "--step", "Only of this step."),
    "mode": (Mode, "--mode", "Only of this mode."),
    "split": (str, "--split", "Only of tasks of this split."),
    "ending": (Ending, "--ending", "Only those that ended like this."),
    "agent": (str, "--agent", "Only those in which this agent made a call."),
    "policy": (str, "--policy", "Only those in which this policy answered a call."),
    "tool": (str, "--tool", "Only those in which this tool was called."),
    "status": (ToolStatus, "--tool-status", "Only those in which a tool (of --tool) came to this."),
    "dropped": (str, "--dropped", "Only those with a transition dropped for this reason."),
    "low": (float, "--min-reward", "Only with at least this terminal reward."),
    "high": (float, "--max-reward", "Only with at most this terminal reward."),
    "text": (str, "--text", "Only those with this text in task, call or result."),
    "verdict": (Verdict, "--verdict", "Only those with this verdict (docs/health.md)."),
}
"""Type, option and help of each field of `agl_core.reading.rollouts.Query`."""

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

_UNLIMITED = 1 << 16


def print_json(value: Any) -> None:
    """Print a result as JSON. It is ASCII, so that a terminal obeys nothing of it."""
    typer.echo(json.dumps(plain(value), indent=2))


def filtered(*names: str) -> Callable[[Command], Command]:
    """Give a command options for these filters, which come as its keyword `query`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        query, parameters = signature.parameters["query"], list[inspect.Parameter]()
        for parameter in signature.parameters.values():
            parameters += [_filter(name) for name in names] if parameter is query else [parameter]

        @functools.wraps(command)
        def with_query(**values: Any) -> Any:
            return command(query=query.annotation(**{name: values.pop(name) for name in names}), **values)

        with_query.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return with_query  # type: ignore[return-value]

    return decorate


def _filter(name: str) -> inspect.Parameter:
    kind, option, text = FILTERS[name]
    annotation: Any = Annotated[kind, typer.Option(option, help=text)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def table(*columns: str, numbers: tuple[str, ...] = (), **options: Any) -> Table:
    """A table with these columns, and `numbers`, to the right and never broken."""
    rows = Table(*columns, **options)
    for column in numbers:
        rows.add_column(column, justify="right", no_wrap=True)
    return rows


class Screen(Console):
    """A console for plain text, also in tables: no markup, and nothing that a terminal would obey.

    In a pipe or a file nothing is wrapped or cropped, unless COLUMNS says how wide it is.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = _UNLIMITED

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(printed, str) for printed in objects):
            options.setdefault("soft_wrap", True)
        super().print(*objects, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(harmless(text), **options)


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
    from agl_core.server.keys import is_loopback  # Commands that only read need no packages of the server.

    if is_loopback(server.host) or operator_key is None:
        host, key = "127.0.0.1", None
    else:
        host, key = server.host, operator_key
    async with Plugins.load().show_run(run_dir, host, server.view_port, key) or nullcontext() as address:
        yield address
