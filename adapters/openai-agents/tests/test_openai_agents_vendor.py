"""What the SDK sends to its vendor: nothing of a rollout, and everything else as before."""

from __future__ import annotations

from typing import Any

import agents
import pytest
from agents import Agent
from agents.tracing.processors import BatchTraceProcessor

import agl_openai_agents
from agl_core.capture import running

SOLVER = Agent(name="solver", model="m")


def sent(exports: Any) -> int:
    agents.flush_traces()
    return len(exports.items)


def test_nothing_of_a_rollout_is_sent(run_briefly: Any, observed: Any, server: Any, attempt: Any, exports: Any) -> None:
    with running(attempt()):
        run_briefly(SOLVER, "hello")
    assert sent(exports) == 0


def test_outside_rollouts_it_goes_on_as_before(
    run_briefly: Any, detached: None, server: Any, attempt: Any, exports: Any
) -> None:
    run_briefly(SOLVER, "hello")
    before = sent(exports)
    agl_openai_agents.attach()
    with running(attempt()):
        run_briefly(SOLVER, "hello")
    run_briefly(SOLVER, "hello")
    assert sent(exports) == 2 * before


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_users_own_processors_stay(
    when: str, run_briefly: Any, detached: None, server: Any, attempt: Any, exports: Any
) -> None:
    own = type(exports)()
    if when == "after":
        agl_openai_agents.attach()
    agents.add_trace_processor(BatchTraceProcessor(own))
    if when == "before":
        agl_openai_agents.attach()
    with running(attempt()):
        run_briefly(SOLVER, "hello")
    assert sent(exports) == 0
    assert len(own.items) > 0
