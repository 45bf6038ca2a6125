"""Two evaluations on the same tasks, of two runs or of one: rewards, settings, tasks; one task side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import orjson
from starlette.requests import Request
from starlette.responses import Response

from agl_core.types import Mode, Task
from agl_server.health.verdict import held_out, read_metrics, series
from agl_server.reading.explained import RolloutEntry, read_group
from agl_server.reading.rollouts import Query, read_entries
from agl_server.reading.runs import read_settings
from agl_server.training.checkpoints import differences
from agl_view.charts import Points, line_chart
from agl_view.groups import align
from agl_view.pages import BadQueryError, Pages, read_query, whole
from agl_view.templating import page_address


@dataclass(frozen=True, slots=True)
class TaskPair:
    """One task's rollouts in both evaluations."""

    before: RolloutEntry
    after: RolloutEntry

    @property
    def change(self) -> float:
        """The rise of the reward; none counts as 0."""
        return (self.after.reward or 0.0) - (self.before.reward or 0.0)


async def compare_page(pages: Pages, request: Request) -> Response:
    """Compare two runs, by default their last evaluations, or one run's first evaluation and its last."""
    runs = pages.folders.named()
    metrics = {name: read_metrics(folder) for name, folder in runs.items()}
    steps = {name: sorted({line.step for line in lines if line.kind == "eval"}) for name, lines in metrics.items()}
    chosen = list(dict.fromkeys(request.query_params.getlist("run")))
    for name in chosen:
        pages.folders.find(name)
    if len(chosen) > 2:
        raise BadQueryError(f"Two runs can be compared; the address names {len(chosen)}.")
    mode = read_query(request).mode or Mode.EVAL_GREEDY
    defaults: list[tuple[str, int]] = []
    if chosen:
        first, last = chosen[0], chosen[-1]
        of_first = steps[first] or [0]
        defaults = [(first, of_first[0] if first == last else of_first[-1]), (last, (steps[last] or [0])[-1])]
    sides = [_side(pages, request.query_params.get(key), at, defaults) for at, key in enumerate("ab")]
    before, after = [await _evaluated(pages.folders.find(name), step, mode) for name, step in sides]
    pairs = [TaskPair(before[key], after[key]) for key in before if key in after]
    pairs.sort(key=lambda pair: pair.change, reverse=True)
    names = list(dict.fromkeys(name for name, _ in sides))
    curves: dict[str, Points] = {}
    for name in names:
        curves[f"{name}, training"] = series(metrics[name], "train", "reward/mean")
        curves |= {f"{name}, {kind.replace('/', ', ')}": points for kind, points in held_out(metrics[name]).items()}
    changes = differences(read_settings(runs[names[0]]), read_settings(runs[names[-1]]))
    return pages.render(
        request,
        "compare.html",
        sides=sides,
        mode=mode,
        modes=[mode for mode in Mode if mode.evaluates],
        evaluations=[(name, step) for name, of_run in steps.items() for step in of_run],
        means=[_mean_reward([pair.before for pair in pairs]), _mean_reward([pair.after for pair in pairs])],
        pairs_of_both=len(pairs),
        better=[pair for pair in pairs if pair.change > 0],
        worse=[pair for pair in reversed(pairs) if pair.change < 0],
        same=[pair for pair in pairs if pair.change == 0],
        unmatched=len(before.keys() ^ after.keys()),
        counts=[len(before), len(after)],
        chart=line_chart("Reward", "mean over rollouts", curves, wide=True) if len(names) > 1 else None,
        settings=[change for change in changes if change[0] != "name"],
    )


async def task_page(pages: Pages, request: Request) -> Response:
    """Two rollouts side by side, each named as `RUN@ROLLOUT`."""
    columns = []
    for key in "ab":
        name, _, rollout = request.query_params.get(key, "").rpartition("@")
        if not rollout:
            raise BadQueryError(f"{key} in the address must be RUN@ROLLOUT.")
        side = (await read_group(pages.folders.find(name), rollout)).chosen
        entry = side.entry.rollout
        columns.append((side, f"{name}, step {entry.step}", page_address("runs", name, "rollouts", entry.id)))
    first, second = (side.entry for side, _, _ in columns)
    rewards = [entry.reward for entry in (first, second) if entry.reward is not None]
    return pages.render(
        request,
        "compare_task.html",
        task=first.rollout.task,
        same=first.rollout.task.input == second.rollout.task.input,
        columns=columns,
        rows=align([side for side, _, _ in columns]),
        low=min([0.0, *rewards]),
        high=max([1.0, *rewards]),
    )


async def _evaluated(folder: Path, step: int, mode: Mode) -> dict[bytes, RolloutEntry]:
    """An evaluation's rollouts by task; the last one if a restart evaluated a task again."""
    return {_task_key(e.rollout.task): e for e in await read_entries(folder, Query(step=step, mode=mode))}


def _mean_reward(entries: Sequence[RolloutEntry]) -> float | None:
    """The mean reward, where none counts as 0; None without rollouts."""
    return fmean(entry.reward or 0.0 for entry in entries) if entries else None


def _task_key(task: Task) -> bytes:
    return orjson.dumps([task.id, task.input], option=orjson.OPT_SORT_KEYS, default=str)


def _side(pages: Pages, given: str | None, at: int, defaults: Sequence[tuple[str, int]]) -> tuple[str, int]:
    if given:
        name, _, step = given.rpartition("@")
        pages.folders.find(name)
        return name, whole(step, "ab"[at])
    if not defaults:
        raise BadQueryError("Choose one or two runs on the page of runs to compare their evaluations.")
    return defaults[at]
