"""`agl rollouts`: the rollouts of a run, a line each."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from agl_core.cli.options import Agent, AsJson, MaxReward, MinReward, ModeOption, NewestRun, Split, Step, VerdictOption
from agl_core.cli.screen import Screen, print_json
from agl_core.learning import Health
from agl_core.reading.explained import healths_of
from agl_core.reading.rollouts import Query, RolloutList, list_rollouts
from agl_core.reading.runs import read_run
from agl_core.reading.words import number, one_line, plain
from agl_core.store.interface import Store
from agl_core.types import Ending, ToolStatus

EndingOption = Annotated[Ending | None, typer.Option("--ending", help="Only those that ended like this.")]
Policy = Annotated[str | None, typer.Option(help="Only those in which this policy answered a call.")]
Tool = Annotated[str | None, typer.Option(help="Only those in which this tool was called.")]
Status = Annotated[
    ToolStatus | None, typer.Option("--tool-status", help="Only those in which a tool (of --tool) came to this.")
]
Dropped = Annotated[str | None, typer.Option(help="Only those with a transition dropped for this reason.")]
TextOption = Annotated[str | None, typer.Option("--text", help="Only those with this text in task, call or result.")]
Limit = Annotated[int, typer.Option(min=1, help="The number of rollouts, the newest ones.")]


def rollouts(
    run: NewestRun = None,
    step: Step = None,
    mode: ModeOption = None,
    split: Split = None,
    ending: EndingOption = None,
    agent: Agent = None,
    policy: Policy = None,
    tool: Tool = None,
    tool_status: Status = None,
    dropped: Dropped = None,
    min_reward: MinReward = None,
    max_reward: MaxReward = None,
    text: TextOption = None,
    verdict: VerdictOption = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the rollouts of a run, the newest last."""
    query = Query(
        *(step, mode, ending, agent, policy, tool, tool_status, dropped, min_reward, max_reward, text, split, verdict)
    )

    async def read(store: Store) -> tuple[RolloutList, dict[str, Health]]:
        listed = await list_rollouts(store, query, limit)
        return listed, await healths_of(store, [entry.rollout for entry in listed.entries])

    listed, healths = read_run(run, read)
    if as_json:
        rows = []
        for entry in listed.entries:
            health = healths.get(entry.rollout.id)
            verdict_of = health and {"verdict": health.verdict, "reasons": health.symptoms or health.missing}
            rows.append({"superseded": entry.superseded, "rewards": entry.rewards, "health": verdict_of})
            rows[-1] |= plain(entry.rollout)
        print_json(rows)
        return
    screen = Screen()
    for line in _lines(listed, healths):
        # A terminal shows what of a line has room: an id is there to be copied, a reward to be compared.
        screen.print(one_line(line, screen.width))
    if listed.pruned:
        screen.print("The calls of old steps were pruned (agl runs prune); agl show has what is left of them.")


def _lines(listed: RolloutList, healths: dict[str, Health]) -> list[str]:
    rows = [("rollout", "reward", "mode", "ended", "try", "health", "task")]
    for entry in listed.entries:
        rollout = entry.rollout
        rewards = ", ".join(f"{one_line(r.name, 40)} {number(r.value)}" for r in entry.rewards if r.call is None)
        rows.append(
            (
                rollout.id + (" (superseded)" if entry.superseded else ""),
                rewards or "-",
                rollout.mode.value,
                rollout.ending.value if rollout.ending else rollout.state.value,
                "-" if rollout.counted_attempt is None else str(rollout.counted_attempt + 1),
                healths[rollout.id].text if rollout.id in healths else "-",
                json.dumps(rollout.task.input, ensure_ascii=False),
            )
        )
    *widths, _ = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
