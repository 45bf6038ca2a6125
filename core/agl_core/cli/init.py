"""`agl init`: the files with which the training of one's own agent begins."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(help="The Python file of your agent; the new files are written beside it.")]
Entry = Annotated[str | None, typer.Option(help="The function in it that takes a task's input; found by default.")]
Model = Annotated[
    str | None,
    typer.Option(help="The model to train: a folder, or a Hugging Face hub name. Offered if absent: a small one."),
]
_TO_START_WITH = "Qwen/Qwen2.5-0.5B-Instruct"
"""Small, and it can call tools."""

Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")]


def init(agent: File, entry: Entry = None, model: Model = None, force: Force = False) -> None:
    """Write train.toml, reward.py and tasks.jsonl for your agent: they run as they are, and are yours to change.

    For instance: agl init my_agent.py --model Qwen/Qwen2.5-0.5B-Instruct
    """
    from agl_core.starting.agent_file import read_agent_file
    from agl_core.starting.files import CONFIG, write_files

    found = read_agent_file(agent, entry, _choose)
    kind = "async def" if found.is_async else "def"
    takes = f"an object with {', '.join(found.keys)}" if found.keys else "a text"
    typer.echo(f"agent: {kind} {found.function} in {found.file}, which takes {takes}")
    typer.echo(
        f"framework: {', '.join(found.frameworks)}"
        if found.frameworks
        else "framework: none that an installed adapter knows; its LLM calls are recorded all the same"
    )
    if model is None:
        typer.echo(
            f"model: to start with, {_TO_START_WITH} (1 GB from the Hugging Face hub; it knows tools). Smaller, but "
            f"without tools: HuggingFaceTB/SmolLM2-135M-Instruct. Any other folder or hub name will do."
        )
        model = typer.prompt("Model to train", default=_TO_START_WITH) if sys.stdin.isatty() else _TO_START_WITH
    for path in write_files(found, model, force=force):
        typer.echo(f"wrote {path}")
    typer.echo(
        "tasks: the eight sums in tasks.jsonl only show the form. Without tasks of your own yet, take some of "
        'reasoning-gym\'s hundred kinds, which have verifiers: source = "reasoning_gym" (docs/data.md)'
    )
    typer.echo(f"next: agl train {found.file.parent / CONFIG}")


def _choose(functions: Sequence[str]) -> str | None:
    if not sys.stdin.isatty():
        return None
    import click

    answer: str = typer.prompt("Which function is the agent?", type=click.Choice(list(functions)))
    return answer
