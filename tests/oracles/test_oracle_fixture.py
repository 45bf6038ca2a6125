"""agl's advantages, losses and gradients against those that veRL and TRL gave for the committed batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import oracle_fixture
from .oracle_cases import Case, check, every_case

FIXTURE = oracle_fixture.read()
EACH = [(case, seed) for case in every_case() for seed in oracle_fixture.SEEDS]
in_each_case = pytest.mark.parametrize(("case", "seed"), EACH, ids=[f"{case.name}-{seed}" for case, seed in EACH])


@in_each_case
def test_equals_the_oracle(case: Case, seed: int) -> None:
    check(case, case.ours(case.batch(seed)), FIXTURE.outputs[case.name, seed])


def test_the_fixture_holds_every_case_and_nothing_else() -> None:
    assert set(FIXTURE.outputs) == {(case.name, seed) for case, seed in EACH}


def test_every_intended_difference_is_documented_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    table = page.split("## Where agl differs on purpose")[1]
    listed = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert listed == {case.name for case in every_case() if case.differs}


def test_the_page_names_the_versions_that_made_the_fixture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for name, written in (("verl", "veRL"), ("trl", "TRL")):
        assert f"{written} {FIXTURE.made_with[name]}" in page
