"""One thread that does all of the engine's tensor work, between steps of sampling and jobs that need it alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from agl_chat.backends import Generation, Request
from agl_core.errors import EngineError
from agl_torch.sampler import Sampler

Work: TypeAlias = tuple[Sampler, Request] | Callable[[], Any]
"""A request and its sampler, or a job to run while nothing is being sampled."""
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class EngineLoop:
    """Drives the samplers of an engine from one thread.

    Requests that arrived before an exclusive job are answered before it runs; later ones wait until it is over. So a
    job may change weights, and no response sees two versions of them. `samplers`, by model, may change meanwhile: a
    model that goes answers what it was asked before. `lost` gets the reason if an error ends the thread, and ends the
    process: nothing would be answered any more.

        loop = EngineLoop({"default": sampler}, host.lost)
        loop.start()
        generated = await loop.generate(request)
        metrics = await asyncio.wrap_future(loop.run_exclusive(lambda: trainer.update(batch)))
    """

    def __init__(self, samplers: Mapping[str, Sampler], lost: Callable[[str], object]) -> None:
        self._samplers, self._lost = samplers, lost
        self._inbox: deque[tuple[Work, Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._futures: dict[tuple[Sampler, str], Future[Generation]] = {}
        """By sampler and request id."""
        self._thread = threading.Thread(target=self._run, name="agl-torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def generate(self, request: Request) -> Generation:
        """Answer a request by its model's sampler; its id must be unique among those in flight.

        Cancelling it frees its place at once. Raises ApiError if its grammar cannot be enforced.
        """
        sampler = self._samplers[request.model]
        if request.grammar is not None:  # Compiling may take long, and is none of the tensor thread's work.
            await asyncio.to_thread(sampler.grammars.start, request.grammar, request.prompt_ids)
        generated: Generation = await asyncio.wrap_future(self._post((sampler, request)))
        return generated

    def run_exclusive(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a function on the tensor thread while nothing is being sampled; it runs to its end in any case."""
        return self._post(job)

    def _post(self, work: Work) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            self._inbox.append((work, future))
            self._wake.notify()
        return future

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            while True:
                while (message := self._next_message()) is not None:
                    self._do(*message)
                for sampler in self._in_use():
                    self._step(sampler)
        except BaseException as error:
            _log.exception("The thread that samples and trains ended.")
            self._lost(f"The thread that samples and trains ended by {type(error).__name__}: {error}")

    def _in_use(self) -> list[Sampler]:
        """The samplers of all models, and those of models that are gone and still have to answer."""
        samplers = list(self._samplers.values())  # One operation, since another thread may add or remove some.
        return list(dict.fromkeys([*samplers, *(sampler for sampler, _ in self._futures)]))

    def _next_message(self) -> tuple[Work, Future[Any]] | None:
        """The next message; None if sampling has to go on first. Waits while there is nothing to do."""
        with self._wake:
            while True:
                busy = not all(sampler.idle for sampler in self._in_use())
                if self._inbox and (isinstance(self._inbox[0][0], tuple) or not busy):
                    return self._inbox.popleft()
                if busy:
                    return None
                self._wake.wait()

    def _do(self, work: Work, future: Future[Any]) -> None:
        try:
            if isinstance(work, tuple):
                sampler, request = work
                sampler.submit(request)
                self._futures[sampler, request.id] = future
            else:
                _succeed(future, work())
        except Exception as error:
            _fail(future, error)

    def _step(self, sampler: Sampler) -> None:
        for key in [key for key, future in self._futures.items() if key[0] is sampler and future.cancelled()]:
            del self._futures[key]
            sampler.abort(key[1])
        if sampler.idle:
            return
        try:
            finished = sampler.step()
        except Exception as error:
            _log.exception("Sampling failed; the model's requests in flight are given up.")
            sampler.reset()
            for key in [key for key in self._futures if key[0] is sampler]:
                _fail(self._futures.pop(key), EngineError(f"Sampling failed: {type(error).__name__}: {error}"))
            return
        for generated in finished:
            _succeed(self._futures.pop((sampler, generated.request.id)), generated)


def _succeed(future: Future[Any], result: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _fail(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
