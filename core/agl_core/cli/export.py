"""`agl export`: a run's data for other tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from agl_core.cli.options import Agent, AsJson, MaxReward, MinReward, ModeOption, Run, Split, Step, VerdictOption
from agl_core.cli.screen import print_json
from agl_core.reading.export import Format, export_run
from agl_core.reading.rollouts import Query
from agl_core.reading.runs import find_run

To = Annotated[Format, typer.Option("--to", help="The format; docs/data.md has what each carries.")]
Out = Annotated[Path, typer.Option(help="What to make: a folder with parquet, else one file, for instance sft.jsonl.")]


def export(
    run: Run,
    to: To,
    out: Out,
    step: Step = None,
    mode: ModeOption = None,
    split: Split = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    agent: Agent = None,
    verdict: VerdictOption = None,
    as_json: AsJson = False,
) -> None:
    """Write what was recorded of a run for other tools: tables, episodes, or conversations to train on.

    parquet is a folder with a table of transitions and one of episodes. episodes is what agl import and
    agl_core.load_episodes take. sft and preferences are what TRL's SFTTrainer and DPOTrainer take, and leave
    evaluations out unless --mode or --split asks for them. Of --agent, only its own transitions are written. What is
    written appears whole or not at all.

    For instance: agl export calc --to sft --min-reward 1 --out sft.jsonl
    """
    query = Query(step, mode, agent=agent, low=min_reward, high=max_reward, split=split, verdict=verdict)
    exported = asyncio.run(export_run(find_run(run), to, out, query))
    if as_json:
        print_json(exported)
        return
    typer.echo(f"{exported.out}: {', '.join(f'{count} {name}' for name, count in exported.rows.items())}")
    for reason, count in exported.left_out.items():
        if count:
            typer.echo(f"left out: {count} rollouts that are {reason}")
    if exported.pruned:
        typer.echo(f"note: the calls of {exported.pruned} rollouts were pruned, so they have no texts and no tokens")
