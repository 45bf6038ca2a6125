"""The page of a step's time: rollouts, engine and trainer, and who waited for whom."""

from __future__ import annotations

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from agl_core.analysis.curves.metrics import read_metrics
from agl_core.analysis.curves.timeline import Timeline, read_timeline
from agl_core.analysis.text.words import number
from agl_view.charts import tag, text
from agl_view.pages.base import Pages, read_query
from agl_view.templating import page_address

_WIDTH, _LEFT, _LANE, _GAP = 1000.0, 90.0, 14.0, 4.0
_PARTS = {"rollouts": "waiting", "update": "update", "other": "rest"}


async def timeline_page(pages: Pages, request: Request) -> Response:
    """One step, by default the last one that ended."""
    name, folder = pages.found(request)
    lines = read_metrics(folder)
    trained = sorted({line.step for line in lines if line.kind == "train"})
    asked = read_query(request).step
    step = asked if asked is not None else (trained or [1])[-1]
    async with pages.folders.open_store(folder) as store:
        found = await read_timeline(store, step, lines)
    return pages.render(
        request,
        "timeline.html",
        step=step,
        steps=trained,
        found=found,
        picture=None if found is None else _picture(name, found),
    )


def _picture(run: str, found: Timeline) -> Markup:
    span = max(found.end - found.start, 1e-9)

    def place(start: float, end: float, row: float) -> dict[str, str]:
        x = _LEFT + (_WIDTH - _LEFT) * (start - found.start) / span
        wide = max((_WIDTH - _LEFT) * (end - start) / span, 1.0)
        return {"x": f"{x:.1f}", "y": f"{row:.1f}", "width": f"{wide:.1f}", "height": f"{_LANE}"}

    parts, row = [text(_LEFT - 8, 11, "trainer", "end")], 0.0
    for what, start, end in found.trainer:
        said = f"{_PARTS[what]}: {number(end - start, 3)} s"
        parts.append(tag("rect", {"class": f"part part-{what}", **place(start, end, row)}, tag("title", {}, said)))
    row += _LANE + 2 * _GAP
    parts.append(text(_LEFT - 8, row + 11, "engine", "end"))
    parts += [tag("rect", {"class": "part part-engine", **place(start, end, row)}) for start, end in found.engine]
    row += _LANE + 2 * _GAP
    parts.append(text(_LEFT - 8, row + 11, "rollouts", "end"))
    for lane in found.lanes:
        for bar in lane:
            said = f"{bar.rollout}: {bar.said} after {number(bar.end - bar.start, 3)} s"
            kind = "fine" if bar.said == "finished" else "failed"
            link = {"href": page_address("runs", run, "rollouts", bar.rollout), "tabindex": "-1", "aria-label": said}
            place_of_bar = place(bar.start, bar.end, row)
            shown = tag("rect", {"class": f"part part-{kind}", **place_of_bar}, tag("title", {}, said))
            parts.append(tag("a", link, shown))
        row += _LANE + _GAP
    for at in range(6):
        where = _LEFT + (_WIDTH - _LEFT) * at / 5
        anchor = "start" if at == 0 else "end" if at == 5 else "middle"
        parts.append(text(where, row + 12, f"{number(span * at / 5, 3)} s", anchor))
    label = f"{len(found.lanes)} rollouts at once in {number(span, 3)} seconds"
    box = f"0 0 {_WIDTH:.0f} {row + 18:.0f}"
    return tag(
        "svg", {"class": "timeline", "viewBox": box, "role": "group", "aria-label": label}, Markup("").join(parts)
    )
