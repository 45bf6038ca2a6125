"""The `agl` command line: each command is a module, which is imported when the command is called."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from agl_core.cli.words import harmless
from agl_core.errors import AglError, nearest

if TYPE_CHECKING:
    from typer._click.core import Command as ClickCommand
    from typer._click.core import Context

EXPORT_MODULES = ("pyarrow", "datasets")
"""Modules of the extra `export` of agl-server."""
COMMANDS_GROUP = "agl.commands"
"""Entry points: functions that add a package's commands to the `typer.Typer` that they get, or to `COMMANDS`."""

START, LOOK, DATA, CHECK = "Train", "Look at runs", "Rewards and data", "This installation"
"""The panels of the help."""


class Command(NamedTuple):
    module: str
    """With a dot first: in this package."""
    name: str
    """The function or the group in it."""
    panel: str
    help: str
    takes_all: bool = False
    """Everything after its first argument is an argument too."""

    def load(self, name: str) -> ClickCommand:
        target = getattr(importlib.import_module(self.module, __name__), self.name)
        alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        if isinstance(target, typer.Typer):
            alone.add_typer(target, name=name, rich_help_panel=self.panel)
        else:
            settings = {"allow_interspersed_args": not self.takes_all}
            alone.command(name, rich_help_panel=self.panel, context_settings=settings)(target)
        return typer.main.get_group(alone).commands[name]


COMMANDS = {
    "worker": Command(".worker", "work", START, "Run rollouts for `agl train TARGET` until that run is over."),
    "reward": Command(".reward", "reward", DATA, "Try rewards on recorded episodes."),
    "plugins": Command(".plugins", "list_plugins", CHECK, "List every installed component."),
}
OF_THE_SERVER = ("init", "train", "eval", "run", "runs", "rollouts", "show", "export", "import", "doctor")
"""Commands that `pip install agl-server` adds."""


class _Commands(TyperGroup):
    """The group of all commands, each of which is imported when it is called."""

    def list_commands(self, ctx: Context) -> list[str]:
        added = [name for name in super().list_commands(ctx) if name not in COMMANDS]
        return [*COMMANDS, *added]

    def get_command(self, ctx: Context, cmd_name: str) -> ClickCommand | None:
        listed = COMMANDS.get(cmd_name)
        if listed is None or cmd_name in self.commands:
            return super().get_command(ctx, cmd_name)
        return TyperCommand(cmd_name, help=listed.help, rich_markup_mode="markdown", rich_help_panel=listed.panel)

    def resolve_command(self, ctx: Context, args: list[str]) -> tuple[str | None, ClickCommand | None, list[str]]:
        if args[0] in COMMANDS and args[0] not in self.commands:
            self.add_command(COMMANDS[args[0]].load(args[0]), args[0])
        elif args[0] not in self.commands and not args[0].startswith("-"):
            if args[0] in OF_THE_SERVER:
                ctx.fail(f"'{args[0]}' comes with agl-server: pip install agl-server")
            ctx.fail(f"There is no command '{args[0]}'. {nearest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    name="agl",
    help="Train LLM agents that already exist, by reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # Paragraphs flow: their lines are broken once, at the width of the terminal.
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


class HarmlessFormatter(logging.Formatter):
    """For messages that may quote agents."""

    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


def main() -> None:
    """Run the command line: AglErrors and errors of files end with status 2, Ctrl-C with 130."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(HarmlessFormatter())
    try:
        add_installed(app)
        app()
    except (AglError, ModuleNotFoundError, OSError) as error:
        message = _message(error)
        if message is None or "--debug" in sys.argv:
            raise
        typer.secho(f"Error: {harmless(message)}", fg=typer.colors.RED, err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def add_installed(cli: typer.Typer) -> None:
    """Let installed packages add their commands; one that fails is named, and the others stay."""
    for entry in sorted(importlib.metadata.entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
        try:
            entry.load()(cli)
        except Exception as error:
            origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
            message = f"The commands of {origin} cannot be used ({type(error).__name__}: {error}). Reinstall it."
            typer.secho(f"Warning: {harmless(message)}", fg=typer.colors.YELLOW, err=True)


def _message(error: Exception) -> str | None:
    """The message to the user; None for an unexpected error."""
    if isinstance(error, AglError):
        return str(error)
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in EXPORT_MODULES:
        return f"This needs {missing}, which is not installed: pip install 'agl-server[export]'"
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"{error.filename} cannot be read, made or written ({error.strerror}). Check that it is there, its "
            f"permissions and the disk. --debug shows what needed it."
        )
    return None
