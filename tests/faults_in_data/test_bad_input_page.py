"""docs/bad-input.md is complete: every reason has its row, and every key that it names is documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agl_core.types import DropReason

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [line for line in (DOCS / "bad-input.md").read_text().splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("reason", DropReason)
def test_every_reason_has_a_row_that_says_what_is_dropped(reason: DropReason) -> None:
    treatments = [row.split("|")[3] for row in ROWS]

    assert any("dropped" in treatment and f"`{reason}`" in treatment for treatment in treatments)


def test_every_row_is_whole() -> None:
    assert {row.count("|") for row in ROWS} == {5}


def test_every_metric_it_names_is_on_the_page_of_metrics() -> None:
    documented = (DOCS / "metrics.md").read_text()
    keys = {key for row in ROWS for key in re.findall(r"`((?:update|calls|tool_results|length|reward)/[a-z_]+)`", row)}

    assert len(keys) > 5
    assert [key for key in sorted(keys) if f"`{key}`" not in documented] == []


def test_every_drop_that_it_names_has_a_reason() -> None:
    named = {reason for row in ROWS for reason in re.findall(r"dropped/([a-z_]+)`", row)}

    assert named <= set(DropReason)
