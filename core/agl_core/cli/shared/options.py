"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, e.g. train.steps=20. Repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="Overrides the file's seed.")]
RunOption = Annotated[Path | None, typer.Option("--run", help="The run's folder; by default the newest below ./runs.")]
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
