"""The benchmark of the pages runs, and their page has its tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "view.md"
FIRST_COLUMNS = ("| Page |", "| First paint", "| Open pages |")


@pytest.mark.storm
def test_the_benchmark_of_the_pages_gets_an_answer_from_each() -> None:
    command = [sys.executable, HERE / "view_speed.py", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| Rollout |" in done.stdout
    assert "the gateway answers" in done.stdout


def test_the_page_has_these_tables() -> None:
    text = PAGE.read_text()
    assert [column for column in FIRST_COLUMNS if column in text] == list(FIRST_COLUMNS)
