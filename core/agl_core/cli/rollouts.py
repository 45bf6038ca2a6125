"""`agl rollouts`: what was recorded, a line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.cli.as_json import AsJson, print_json
from agl_core.cli.reading import read_run, superseded
from agl_core.cli.text import number, printable
from agl_core.types import AttemptKey, Ending, Mode, Reward, Rollout
from agl_core.types.forms import to_json

if TYPE_CHECKING:
    from agl_core.store.interface import Store

RunArgument = Annotated[
    Path | None, typer.Argument(help="The run's folder; the newest below ./runs by default.", show_default=False)
]
Step = Annotated[int | None, typer.Option(help="Only of this step.", show_default=False)]
ModeOption = Annotated[Mode | None, typer.Option(help="Only of this mode.", show_default=False)]
EndingOption = Annotated[Ending | None, typer.Option(help="Only those that ended like this.", show_default=False)]
Limit = Annotated[int, typer.Option(min=1, help="The newest so many.")]


def rollouts(
    run: RunArgument = None,
    step: Step = None,
    mode: ModeOption = None,
    ending: EndingOption = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the rollouts of a run, the newest last."""
    from rich.table import Table

    from agl_core.cli.screen import Screen

    async def read(store: Store) -> tuple[list[tuple[Rollout, list[Reward]]], bool]:
        found = await store.rollouts(step=step, mode=mode)
        newest = [r for r in found if ending is None or r.ending is ending][-limit:]
        return [(r, await _rewards(store, r)) for r in newest], await _pruned(store, newest)

    (rows, pruned), runs = read_run(run, read)
    if as_json:
        print_json([{**to_json(r), "superseded": superseded(r, runs), "rewards": rewards} for r, rewards in rows])
        return
    screen = Screen()
    table = Table(expand=screen.is_terminal, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    widest = max((len(rollout.id) for rollout, _ in rows), default=0)
    table.add_column("rollout", no_wrap=True, min_width=widest)  # An id is there to be copied.
    for column in ("mode", "ended", "try", "reward"):
        table.add_column(column, no_wrap=True)
    table.add_column("task", no_wrap=True, ratio=1)
    for rollout, rewards in rows:
        table.add_row(
            rollout.id + (" (superseded)" if superseded(rollout, runs) else ""),
            rollout.mode.value,
            rollout.ending.value if rollout.ending else rollout.state.value,
            "-" if rollout.counted_attempt is None else str(rollout.counted_attempt + 1),
            ", ".join(f"{printable(r.name, 40)} {number(r.value)}" for r in rewards if r.call is None) or "-",
            printable(json.dumps(rollout.task.input, ensure_ascii=False), screen.width),
        )
    screen.print(table)
    if pruned:
        screen.print("The calls of old steps were pruned (agl runs prune): agl show tells what is left of them.")


async def _pruned(store: Store, rollouts: Sequence[Rollout]) -> bool:
    """Whether calls of the oldest step among these were pruned."""
    done = [r for r in rollouts if r.counted_attempt is not None]
    first = min(done, key=lambda rollout: rollout.step, default=None)
    if first is None or first.counted_attempt is None:
        return False
    return any(call.pruned for call in await store.calls([AttemptKey(first.id, first.counted_attempt)]))


async def _rewards(store: Store, rollout: Rollout) -> list[Reward]:
    keys = [a.key for a in await store.attempts(rollout.id) if a.attempt == rollout.counted_attempt]
    return await store.rewards(keys)
