"""Charts of whatever a run's numbers are."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from agl_view.charts import histogram, line_chart, sparkline, stacked


def drawn(chart: Any) -> ET.Element:
    return ET.fromstring(str(chart.svg))


@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [0.0, 0.0],
        [3.0, 3.0, 3.0],
        [-2.5, -2.5],
        [1e-300, 2e-300],
        [1e-14, 3e-14, 2e-14],
        [1.0, 1.0 + 1e-15],
        [-1e9, 1e9],
        [1e300, -1e300],
        [0.5, math.nan, 0.7, math.inf],
        [float(at) for at in range(3000)],
    ],
)
def test_every_value_is_inside_the_picture(values: list[float]) -> None:
    root = drawn(line_chart("Loss", "", {"": list(enumerate(values))}))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    places = [
        tuple(map(float, point.split(",")))
        for line in root.findall("polyline")
        for point in line.get("points", "").split()
    ]
    places = places or [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in root.findall("circle")]
    assert len(places) == sum(map(math.isfinite, values))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
    assert len(root.findall("text")) < 30


def test_rounding_errors_are_a_line_at_zero() -> None:
    (line,) = drawn(line_chart("KL", "", {"": [(1, 3e-14), (2, -2e-14), (3, 0.0)]})).findall("polyline")
    assert len({point.split(",")[1] for point in line.attrib["points"].split()}) == 1


def test_without_values_there_is_no_chart() -> None:
    assert line_chart("Loss", "", {"loss": [(1, math.nan)]}) is None
    assert stacked("Dropped", "", {"stale": [(1, 0.0)]}) is None
    assert histogram("Rewards", "", [math.nan], lambda low, high: "/") is None
    assert sparkline([1.0], "reward") == ""


@pytest.mark.parametrize("values", [[0.0, 1.0, 1.0], [at / 7 for at in range(100)], [-1.0, 5.0] * 40, [0.1 * 3, 0.3]])
def test_the_bars_of_a_histogram_have_every_value_once(values: list[float]) -> None:
    links: list[tuple[float, float]] = []

    def link(low: float, high: float) -> str:
        links.append((low, high))
        return "/"

    histogram("Rewards", "", values, link)

    assert [sum(low <= value <= high for low, high in links) for value in values] == [1] * len(values)


def test_bars_are_stacked() -> None:
    root = drawn(stacked("Time", "", {"rollouts": [(1, 3.0)], "update": [(1, 1.0)]}, lambda step: f"/steps/{step}"))
    low, high = (bar for bar in root.findall("rect") if bar.attrib["class"].startswith("bar"))
    assert float(high.attrib["y"]) + float(high.attrib["height"]) == pytest.approx(float(low.attrib["y"]), abs=0.2)
    assert float(low.attrib["height"]) == pytest.approx(3 * float(high.attrib["height"]), abs=0.5)
    assert [a.attrib["href"] for a in root.findall("a")] == ["/steps/1"]


def test_of_many_steps_the_parts_are_areas() -> None:
    steps = range(1, 101)
    series = {"rollouts": [(at, 3.0) for at in steps], "update": [(at, 1.0) for at in steps[50:]]}
    low, high = drawn(stacked("Time", "", series)).findall("polygon")
    places = [[tuple(map(float, point.split(","))) for point in area.attrib["points"].split()] for area in (low, high)]
    assert len(places[0]) == len(places[1]) == 200
    assert places[1][100:] == places[0][:100][::-1]
    assert places[1][0] == places[0][0]


def test_names_are_text() -> None:
    name = "</text><script>\"'\x1b"

    root = drawn(line_chart(name, "", {name: [(1, 1.0), (2, 2.0)]}, lambda step: "/?a=1&b=\"'<>"))
    assert {e.tag for e in root.iter()} <= {"svg", "line", "text", "polyline", "circle", "a", "rect", "title"}
