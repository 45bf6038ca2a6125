"""Options and output that the commands of runs share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from agl_core.cli.screen import Screen
from agl_core.config.sections import ServerSection
from agl_core.plugins import Plugins
from agl_core.types import Ending, Mode, ToolStatus, Verdict
from agl_server.http.keys import is_loopback
from agl_server.training.metrics import Advance, Observer, numbered

Command = TypeVar("Command", bound=Callable[..., Any])

# Runs and configurations
Run = Annotated[Path, typer.Argument(help="The run: its folder, or its name below ./runs.")]
NewestRun = Annotated[Path | None, typer.Argument(help="The run; by default the newest below ./runs.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs: folders, or names below ./runs.")]
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
"""Type, option and help of each field of `agl_server.reading.rollouts.Query`."""

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
