"""Options and arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agl_core.types import Mode, Verdict

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

# Runs and configurations
Run = Annotated[Path, typer.Argument(help="The run: its folder, or its name below ./runs.")]
NewestRun = Annotated[Path | None, typer.Argument(help="The run; by default the newest below ./runs.")]
Runs = Annotated[list[Path], typer.Argument(help="Runs: folders, or names below ./runs.")]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Overrides one key, e.g. train.steps=20. Repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="Overrides the file's seed.")]

# Filters of rollouts
Step = Annotated[int | None, typer.Option(help="Only of this step.")]
ModeOption = Annotated[Mode | None, typer.Option("--mode", help="Only of this mode.")]
Split = Annotated[str | None, typer.Option(help="Only of tasks of this split.")]
MinReward = Annotated[float | None, typer.Option(help="Only with at least this terminal reward.")]
MaxReward = Annotated[float | None, typer.Option(help="Only with at most this terminal reward.")]
Agent = Annotated[str | None, typer.Option(help="Only those in which this agent made a call.")]
VerdictOption = Annotated[
    Verdict | None, typer.Option("--verdict", help="Only those with this verdict (docs/health.md).")
]

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
