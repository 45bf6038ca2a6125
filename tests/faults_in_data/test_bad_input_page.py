"""docs/bad-input.md is complete: every reason has its row."""

from __future__ import annotations

from pathlib import Path

import pytest

from agl_core.types import DropReason

PAGE = Path(__file__).parents[2] / "docs" / "bad-input.md"
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("reason", DropReason)
def test_every_reason_has_a_row_that_says_what_is_dropped(reason: DropReason) -> None:
    treatments = [row.split("|")[3] for row in ROWS]

    assert any("dropped" in treatment and f"`{reason}`" in treatment for treatment in treatments)
