"""`agl export`: a run's data for other tools."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.analysis.export.formats import Format
from agl_core.cli.recorded.rollouts import ModeOption, VerdictOption
from agl_core.cli.shared.options import AsJson
from agl_core.cli.shared.text import print_json
from agl_core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from agl_core.analysis.export.exporting import Export

Run = Annotated[Path, typer.Argument(help="The run: its folder, or its name below ./runs.")]
To = Annotated[Format, typer.Option("--to", help="The format; docs/data.md has what each carries.")]
Out = Annotated[
    Path,
    typer.Option(help="What to make: a folder of tables; of sft and preferences one file, for instance sft.jsonl."),
]
Table = Annotated[
    list[str],
    typer.Option("--table", help="transitions, episodes, rewards, credits or metrics. Repeatable; by default all."),
]
Steps = Annotated[str | None, typer.Option("--step", metavar="N or N-M", help="Only of this step, or these.")]
Split = Annotated[str | None, typer.Option(help="Only of tasks of this split.")]
Low = Annotated[float | None, typer.Option(help="Only with at least this terminal reward.")]
High = Annotated[float | None, typer.Option(help="Only with at most this terminal reward.")]
Agent = Annotated[str | None, typer.Option(help="Only what this agent did: its transitions, and their rollouts.")]


def export(
    run: Run,
    to: To,
    out: Out,
    table: Table = [],  # noqa: B006
    step: Steps = None,
    mode: ModeOption = None,
    split: Split = None,
    min_reward: Low = None,
    max_reward: High = None,
    agent: Agent = None,
    verdict: VerdictOption = None,
    as_json: AsJson = False,
) -> None:
    """Write what was recorded of a run for other tools: tables, or conversations to train on.

    parquet, hf (Hugging Face datasets), jsonl and csv are folders with a table each of transitions, episodes, rewards,
    credits and metrics. sft and preferences are what TRL's SFTTrainer and DPOTrainer take, and leave evaluations out
    unless --mode or --split asks for them. What is written appears whole or not at all.

    For instance: agl export calc --to sft --min-reward 1 --out sft.jsonl
    """
    from agl_core.analysis.export.exporting import export_run
    from agl_core.analysis.export.selecting import Selection
    from agl_core.analysis.export.tables import TABLES
    from agl_core.analysis.runs import find_run

    for unknown in set(table) - set(TABLES):
        raise ConfigError(f"--table {unknown}: there is no such table. {nearest(unknown, TABLES)}")
    held_out = to.is_tables or mode is not None or split is not None
    selection = Selection(_steps(step), mode, split, min_reward, max_reward, agent, verdict, held_out)
    found = asyncio.run(export_run(find_run(run), to, out, selection, table or tuple(TABLES)))
    if as_json:
        print_json(found)
    else:
        _say(found)


def _say(found: Export) -> None:
    typer.echo(f"{found.out}: {', '.join(f'{count} {name}' for name, count in found.rows.items())}")
    left_out = found.left_out
    for count, why in (
        (left_out.unfinished, "are not done"),
        (left_out.superseded, "were superseded by a later restart"),
        (left_out.held_out, "are evaluations (--mode or --split takes them)"),
        (left_out.unwanted, "are not what the filters ask for"),
    ):
        if count:
            typer.echo(f"left out: {count} rollouts that {why}")
    if found.pruned:
        typer.echo(f"note: the calls of {found.pruned} rollouts were pruned, so they have no texts and no tokens")


def _steps(written: str | None) -> tuple[int, int] | None:
    if written is None:
        return None
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", written)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if first > last:
        raise ConfigError(f"--step {written}: must be a step (--step 3), or the first and the last one (--step 3-7).")
    return first, last
