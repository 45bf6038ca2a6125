"""Connections that break after any number of bytes, and a model server that fails in every way there is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from agl_core.types import Ending
from agl_core.wire.keys import WORKER_KEY

from .fault_agent import RETRIES
from .fault_checks import check_ended
from .fault_proxy import FaultyProxy
from .fault_run import TinyRun, free_port

STEPS = 6


@pytest.mark.storm
def test_between_worker_and_server_and_between_agent_and_gateway(
    tiny_run: Callable[..., TinyRun], chance: random.Random
) -> None:
    port = free_port()
    with FaultyProxy(f"http://127.0.0.1:{port}", chance, share=0.3) as proxy:
        run = tiny_run(
            server=proxy.url,
            environment={WORKER_KEY: "a-key-of-our-choice"},
            **{"server.port": port, "workers.timeout": 10.0},
        )
        run.start()
        run.until(lambda: proxy.broken == {"worker", "agent"}, "some of both broke")
        steps = run.finish_after(2)
    check_ended(run, steps)


@pytest.mark.storm
def test_between_gateway_and_model_server(tiny_run: Callable[..., TinyRun], seed: int) -> None:
    run = tiny_run(**{"train.steps": STEPS, "engine.ledger": {"seed": seed, "breaking": 0.3}})
    run.start()
    run.finish()
    check_ended(run, STEPS)


@pytest.mark.storm
def test_if_the_model_server_fails_agents_get_errors_and_training_goes_on(
    tiny_run: Callable[..., TinyRun], seed: int
) -> None:
    run = tiny_run(
        environment={RETRIES: "0"},
        **{"train.steps": STEPS, "workers.timeout": 5.0, "engine.ledger": {"seed": seed, "failing": 0.2}},
    )
    run.start()
    run.finish()
    check_ended(run, STEPS)
    failed = Counter(note["error"] for note in run.noted_as("failed"))
    endings = Counter(attempt.ending for attempt in run.recorded().attempts)
    assert failed["InternalServerError"], failed
    assert endings[Ending.CRASHED] + endings[Ending.TIMED_OUT] > 0, endings
    assert set(endings) <= {Ending.FINISHED, Ending.CRASHED, Ending.TIMED_OUT, Ending.LOST}, endings
    assert endings[Ending.FINISHED] > STEPS, endings
