"""Charts as SVG: lines, stacked bars, histograms and sparklines. Colours are classes of the style sheet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

from markupsafe import Markup, escape

from agl_core.cli.words import ROUNDING, harmless, number

Points: TypeAlias = Sequence[tuple[int, float]]
"""(step, value) each."""
Link: TypeAlias = Callable[[int], str]
"""Step → address of its page."""

_WIDE, _MIDDLE, NARROW = (640, 260), (430, 240), (380, 170)
"""Width and height of a chart in units of about a pixel."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
_LEAST_TARGET = 4.0
"""Least width of the area of a step that can be pointed at; of denser steps, only some have one."""
_WIDEST_BAR = 90.0
_MOST_BARS = 60
"""Steps that have a bar each; more are areas."""
_COLOURS = 8


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    note: str
    svg: Markup
    legend: Sequence[tuple[str, str]]
    """(name, class of its colour) of each series."""


def line_chart(
    title: str,
    note: str,
    lines: Mapping[str, Points],
    link: Link | None = None,
    *,
    wide: bool = False,
    whole: bool = False,
    bands: Mapping[str, Points] = MappingProxyType({}),
) -> Chart | None:
    """One line for each name, which may be empty. Values that are not finite are left out; None if nothing is left.

    `bands` are outlines around lines, by the line's name. `whole`: an axis of shares goes from 0 to 1.
    """
    finite = {
        name: [(x, y if abs(y) > ROUNDING else 0.0) for x, y in points if math.isfinite(y)]
        for name, points in lines.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return None
    values = [y for points in (*finite.values(), *bands.values()) for _, y in points]
    low = min([0.0, *values]) if min(values) < 0.4 * max(values) else min(values)
    low, high = (0.0, 1.0) if whole and low >= 0 and max(values) <= 1 else (low, max(values))
    scale = Scale(_steps(finite), low, high, _WIDE if wide else NARROW)
    parts = [*scale.axes()]
    for at, (name, points) in enumerate(finite.items()):
        if name in bands:
            parts.append(tag("polygon", {"class": f"bar c{at % _COLOURS}", "points": scale.places(bands[name])}))
        if len(points) > 2:  # Two are a before and an after, with nothing known between them.
            parts.append(tag("polyline", {"class": f"line c{at % _COLOURS}", "points": scale.places(points)}))
        if len(points) <= 40:
            kind = f"dot c{at % _COLOURS}"
            parts += [tag("circle", {"class": kind, "cx": scale.x(x), "cy": scale.y(y), "r": 2.6}) for x, y in points]
    return _chart(title, note, scale, finite, [*parts, *_targets(scale, finite, link)])


def stacked(title: str, note: str, series: Mapping[str, Points], link: Link | None = None) -> Chart | None:
    """A bar for each step, one part for each name; areas if there are many steps. None if all are zero."""
    parts_of = {name: [(x, y) for x, y in points if math.isfinite(y) and y > 0] for name, points in series.items()}
    parts_of = {name: points for name, points in parts_of.items() if points}
    if not parts_of:
        return None
    sums: dict[int, float] = {}
    for x, y in (point for points in parts_of.values() for point in points):
        sums[x] = sums.get(x, 0.0) + y
    scale = Scale(_steps(series), 0.0, max(sums.values()), NARROW)
    width, below, parts = max(1.0, min(28.0, scale.pitch * 0.7)), dict.fromkeys(sums, 0.0), [*scale.axes()]
    for at, points in enumerate(parts_of.values()):
        if len(sums) > _MOST_BARS:
            own = dict(points)
            tops = {x: below[x] + own.get(x, 0.0) for x in sorted(sums)}
            edge = [*((x, tops[x]) for x in tops), *((x, below[x]) for x in reversed(tops))]
            parts.append(tag("polygon", {"class": f"bar c{at % _COLOURS}", "points": scale.places(edge)}))
            below = tops
            continue
        for x, y in points:
            parts.append(scale.bar(x, width, below[x], below[x] + y, at))
            below[x] += y
    return _chart(title, note, scale, parts_of, [*parts, *_targets(scale, parts_of, link)])


def histogram(title: str, note: str, values: Sequence[float], link: Callable[[float, float], str]) -> Chart | None:
    """Counts: a bar for each value, or for each of twelve ranges where there are more values."""
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return None
    bins = _bins(finite)
    counts = [sum(low <= value <= high for value in finite) for low, high in bins]
    scale = Scale(list(range(len(bins))), 0.0, max(counts) * 1.1, _MIDDLE, band=True)
    parts = [*scale.axes(x_labels=False)]
    width = min(scale.pitch * 0.82, _WIDEST_BAR)
    for at, ((low, high), count) in enumerate(zip(bins, counts, strict=True)):
        name = number(low, 3) if low == high else f"{number(low, 3)} – {number(high, 3)}"
        label = f"reward {name}: {count} rollouts"
        target = {"x": scale.x(at) - width / 2, "width": width, "y": _TOP, "height": scale.inside}
        inside = scale.bar(at, width, 0, count, 0)
        inside += tag("rect", {"class": "target", **target}, tag("title", {}, label))
        parts.append(tag("a", {"href": link(low, high), "aria-label": label}, inside))
        if len(bins) <= 6 or at % 2 == 0:
            parts.append(text(scale.x(at), scale.height - 7, number(low, 3), "middle"))
        parts.append(text(scale.x(at), scale.y(count) - 4, str(count), "middle", "count"))
    return _chart(title, note, scale, {}, parts)


def sparkline(values: Sequence[float], title: str) -> Markup:
    """A line as small as a word."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    low, high = min(finite), max(finite)
    span = (high - low) or 1.0
    points = [(2 + 116 * at / (len(finite) - 1), 24 - 20 * (v - low) / span) for at, v in enumerate(finite)]
    line = tag("polyline", {"class": "line c0", "points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points)})
    dot = tag("circle", {"class": "dot c0", "cx": points[-1][0], "cy": points[-1][1], "r": 2.4})
    label = f"{title}: from {number(finite[0], 3)} to {number(finite[-1], 3)}"
    return tag("svg", {"class": "spark", "viewBox": "0 0 120 28", "role": "img", "aria-label": label}, line + dot)


class Scale:
    """Coordinates of steps and values."""

    def __init__(
        self, steps: Sequence[int], low: float, high: float, size: tuple[int, int], *, band: bool = False
    ) -> None:
        self.steps = steps
        self.width, self.height = size
        self.inside = self.height - _TOP - _BOTTOM
        """Height between the ends of the axis."""
        self._ticks = _ticks(low, high)
        self._low, self._high = self._ticks[0], self._ticks[-1]
        self._first = steps[0]
        places = len(steps) if band else max(steps[-1] - steps[0] + 1, 1)
        self.pitch = (self.width - _LEFT - _RIGHT) / places
        """Width of one step."""

    def x(self, step: float) -> float:
        return _LEFT + self.pitch * (step - self._first + 0.5)

    def y(self, value: float) -> float:
        return self.height - _BOTTOM - self.inside * (value - self._low) / (self._high - self._low)

    def bar(self, step: float, width: float, low: float, high: float, colour: int) -> Markup:
        place = {"x": self.x(step) - width / 2, "y": self.y(high), "width": width}
        return tag("rect", {"class": f"bar c{colour % _COLOURS}", **place, "height": self.y(low) - self.y(high)})

    def places(self, points: Iterable[tuple[float, float]]) -> str:
        """The attribute `points` of a line or an area."""
        return " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)

    def axes(self, *, x_labels: bool = True) -> list[Markup]:
        parts = []
        for tick in self._ticks:
            y = self.y(tick)
            parts.append(tag("line", {"class": "grid", "x1": _LEFT, "x2": self.width - _RIGHT, "y1": y, "y2": y}))
            parts.append(text(_LEFT - 6, y + 3.5, number(tick, 4), "end"))
        if x_labels:
            apart = max(1, math.ceil(len(self.steps) / 8))
            parts += [text(self.x(step), self.height - 7, str(step), "middle") for step in self.steps[::apart]]
        return parts


def _targets(scale: Scale, series: Mapping[str, Points], link: Link | None) -> list[Markup]:
    """The areas that can be pointed at: a step with all its values as a tooltip, and its link."""
    at_step: dict[int, list[str]] = {}
    for name, points in series.items():
        for x, y in points:
            at_step.setdefault(x, []).append(f"{name} {number(y, 4)}".strip())
    width, targets = max(scale.pitch, _LEAST_TARGET), []
    for step in sorted(at_step)[:: max(1, math.ceil(_LEAST_TARGET / scale.pitch))]:
        title = tag("title", {}, "\n".join([f"step {step}", *at_step[step]]))
        # Most elements of a page are these: written without `tag`, they take half the time.
        place = f'x="{scale.x(step) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" height="{scale.inside}"'
        target = f'<rect class="target" {place}>{title}</rect>'
        if link is not None:
            # The same links are in the table of steps, for the keyboard and for screen readers.
            target = f'<a href="{escape(link(step))}" tabindex="-1" aria-label="step {step}">{target}</a>'
        targets.append(Markup(target))
    return targets


def _chart(title: str, note: str, scale: Scale, series: Mapping[str, Points], parts: Sequence[Markup]) -> Chart:
    courses = "; ".join(
        f"{name} from {number(points[0][1], 3)} to {number(points[-1][1], 3)}".strip()
        for name, points in series.items()
    )
    label = f"{title}. {courses}" if courses else title
    box = f"0 0 {scale.width} {scale.height}"
    kind = "chart wide" if scale.width == _WIDE[0] else "chart"
    attributes = {"class": kind, "viewBox": box, "role": "group", "aria-label": label}
    legend = [(name, f"c{at % _COLOURS}") for at, name in enumerate(series) if name]
    return Chart(title, note, tag("svg", attributes, Markup("").join(parts)), legend)


def text(x: float, y: float, word: str, anchor: str, kind: str = "tick") -> Markup:
    return tag("text", {"class": kind, "x": x, "y": y, "text-anchor": anchor}, word)


def tag(name: str, attributes: Mapping[str, str | float], inside: str | Markup = "") -> Markup:
    """An element; `inside` and attributes are escaped, numbers rounded to a tenth."""
    texts = {key: value if isinstance(value, str) else f"{value:.1f}" for key, value in attributes.items()}
    written = "".join(f' {key}="{escape(harmless(value))}"' for key, value in texts.items())
    return Markup(f"<{name}{written}>{inside if isinstance(inside, Markup) else escape(harmless(inside))}</{name}>")


def _steps(series: Mapping[str, Points]) -> list[int]:
    return sorted({x for points in series.values() for x, _ in points})


def _bins(values: Sequence[float]) -> list[tuple[float, float]]:
    unique = sorted(set(values))
    if len(unique) <= 12:
        return [(value, value) for value in unique]
    low, width = unique[0], (unique[-1] - unique[0]) / 12
    edges = [low + width * at for at in range(12)] + [unique[-1]]
    return [
        (start, end if at == 11 else math.nextafter(end, -math.inf)) for at, (start, end) in enumerate(pairwise(edges))
    ]


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers around these.

    >>> _ticks(0.0, 0.9)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.8)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{at * step:.12g}") for at in range(first, last + 1)]
