"""The page of a run's health: its alarms, its verdicts by step, and the sick rollouts of the latest step."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agl_core.reading.metrics import read_health
from agl_core.reading.rollouts import Query, list_rollouts
from agl_core.reading.runs import read_entry
from agl_core.types import Mode, Verdict
from agl_view.pages.base import Pages
from agl_view.templating import page_address

_LOOKED_AT, _SHOWN = 400, 20
"""How many training rollouts of the latest step are looked at, the newest, and how many of each verdict are shown."""


async def health_page(pages: Pages, request: Request) -> Response:
    """Alarms first, those that hold still at the top."""
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
