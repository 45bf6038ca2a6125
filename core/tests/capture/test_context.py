"""Attempt and identity follow the code that runs, into tasks, threads and pools."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

from agl_core.capture import (
    AttemptContext,
    Identity,
    Recording,
    current_attempt,
    current_identity,
    enter_identity,
    identify,
    running,
)


def attempt(rollout: str = "r1") -> AttemptContext:
    return AttemptContext(rollout, 0, "http://127.0.0.1:8000", "key", Recording())


def here() -> tuple[str | None, str | None]:
    """The rollout and the agent of the code that calls this."""
    active, identity = current_attempt(), current_identity()
    return (active.rollout if active else None, identity.agent if identity else None)


def test_identities_nest_and_the_name_is_inherited() -> None:
    with identify("outer", span="s1"):
        with identify(parent_span="s1"):
            assert current_identity() == Identity("outer", None, "s1")
        with identify("inner"):
            assert here() == (None, "inner")
        assert current_identity() == Identity("outer", "s1")
    assert current_identity() is None


async def test_an_identity_closed_in_another_task_ends_here_too() -> None:
    scope = enter_identity(Identity("solver"))

    async def end() -> None:
        scope.close()

    await asyncio.create_task(end())
    assert current_identity() is None


def test_a_thread_has_the_attempt_that_started_it_and_other_variables_as_python_has_them(attached: None) -> None:
    theirs = contextvars.ContextVar("theirs", default="default")
    theirs.set("set")
    seen = []
    with running(attempt()), identify("solver"):
        thread = threading.Thread(target=lambda: seen.append((here(), theirs.get())))
        thread.start()
        thread.join()
    assert seen == [(("r1", "solver"), "default")]


def test_a_pool_shared_by_attempts_works_for_whoever_submits(attached: None) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        with running(attempt("r1")), identify("a"):
            assert pool.submit(here).result() == ("r1", "a")
        with running(attempt("r2")):
            assert pool.submit(here).result() == ("r2", None)
            assert list(pool.map(lambda _: here(), range(2))) == [("r2", None)] * 2
        assert pool.submit(here).result() == (None, None)
