"""The benchmarks run, and their tables are written where they belong."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from testing_aids import run_command

from .tables import replaced

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIRST_COLUMNS = [
    "Calls of agents at once",
    "Streams of a second at once",
    "A call of",
    "Rollouts in the store",
    "Shape",
]


def tables(text: str) -> list[list[list[str]]]:
    """Each table's rows of cells, the head first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE)
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()] for block in blocks]


def run(*options: str) -> list[list[list[str]]]:
    return tables(run_command(sys.executable, HERE / "server_speed.py", "--quick", *options))


def test_a_script_replaces_its_own_section_of_a_page_even_if_it_is_empty() -> None:
    page = "<!-- written by {} -->\n{}<!-- to here -->\n"
    empty, other = page.format("a", ""), page.format("b", "old\n")
    assert replaced(empty + other, "a", "new") == page.format("a", "new\n") + other


@pytest.mark.storm
def test_every_request_of_the_benchmark_is_answered() -> None:
    printed = run()
    assert [table[0][0] for table in printed] == FIRST_COLUMNS
    for head, _, *rows in printed:
        assert rows
        for row in rows:
            assert len(row) == len(head)
            numbers = {cell: float(cell.split()[0].replace(",", "")) for cell in row[1:-1]}
            # Times are differences, which may be nothing or less where the machine has other things to do.
            assert all(number > 0 or " ms" in cell for cell, number in numbers.items()), (head, row)


@pytest.mark.storm
def test_two_checkouts_are_compared_in_pairs() -> None:
    (calls,) = run("--only", "calls", "--against", str(ROOT))
    assert [row[0] for row in calls[2:]] == [f"calls, {n} at once" for n in (1, 32, 256)]
    assert all(float(row[3].split()[0]) > 0 for row in calls[2:])
