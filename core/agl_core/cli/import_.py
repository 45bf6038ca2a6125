"""`agl import`: recorded conversations as a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import AsJson
from agl_core.cli.screen import print_json
from agl_core.reading.importing import import_file
from agl_core.reading.runs import RUNS

File = Annotated[
    Path,
    typer.Argument(
        help="Conversations in OpenAI's chat format, or episodes (agl export --to episodes), one JSON object a line."
    ),
]
Name = Annotated[str, typer.Option(help="The run's folder below ./runs.")]


def import_(file: File, name: Name = "imported", as_json: AsJson = False) -> None:
    """Make a run of recorded conversations, to look at, to score, to export and to train on.

    Each assistant message is a call: what comes before it is its prompt. Beside `messages` and `tools` a line may have
    `id` (lines with the same id are rollouts of one task), `split`, `reward` and `model`; any other key is the task's
    metadata, which reward rules see. If a line is wrong, it is named, and nothing is imported.
    """
    imported = asyncio.run(import_file(file, name, RUNS))
    if as_json:
        print_json(imported)
        return
    typer.echo(f"{imported.run}: {imported.rollouts} rollouts, {imported.calls} calls")
    typer.echo(f"next: agl rollouts {imported.run}")
