"""`agl reward try` as a form: what other weights, settings or another credit rule would make of recorded rollouts."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from agl_core import kinds
from agl_core.config import CONFIG_FILE, check
from agl_core.config.load import SCORED, load, read_config
from agl_core.config.models import RunConfig
from agl_core.errors import AglError
from agl_core.plugins import Plugins
from agl_core.reading.metrics import read_metrics
from agl_core.reading.trying import Trial, try_run
from agl_view.pages.base import Pages, read_query


async def try_page(pages: Pages, request: Request) -> Response:
    """Nothing is tried until something is changed, and nothing is written then."""
    _, folder = pages.found(request)
    asked = request.query_params
    recorded = read_config(folder / CONFIG_FILE)
    weights = {rule: section.weight for rule, section in recorded.rewards.items()}
    changes = _changes(recorded, asked)
    rollout = asked.get("rollout", "").strip()
    step = read_query(request).step
    if step is None and not rollout:
        step = max((line.step for line in read_metrics(folder) if line.kind == "train"), default=None)
    trial: Trial | None = None
    problem = None
    trusted = "trusted" in asked
    if changes and not trusted:
        problem = "Trying runs the code of the run's rules and plugin files, with your rights. Tick that you trust it."
    elif changes:
        try:
            loaded = load(folder / CONFIG_FILE, changes, needs=SCORED)
            check(loaded)
            ids = [rollout] if rollout else []
            trial = await try_run(folder, pages.folders.open_store(folder), loaded, ids, None if rollout else step)
        except AglError as error:
            problem = str(error)
    return pages.render(
        request,
        "try.html",
        weights={rule: asked.get(f"weight.{rule}") or weight for rule, weight in weights.items()},
        recorded=weights,
        credit=asked.get("credit") or recorded.credit.name,
        credits=sorted({recorded.credit.name, *Plugins.load().components(kinds.CREDIT)}),
        settings=asked.get("settings", ""),
        rollout=rollout,
        step=step,
        changes=changes,
        trusted=trusted,
        trial=trial,
        problem=problem,
    )


def _changes(recorded: RunConfig, asked: Mapping[str, str]) -> list[str]:
    """What the form says otherwise than the run's configuration, as `--set` takes it."""
    found = [
        f"rewards.{rule}.weight={given}"
        for rule, section in recorded.rewards.items()
        if (given := asked.get(f"weight.{rule}", "").strip()) and given != f"{section.weight}"
    ]
    if asked.get("credit") and asked["credit"] != recorded.credit.name:
        found.append(f"credit.name={asked['credit']}")
    return found + [line.strip() for line in asked.get("settings", "").splitlines() if line.strip()]
