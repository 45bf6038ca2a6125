"""Writes docs/cli.md from the commands themselves.

`python docs/make_cli.py` writes it, `--check` fails if it is not up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer.main
from generated import check_apps, write_or_check
from typer.cli import get_docs_for_click

from agl_core.cli import add_installed, app

OUT = Path(__file__).with_name("cli.md")
HEAD = """# The command line

What `agl COMMAND --help` says in the terminal, on one page. Options of every command stand before it:
`agl --debug train train.toml` shows the traceback of an error, `agl --version` prints the version. Plugins can add
commands; `agl plugins` lists them.

`make docs` generates this page from the commands.
"""


def render() -> str:
    """The whole page."""
    add_installed(app)
    group: Any = typer.main.get_command(app)
    context = group.make_context("agl", [], resilient_parsing=True)
    parts = [HEAD]
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        parts.append(get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="agl", indent=1).strip())
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    check_apps()
    sys.exit(write_or_check(OUT, render()))
