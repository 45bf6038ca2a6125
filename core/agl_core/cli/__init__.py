"""The `agl` command line: one module per command, each thin; what is heavy is imported when a command runs."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from agl_core.analysis.text.words import harmless
from agl_core.cli.doctor import SERVER_MODULES, doctor
from agl_core.cli.eval import evaluate
from agl_core.cli.init import init
from agl_core.cli.plugins import list_plugins
from agl_core.cli.recorded.export import export
from agl_core.cli.recorded.import_ import import_
from agl_core.cli.recorded.plot import plot
from agl_core.cli.recorded.reward import reward
from agl_core.cli.recorded.rollouts import rollouts
from agl_core.cli.recorded.runs import runs
from agl_core.cli.recorded.show import show
from agl_core.cli.run import run
from agl_core.cli.shared.text import HarmlessFormatter
from agl_core.cli.train import train
from agl_core.cli.worker import work
from agl_core.errors import AglError
from agl_core.plugins import Plugins

EXPORT_MODULES = ("pyarrow", "datasets")
"""What the extra `export` brings."""

app = typer.Typer(
    name="agl",
    help="Train LLM agents that already exist, by reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # Paragraphs flow: their lines are broken once, at the width of the terminal.
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init)
app.command("train")(train)
app.command("worker")(work)
app.command("eval")(evaluate)
app.command("run", context_settings={"allow_interspersed_args": False})(run)
app.command("rollouts")(rollouts)
app.command("show")(show)
app.command("plot")(plot)
app.command("export")(export)
app.command("import")(import_)
app.add_typer(reward, name="reward")
app.add_typer(runs, name="runs")
app.command("plugins")(list_plugins)
app.command("doctor")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from agl_core import __version__

        typer.echo(f"agl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command; `main` looks for --debug itself, since a plugin can fail before this is called."""


def main() -> None:
    """Run the command line. Errors that agl raises on purpose, and of files, end with status 2, Ctrl-C with 130."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(HarmlessFormatter())
    try:
        plugins = Plugins.load()
        plugins.add_commands(app)
        for broken in plugins.broken:
            typer.secho(f"Warning: {harmless(str(broken))}", fg=typer.colors.YELLOW, err=True)
        app()
    except (AglError, ModuleNotFoundError, OSError) as error:
        message = _message(error)
        if message is None or "--debug" in sys.argv:
            raise
        typer.secho(f"Error: {harmless(message)}", fg=typer.colors.RED, err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _message(error: Exception) -> str | None:
    """What an error says to the user; None for one that agl does not expect."""
    if isinstance(error, AglError):
        return str(error)
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in SERVER_MODULES:
        return f"This needs the server's packages, and {missing} is not installed: pip install 'agl-core[server]'"
    if missing in EXPORT_MODULES:
        return f"This needs {missing}, which is not installed: pip install 'agl-core[export]'"
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"{error.filename} cannot be read, made or written ({error.strerror}). Check that it is there, its "
            f"permissions and the disk. --debug shows what needed it."
        )
    return None
