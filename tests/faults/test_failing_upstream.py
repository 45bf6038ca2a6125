"""A model server that fails in every way there is: what agents get is an error, and what is trained on is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from agl_core.types import Ending

from .fault_agent import RETRIES
from .fault_checks import check_ended
from .fault_run import TinyRun

STEPS = 5


@pytest.mark.storm
def test_agents_get_errors_and_training_goes_on(tiny_run: Callable[..., TinyRun], seed: int) -> None:
    run = tiny_run(
        environment={RETRIES: "0"},
        **{"train.steps": STEPS, "workers.timeout": 5.0, "engine.ledger": {"seed": seed, "failing": 0.2}},
    )
    run.start()
    run.finish()
    check_ended(run, STEPS)
    failed = Counter(each["error"] for each in run.noted_as("failed"))
    endings = Counter(attempt.ending for attempt in run.recorded().attempts)
    assert failed["InternalServerError"], failed
    assert endings[Ending.CRASHED] + endings[Ending.TIMED_OUT] > 0, endings
    assert set(endings) <= {Ending.FINISHED, Ending.CRASHED, Ending.TIMED_OUT, Ending.LOST}, endings
    assert endings[Ending.FINISHED] > STEPS, endings
