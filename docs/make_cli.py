"""Writes docs/cli.md from the commands themselves.

`python docs/make_cli.py` writes it, `--check` fails if it is not up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer.main
from generated import check_apps, write_or_check

from agl_core.cli import add_installed, app

OUT = Path(__file__).with_name("cli.md")
HEAD = """# The command line

What `agl COMMAND --help` says in the terminal, on one page. Options of every command stand before it:
`agl --debug train train.toml` shows the traceback of an error, `agl --version` prints the version. Plugins can add
commands; `agl plugins` lists them.

`make docs` generates this page from the commands.
"""
_WORDS = {"Path": "PATH", "int": "NUMBER", "float": "NUMBER", "str": "TEXT"}


def value(parameter: Any) -> str:
    """What stands for the value of an option or argument; empty for a flag."""
    annotation = parameter.type_descriptor.annotation
    annotation = next((each for each in get_args(annotation) if each is not type(None)), annotation)
    if parameter.metavar:
        return str(parameter.metavar)
    if annotation is bool:
        return ""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(each.value) for each in annotation)
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return _WORDS.get(annotation.__name__, "VALUE")


def escaped(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def row(parameter: Any) -> str:
    """One row of a command's table."""
    shown = value(parameter)
    is_argument = parameter.param_type_name == "argument"
    names = shown if is_argument else f"{', '.join(parameter.opts)} {shown}".strip()
    given = parameter.default
    default = "required" if parameter.required else "" if given in (None, False, [], ()) else f"`{given}`"
    return f"| `{escaped(names)}` | {default} | {escaped(parameter.help or '')} |"


def commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every command with its full name, in the order of the help; groups before their commands."""
    context = group.make_context(prefix, [], resilient_parsing=True)
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        full = f"{prefix} {name}"
        yield full, command
        if hasattr(command, "commands"):
            yield from commands(command, full)


def render() -> str:
    """The whole page."""
    add_installed(app)
    found = list(commands(typer.main.get_command(app), "agl"))
    lines = [HEAD, "| command | |", "|---|---|"]
    for name, command in found:
        first = re.split(r"(?<=\.)\s", " ".join((command.help or "").split("\n\n")[0].split()))[0]
        lines.append(f"| [`{name}`](#{name.replace(' ', '-')}) | {escaped(first)} |")
    for name, command in found:
        lines += ["", f"## `{name}`", "", (command.help or "").strip()]
        parameters = [each for each in command.params if each.name != "help" and not each.hidden]
        if parameters and not hasattr(command, "commands"):
            arguments = [value(each) for each in parameters if each.param_type_name == "argument"]
            lines += ["", "```", " ".join([name, "[OPTIONS]", *arguments]), "```"]
            lines += ["", "| | default | |", "|---|---|---|", *(row(each) for each in parameters)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    check_apps()
    sys.exit(write_or_check(OUT, render()))
