"""agl's advantages, losses and gradients against those that veRL and TRL gave for the committed batches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import oracle_fixture
from .oracle_cases import Case, check, every_case

FIXTURE = oracle_fixture.read()
EACH = [(case, oracle_fixture.batch_name(case, seed)) for case in every_case() for seed in oracle_fixture.SEEDS]
each = pytest.mark.parametrize(("case", "batch"), EACH, ids=[f"{case.name}-{batch}" for case, batch in EACH])


@each
def test_equals_the_oracle(case: Case, batch: str) -> None:
    check(case, case.ours(FIXTURE.batches[batch]), FIXTURE.outputs[case.name, batch])


@each
def test_a_flipped_sign_would_be_noticed(case: Case, batch: str) -> None:
    own = case.ours(FIXTURE.batches[batch])
    for name in own.keys() - set(case.differs):
        with pytest.raises(AssertionError, match=re.escape(f"{case.name}: {name}")):
            check(case, {**own, name: -own[name]}, FIXTURE.outputs[case.name, batch])


def test_the_fixture_holds_every_case_and_nothing_else() -> None:
    assert set(FIXTURE.outputs) == {(case.name, batch) for case, batch in EACH}
    assert set(FIXTURE.batches) == {batch for _, batch in EACH}


def test_the_batches_are_those_of_their_seeds() -> None:
    for case in every_case():
        for seed in oracle_fixture.SEEDS:
            assert FIXTURE.batches[oracle_fixture.batch_name(case, seed)] == case.batch(seed)


def test_every_intended_difference_is_documented_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    table = page.split("## Where agl differs on purpose")[1]
    listed = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    assert listed == {case.name for case in every_case() if case.differs}


def test_the_page_names_the_versions_that_made_the_fixture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for name, written in (("verl", "veRL"), ("trl", "TRL")):
        assert f"{written} {FIXTURE.made_with[name]}" in page
