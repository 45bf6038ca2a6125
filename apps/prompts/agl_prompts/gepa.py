"""GEPA: reflective prompt evolution (arXiv 2507.19457), by the authors' package `gepa`.

Each round takes a candidate from the Pareto front (the best ones of every validation task), runs it on a minibatch, and
has the proposer rewrite one of its prompts from the scored conversations. If the new candidate has a higher sum of
rewards on the same minibatch, it is run on all validation tasks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch, GEPAAdapter

from agl_core.types import Episode, episode_return
from agl_prompts.search import Candidate, Search, described

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_IDLE = 50
"""Rounds without a new rollout after which the search is over; where a minibatch has all rewards, one costs nothing."""


class _LoopEnd(BaseException):
    """Ends the package's loop, which goes on after an Exception; its cause is the reason."""


class _Rollouts(GEPAAdapter[int, Episode, Episode]):
    """Evaluates candidates on tasks, by their positions; called in the thread of the package's loop."""

    propose_new_texts = None

    def __init__(self, search: Search, loop: asyncio.AbstractEventLoop) -> None:
        self._search, self._loop = search, loop
        self._waiting: concurrent.futures.Future[Any] | None = None
        self._stopped = False

    def evaluate(
        self, batch: list[int], candidate: Candidate, capture_traces: bool = False
    ) -> EvaluationBatch[Episode, Episode]:
        episodes = self._wait(self._search.evaluate(candidate, batch))
        return EvaluationBatch(episodes, [episode_return(episode) for episode in episodes], episodes)

    def make_reflective_dataset(
        self,
        candidate: Candidate,
        eval_batch: EvaluationBatch[Episode, Episode],
        components_to_update: list[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        examples = [described(episode) for episode in eval_batch.outputs]
        return dict.fromkeys(components_to_update, examples)

    def reflect(self, prompt: Any) -> str:
        return self._wait(self._search.propose(str(prompt)))

    def is_over(self, gepa_state: Any) -> bool:
        """Called before each round."""
        self._wait(self._search.check_progress(_MAX_IDLE))
        return False

    def log(self, message: str) -> None:
        logger.debug("%s", message)

    def stop(self) -> None:
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        waiting = self._waiting = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            if self._stopped:
                waiting.cancel()
            result: Result = waiting.result()
            return result
        except BaseException as error:
            raise _LoopEnd from error


async def gepa(search: Search) -> None:
    """Search until it is over: a SearchOverError has the reason."""
    rollouts = _Rollouts(search, asyncio.get_running_loop())
    loop: Coroutine[Any, Any, Any] = asyncio.to_thread(
        optimize,
        search.seed,
        trainset=search.feedback,
        valset=search.validation,
        adapter=rollouts,
        reflection_lm=rollouts.reflect,
        reflection_minibatch_size=search.minibatch,
        stop_callbacks=rollouts.is_over,
        logger=rollouts,
        seed=search.config.seed,
    )
    running = asyncio.ensure_future(loop)
    try:
        await asyncio.shield(running)
    except _LoopEnd as ended:
        raise ended.__cause__ or ended from None
    except asyncio.CancelledError:
        rollouts.stop()
        with suppress(_LoopEnd):
            await running
        raise
