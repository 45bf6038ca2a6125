"""The page of a run's health: its alarms, its verdicts by step, and the sick rollouts of the latest step."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from agl_core.analysis.filters import Query, list_rollouts
from agl_core.analysis.health import read_health
from agl_core.analysis.rollouts import healths_of
from agl_core.analysis.runs import open_store, read_entry
from agl_core.types import Verdict
from agl_core.view.pages import Pages
from agl_core.view.templating import page_address

_SHOWN = 20
"""Rollouts of each verdict."""


async def health_page(pages: Pages, request: Request) -> Response:
    """Alarms first, those that hold still at the top."""
    name, folder = pages.found(request)
    entry, health = read_entry(folder), read_health(folder)
    step = health.verdicts[-1][0] if health.verdicts else 1
    sick = []
    async with open_store(folder) as store:
        for verdict in (Verdict.UNHEALTHY, Verdict.UNOBSERVED):
            found = (await list_rollouts(store, Query(step=step, verdict=verdict), _SHOWN)).entries
            healths = await healths_of(store, [entry.rollout for entry in found])
            sick.append((verdict, [(entry.rollout, healths[entry.rollout.id]) for entry in found]))
    return pages.render(
        request,
        "health.html",
        entry=entry,
        health=health,
        alarms=sorted(health.alarms, key=lambda alarm: (not alarm.holds, -alarm.step)),
        verdicts=list(reversed(health.verdicts)),
        columns=list(Verdict),
        sick=sick,
        step=step,
        changed=page_address("runs", name, "changed") if entry.state == "running" else None,
    )
