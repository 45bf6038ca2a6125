"""agl against veRL and TRL themselves: their functions on drawn batches, the chat templates TRL keeps.

`make oracles` runs this, and not `make test`, whose environment has neither library.
"""

from __future__ import annotations

import random

import pytest
import torch

from . import continuity, oracle_fixture
from .oracle_cases import Case, check, every_case

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

FRESH = [random.SystemRandom().randrange(2**32) for _ in range(5)]
"""Each is in the name of its test; `case.batch(seed)` gives the batch again."""


@pytest.mark.parametrize("seed", FRESH)
@pytest.mark.parametrize("case", every_case(), ids=lambda case: case.name)
def test_equals_the_oracle(case: Case, seed: int) -> None:
    batch = case.batch(seed)
    check(case, case.ours(batch), case.theirs(batch))


def test_the_committed_fixture_is_what_the_oracles_say() -> None:
    committed, now = oracle_fixture.read(), oracle_fixture.made_now()
    assert committed.made_with == now.made_with
    assert committed.outputs.keys() == now.outputs.keys()
    for key, outputs in now.outputs.items():
        torch.testing.assert_close(dict(committed.outputs[key]), dict(outputs), rtol=1e-9, atol=1e-9)


def test_the_page_on_continuity_is_what_the_templates_give() -> None:
    assert continuity.PAGE.read_text() == continuity.page()
