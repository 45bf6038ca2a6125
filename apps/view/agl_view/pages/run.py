"""The pages of one run: its configuration, its curves and its rewards; and its health."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from agl_core.config.load import CONFIG_FILE
from agl_core.errors import AglError, ConfigError
from agl_core.types import Mode, Verdict
from agl_server.health.verdict import LOSSES, MetricsLine, counts, held_out, read_health, series
from agl_server.reading.rollouts import Query, list_rollouts, read_entries
from agl_server.reading.runs import read_entry, read_settings, read_start
from agl_view.charts import Chart, Link, Points, histogram, line_chart, stacked
from agl_view.pages import Pages, read_query, run_line
from agl_view.templating import page_address

_COLUMNS = {
    "reward": "reward/mean",
    "loss": "update/loss",
    "entropy": "update/entropy",
    "response": "length/response",
    "seconds": "seconds/step",
}
"""Columns of the table of steps."""
_LOOKED_AT, _SHOWN = 400, 20
"""The newest training rollouts that the health page reads, and rollouts that it shows of each verdict."""


async def run_page(pages: Pages, request: Request) -> Response:
    """Curves come from the metrics, rewards from the store; either is shown if the other cannot be read."""
    name, folder = pages.found(request)
    line = run_line(name, folder)
    entry, lines = line.entry, line.metrics
    if entry is None:
        raise ConfigError(f"{folder} is not what a run of agl writes. See its config.toml and metrics.jsonl.")
    trained = {line.step for line in lines if line.kind == "train"}
    last, chosen = max(trained, default=0), read_query(request).step
    step, rewards, problem, started = chosen or last, [], None, None
    try:
        started = await read_start(folder)
        for step in [last + 1, last] if chosen is None else [chosen]:  # The one under way, if it has any yet.
            entries = await read_entries(folder, Query(step=step, mode=Mode.TRAIN))
            if rewards := [e.reward for e in entries if e.reward is not None and not e.superseded]:
                break
    except AglError as error:
        problem = str(error)

    @cache  # Every chart has the same links.
    def link(at: int) -> str:
        return page_address("runs", name, "rollouts", step=at, mode="train" if at in trained else None)

    evaluated, training = held_out(lines), series(lines, "train", "reward/mean")
    sets = {key.replace("/", ", "): points for key, points in evaluated.items()}
    losses = {f"{name}, loss": points for name, points in held_out(lines, LOSSES).items()}
    imitation = _updates(lines, "loss", "training, loss") | losses
    return pages.render(
        request,
        "run.html",
        entry=entry,
        folder=folder,
        facts=_facts(folder, lines, started),
        settings=(folder / CONFIG_FILE).read_text(errors="replace"),
        problem=problem,
        step=step,
        trained=trained,
        last=last,
        rewards=_histogram(name, step, rewards, "rollouts" if step in trained else "rollouts so far"),
        main=line_chart("Reward", "mean over rollouts", {"training": training, **sets}, link, wide=True, whole=True)
        or line_chart("Loss", "nats per response token", imitation, link, wide=True),
        charts=_charts(lines, link),
        flat=len(trained) == 1,
        evaluations=[(kind, points[0], points[-1]) for kind, points in {**evaluated, **losses}.items() if points],
        latest={line.step: line.values for line in lines if line.kind == "train"}.get(last, {}),
        endings=counts([line.values for line in lines if line.kind == "train"], "ending/"),
        table=_table(lines),
        columns=list(_COLUMNS),
        link=link,
        changed=page_address("runs", name, "changed") if line.is_running else None,
    )


def _facts(folder: Path, lines: Sequence[MetricsLine], started: float | None) -> dict[str, str]:
    settings = read_settings(folder)
    models = [policy.get("model", {}).get("path") for policy in settings.get("policies", {}).values()]
    facts = {
        "model": ", ".join(dict.fromkeys(str(model) for model in models if model)),
        "algorithm": str(settings.get("algorithm", {}).get("name", "")),
    }
    latest = max((line.values.get("time", 0.0) for line in lines), default=0.0)
    if started:
        facts["started"] = f"{datetime.fromtimestamp(started):%Y-%m-%d %H:%M}"
        if latest > started:
            facts["until the latest step"] = str(timedelta(seconds=round(latest - started)))
    return {name: value for name, value in facts.items() if value}


def _charts(lines: Sequence[MetricsLine], link: Link) -> list[Chart]:
    equal = series(lines, "train", "groups/no_contrast")
    kl = {
        **_updates(lines, "kl_reference", "from the initial weights"),
        **_updates(lines, "kl_behaviour", "from the sampler"),
    }
    charts = [
        line_chart(
            "Groups without contrast", "share of groups whose rewards are all equal", {"": equal}, link, whole=True
        ),
        stacked("Dropped", "transitions that were not trained on, by reason", _by_kind(lines, "dropped/"), link),
        stacked("Proof", "trained tokens, by what is proved of them", _by_kind(lines, "proved/"), link),
        line_chart("Loss", "of the update", _updates(lines, "loss"), link),
        line_chart("KL divergence", "how far the policy has moved", kl, link),
        line_chart("Entropy", "of the policy, nats per token", _updates(lines, "entropy"), link),
        line_chart("Length", "tokens per call", _series(lines, "length/", "prompt", "response"), link),
        stacked("Time", "seconds of each step", _seconds(lines), link),
        stacked(
            "Tokens",
            "of each step, by what was done with them",
            _series(lines, "tokens/", "prefilled", "reused", "decoded"),
            link,
        ),
        line_chart("Staleness", "updates since the oldest call of a rollout", _staleness(lines), link),
        line_chart("Gradient norm", "before clipping", _updates(lines, "grad_norm"), link),
    ]
    return [chart for chart in charts if chart is not None]


def _keys_below(lines: Sequence[MetricsLine], prefix: str) -> list[str]:
    """The keys of training steps that begin with `prefix`, sorted."""
    return sorted({key for line in lines if line.kind == "train" for key in line.values if key.startswith(prefix)})


def _updates(lines: Sequence[MetricsLine], key: str, name: str = "") -> dict[str, Points]:
    """A metric of the update, one line for each policy."""
    keys = [path for path in _keys_below(lines, "update/") if path.split("/")[-1] == key]
    return {
        f"{path.split('/')[1]} {name}".strip() if path.count("/") > 1 else name: series(lines, "train", path)
        for path in keys
    }


def _by_kind(lines: Sequence[MetricsLine], prefix: str) -> dict[str, Points]:
    return {key.removeprefix(prefix): series(lines, "train", key) for key in _keys_below(lines, prefix)}


def _series(lines: Sequence[MetricsLine], prefix: str, *names: str) -> dict[str, Points]:
    return {name: series(lines, "train", f"{prefix}{name}") for name in names}


def _staleness(lines: Sequence[MetricsLine]) -> dict[str, Points]:
    """Empty in synchronous runs, where nothing is stale."""
    points = _series(lines, "staleness/", "mean", "max")
    return points if any(value for _, value in points["max"]) else {}


def _seconds(lines: Sequence[MetricsLine]) -> dict[str, Points]:
    phases = _series(lines, "seconds/", "rollouts", "update")
    rollouts, update = (dict(points) for points in phases.values())
    rest = [
        (step, max(0.0, seconds - rollouts.get(step, 0.0) - update.get(step, 0.0)))
        for step, seconds in series(lines, "train", "seconds/step")
    ]
    return {**phases, "other": rest}


def _histogram(name: str, step: int, rewards: Sequence[float], of: str) -> Chart | None:
    def link(low: float, high: float) -> str:
        return page_address(
            "runs", name, "rollouts", step=step, mode="train", min_reward=repr(low), max_reward=repr(high)
        )

    return histogram(f"Rewards of step {step}", f"{of} by terminal reward", rewards, link)


def _table(lines: Sequence[MetricsLine]) -> list[tuple[int, list[float | None]]]:
    train = [line for line in lines if line.kind == "train"]
    return [(line.step, [line.values.get(key) for key in _COLUMNS.values()]) for line in reversed(train)]


async def health_page(pages: Pages, request: Request) -> Response:
    """Alarms first, with those that still hold at the top."""
    name, folder = pages.found(request)
    entry, health = read_entry(folder), read_health(folder)
    step = health.verdicts[-1][0] if health.verdicts else 1
    newest = await list_rollouts(folder, Query(step=step, mode=Mode.TRAIN), _LOOKED_AT)
    sick = []
    for verdict in (Verdict.UNHEALTHY, Verdict.UNOBSERVED):
        reports = [report for report in newest if report.health is not None and report.health.verdict is verdict]
        sick.append((verdict, [(report.entry.rollout, report.health) for report in reports[-_SHOWN:]]))
    return pages.render(
        request,
        "health.html",
        entry=entry,
        health=health,
        alarms=sorted(
            ((health.holding.get(alarm.name) == step, step, alarm) for step, alarm in health.alarms),
            key=lambda row: row[:2],
            reverse=True,
        ),
        verdicts=list(reversed(health.verdicts)),
        columns=list(Verdict),
        sick=sick,
        step=step,
        changed=page_address("runs", name, "changed") if entry.state == "running" else None,
    )
