"""`agl rollouts`: what was recorded, a line each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.analysis.text.words import number, one_line
from agl_core.cli.shared.options import AsJson
from agl_core.cli.shared.text import print_json
from agl_core.types import Ending, Mode, ToolStatus, Verdict

if TYPE_CHECKING:
    from agl_core.analysis.rollouts import RolloutList
    from agl_core.learning import Health
    from agl_core.store.interface import Store
    from agl_core.types import Rollout

RunArgument = Annotated[Path | None, typer.Argument(help="The run's folder; by default the newest below ./runs.")]
Step = Annotated[int | None, typer.Option(help="Only of this step.")]
ModeOption = Annotated[Mode | None, typer.Option(help="Only of this mode.")]
EndingOption = Annotated[Ending | None, typer.Option(help="Only those that ended like this.")]
Agent = Annotated[str | None, typer.Option(help="Only those in which this agent made a call.")]
Policy = Annotated[str | None, typer.Option(help="Only those in which this policy answered a call.")]
Tool = Annotated[str | None, typer.Option(help="Only those in which this tool was called.")]
Status = Annotated[
    ToolStatus | None, typer.Option("--tool-status", help="Only those in which a tool (of --tool) came to this.")
]
Dropped = Annotated[str | None, typer.Option(help="Only those with a transition dropped for this reason.")]
Low = Annotated[float | None, typer.Option(help="Only those with at least this terminal reward.")]
High = Annotated[float | None, typer.Option(help="Only those with at most this terminal reward.")]
TextOption = Annotated[str | None, typer.Option("--text", help="Only those with this text in task, call or result.")]
VerdictOption = Annotated[Verdict | None, typer.Option(help="Only those with this verdict (docs/health.md).")]
Limit = Annotated[int, typer.Option(min=1, help="The number of rollouts, the newest ones.")]

_SHORT_ID = 12
"""Characters of an id that even a narrow terminal shows."""


def rollouts(
    run: RunArgument = None,
    step: Step = None,
    mode: ModeOption = None,
    ending: EndingOption = None,
    agent: Agent = None,
    policy: Policy = None,
    tool: Tool = None,
    tool_status: Status = None,
    dropped: Dropped = None,
    low: Low = None,
    high: High = None,
    text: TextOption = None,
    verdict: VerdictOption = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the rollouts of a run, the newest last."""
    from rich.table import Table

    from agl_core.analysis.filters import Query, list_rollouts
    from agl_core.analysis.rollouts import healths_of
    from agl_core.analysis.runs import read_run
    from agl_core.analysis.text.plain import plain
    from agl_core.cli.shared.screen import Screen

    query = Query(
        step=step,
        mode=mode,
        ending=ending,
        agent=agent,
        policy=policy,
        tool=tool,
        status=tool_status,
        dropped=dropped,
        low=low,
        high=high,
        text=text,
        verdict=verdict,
    )

    async def read(store: Store) -> tuple[RolloutList, dict[str, Health]]:
        listed = await list_rollouts(store, query, limit)
        return listed, await healths_of(store, [entry.rollout for entry in listed.entries])

    found, healths = read_run(run, read)
    if as_json:
        flat = (
            {
                "superseded": e.superseded,
                "rewards": e.rewards,
                "health": _plain(healths.get(e.rollout.id)),
                **plain(e.rollout),
            }
            for e in found.entries
        )
        print_json(list(flat))
        return
    screen = Screen()
    table = Table(expand=screen.is_terminal, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    rows = [
        (
            entry.rollout.id + (" (superseded)" if entry.superseded else ""),
            ", ".join(f"{one_line(r.name, 40)} {number(r.value)}" for r in entry.rewards if r.call is None) or "-",
            entry.rollout.mode.value,
            _ended(entry.rollout),
            "-" if entry.rollout.counted_attempt is None else str(entry.rollout.counted_attempt + 1),
            healths[entry.rollout.id].text if entry.rollout.id in healths else "-",
            one_line(json.dumps(entry.rollout.task.input, ensure_ascii=False), screen.width),
        )
        for entry in found.entries
    ]
    widest = [max((len(row[place]) for row in rows), default=0) for place in range(5)]
    # A narrow terminal crops from the right: an id is there to be copied, a reward to be compared.
    widest[0] = min(widest[0], max(screen.width - widest[1] - 2, _SHORT_ID))
    for column, width in zip(("rollout", "reward", "mode", "ended", "try"), widest, strict=True):
        table.add_column(column, no_wrap=True, min_width=width)
    table.add_column("health", no_wrap=True)
    table.add_column("task", no_wrap=True, ratio=1)
    for row in rows:
        table.add_row(*row)
    screen.print(table)
    if found.pruned:
        screen.print("The calls of old steps were pruned (agl runs prune); agl show has what is left of them.")


def _ended(rollout: Rollout) -> str:
    return rollout.ending.value if rollout.ending else rollout.state.value


def _plain(health: Health | None) -> dict[str, object] | None:
    return None if health is None else {"verdict": health.verdict, "reasons": health.symptoms or health.missing}
