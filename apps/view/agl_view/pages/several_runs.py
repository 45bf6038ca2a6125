"""Pages about several runs: their curves on one chart, two evaluations on the same tasks, and one task of both."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from agl_core.analysis.comparisons.comparison import compare, evaluated
from agl_core.analysis.comparisons.side_by_side import align, read_side
from agl_core.analysis.curves.metrics import MetricsLine, held_out, keys_below, read_metrics, series
from agl_core.types import Mode
from agl_view.charts import Chart, Points, line_chart
from agl_view.pages.base import BadQueryError, Pages, member, run_line, whole
from agl_view.templating import page_address

MOST_RUNS = 4
_OVERLAID = {
    "Training reward": ("reward/mean", "mean over rollouts"),
    "Loss": ("update/loss", "of the update"),
    "KL divergence": ("update/kl_behaviour", "from the sampler"),
    "KL from the initial weights": ("update/kl_reference", "how far the policy has moved"),
    "Entropy": ("update/entropy", "nats per token"),
    "Response length": ("length/response", "tokens per call"),
    "Time": ("seconds/step", "seconds of each step"),
    "Gradient norm": ("update/grad_norm", "before clipping"),
}


async def overlay_page(pages: Pages, request: Request) -> Response:
    """The curves of the runs that the address names, each kind on one chart."""
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 1 <= len(names) <= MOST_RUNS:
        raise BadQueryError(f"Choose two to {MOST_RUNS} runs on the page of runs; the address names {len(names)}.")
    runs = {name: run_line(name, pages.folders.find(name)) for name in names}
    lines = {name: run.metrics for name, run in runs.items()}
    charts = [_overlaid(title, note, lines, key) for title, (key, note) in _OVERLAID.items()]
    sets = dict.fromkeys(kind for each in lines.values() for kind in held_out(each))
    evaluations = [
        line_chart(
            f"Reward, {kind.replace('/', ', ')}",
            "mean over held-out tasks",
            {name: held_out(each).get(kind, []) for name, each in lines.items()},
            wide=True,
        )
        for kind in sets
    ]
    return pages.render(
        request,
        "overlay.html",
        names=names,
        charts=[chart for chart in [*evaluations, *charts] if chart is not None],
        changed=page_address("changed") if any(run.is_running for run in runs.values()) else None,
    )


async def compare_page(pages: Pages, request: Request) -> Response:
    """Two evaluations: of two runs, by default the last of each; or of one run, by default its first and its last."""
    every = {
        name: sorted({line.step for line in read_metrics(folder) if line.kind == "eval"})
        for name, folder in pages.folders.named().items()
    }
    chosen = list(dict.fromkeys(request.query_params.getlist("run")))
    for name in chosen:
        pages.folders.find(name)
    if len(chosen) > 2:
        raise BadQueryError(f"Two runs can be compared; the address names {len(chosen)}.")
    mode = member(Mode, request.query_params.get("mode") or Mode.EVAL_GREEDY, "mode") or Mode.EVAL_GREEDY
    defaults: list[tuple[str, int]] = []
    if chosen:
        first, last = chosen[0], chosen[-1]
        at = every[first] or [0]
        defaults = [(first, at[0] if first == last else at[-1]), (last, (every[last] or [0])[-1])]
    sides = [_side(pages, request.query_params.get(key), at, defaults) for at, key in enumerate("ab")]
    found = []
    for name, step in sides:
        async with pages.folders.open_store(pages.folders.find(name)) as store:
            found.append(await evaluated(store, step, mode))
    return pages.render(
        request,
        "compare.html",
        sides=sides,
        mode=mode,
        modes=[each for each in Mode if each.evaluates],
        evaluations=[(name, step) for name, steps in every.items() for step in steps],
        found=compare(*found),
        counts=[len(each) for each in found],
    )


async def task_page(pages: Pages, request: Request) -> Response:
    """Two rollouts of one task side by side, each `RUN@ROLLOUT`, as those of two evaluations."""
    columns = []
    for key in "ab":
        name, _, rollout = request.query_params.get(key, "").rpartition("@")
        if not rollout:
            raise BadQueryError(f"{key} in the address must be RUN@ROLLOUT.")
        async with pages.folders.open_store(pages.folders.find(name)) as store:
            side = await read_side(store, rollout)
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


def _side(pages: Pages, given: str | None, at: int, defaults: Sequence[tuple[str, int]]) -> tuple[str, int]:
    if given:
        name, _, step = given.rpartition("@")
        pages.folders.find(name)
        return name, whole(step, "ab"[at])
    if not defaults:
        raise BadQueryError("Choose one or two runs on the page of runs to compare their evaluations.")
    return defaults[at]


def _overlaid(title: str, note: str, lines: dict[str, Sequence[MetricsLine]], key: str) -> Chart | None:
    return line_chart(title, note, {name: _of_key(each, key) for name, each in lines.items()})


def _of_key(lines: Sequence[MetricsLine], key: str) -> Points:
    """A number of a step; in a run of several policies, of the first of them."""
    first, _, last = key.rpartition("/")
    keys = [key, *(each for each in keys_below(lines, f"{first}/") if each.endswith(f"/{last}"))]
    return next((points for each in keys if (points := series(lines, "train", each))), [])
