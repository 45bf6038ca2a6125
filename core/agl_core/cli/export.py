"""`agl export`: a run's data for other tools."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import Agent, AsJson, MaxReward, MinReward, ModeOption, Run, Split, VerdictOption
from agl_core.cli.screen import print_json
from agl_core.errors import ConfigError, nearest
from agl_core.reading.export import Format, Selection, export_run
from agl_core.reading.runs import find_run
from agl_core.reading.tables import TABLES

To = Annotated[Format, typer.Option("--to", help="The format; docs/data.md has what each carries.")]
Out = Annotated[
    Path,
    typer.Option(help="What to make: a folder of tables; of sft and preferences one file, for instance sft.jsonl."),
]
TableNames = Annotated[
    list[str],
    typer.Option("--table", help="transitions, episodes, rewards, credits or metrics. Repeatable; by default all."),
]
Steps = Annotated[str | None, typer.Option("--step", metavar="N or N-M", help="Only of this step, or these.")]


def export(
    run: Run,
    to: To,
    out: Out,
    table: TableNames = [],  # noqa: B006
    step: Steps = None,
    mode: ModeOption = None,
    split: Split = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    agent: Agent = None,
    verdict: VerdictOption = None,
    as_json: AsJson = False,
) -> None:
    """Write what was recorded of a run for other tools: tables, or conversations to train on.

    parquet and jsonl are folders with a table each of transitions, episodes, rewards, credits and metrics. sft and
    preferences are what TRL's SFTTrainer and DPOTrainer take, and leave evaluations out unless --mode or --split asks
    for them. Of --agent, only its own transitions are written. What is written appears whole or not at all.

    For instance: agl export calc --to sft --min-reward 1 --out sft.jsonl
    """
    for unknown in set(table) - set(TABLES):
        raise ConfigError(f"--table {unknown}: there is no such table. {nearest(unknown, TABLES)}")
    held_out = to.is_tables or mode is not None or split is not None
    selection = Selection(_steps(step), mode, split, min_reward, max_reward, agent, verdict, held_out)
    exported = asyncio.run(export_run(find_run(run), to, out, selection, table or tuple(TABLES)))
    if as_json:
        print_json(exported)
        return
    typer.echo(f"{exported.out}: {', '.join(f'{count} {name}' for name, count in exported.rows.items())}")
    left_out = exported.left_out
    for count, reason in (
        (left_out.unfinished, "are not done"),
        (left_out.superseded, "were superseded by a later restart"),
        (left_out.held_out, "are evaluations (--mode or --split takes them)"),
        (left_out.unwanted, "are not what the filters ask for"),
    ):
        if count:
            typer.echo(f"left out: {count} rollouts that {reason}")
    if exported.pruned:
        typer.echo(f"note: the calls of {exported.pruned} rollouts were pruned, so they have no texts and no tokens")


def _steps(written: str | None) -> tuple[int, int] | None:
    if written is None:
        return None
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", written)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise ConfigError(f"--step {written}: must be a step (--step 3), or the first and the last one (--step 3-7).")
    return first, last
