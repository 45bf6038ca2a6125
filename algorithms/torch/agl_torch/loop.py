"""One thread that does all of the engine's tensor work, between steps of sampling and jobs that need it alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from agl_chat.backends import Generated, Request
from agl_core.errors import EngineError
from agl_torch.sampler import Sampler

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Message:
    work: Request | Callable[[], Any]
    """What to sample, or a job to run while nothing is being sampled."""
    future: Future[Any]


class EngineLoop:
    """Drives the samplers of an engine, one per model, from one thread.

    Requests that arrived before an exclusive job are answered before it runs; later ones wait until it is over. So a
    job may change weights, and no response sees two versions of them. `lost` gets the reason if an error ends the
    thread: nothing would be answered any more.

        loop = EngineLoop({"default": sampler}, host.lost)
        loop.start()
        generated = await loop.generate(request)
        metrics = await asyncio.wrap_future(loop.run_exclusive(lambda: trainer.update(batch)))
    """

    def __init__(self, samplers: Mapping[str, Sampler], lost: Callable[[str], object]) -> None:
        self._samplers, self._lost = dict(samplers), lost
        self._inbox: deque[_Message] = deque()
        self._wake = threading.Condition()
        self._ended = False
        self._futures: dict[tuple[str, str], Future[Generated]] = {}
        """Of what is being sampled, by model and request id."""
        self._leaving: set[str] = set()
        """Models to let go of."""
        self._thread = threading.Thread(target=self._run, name="agl-torch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def generate(self, request: Request) -> Generated:
        """Answer a request by its model's sampler; its id must be unique among those in flight.

        Cancelling it frees its place at once. Raises ApiError if its grammar cannot be enforced.
        """
        if request.grammar is not None:  # Compiling may take long, and is none of the tensor thread's work.
            await asyncio.to_thread(self._samplers[request.model].grammars.check, request.grammar)
        generated: Generated = await asyncio.wrap_future(self._post(request))
        return generated

    def run_exclusive(self, job: Callable[[], Result]) -> Future[Result]:
        """Run a function on the tensor thread while nothing is being sampled; it runs to its end in any case."""
        return self._post(job)

    def add(self, name: str, sampler: Sampler) -> None:
        """Answer by one more model."""
        self._samplers = {**self._samplers, name: sampler}  # The thread may be going through the ones before.

    def remove(self, name: str) -> None:
        """Let go of a model once it has answered what it was asked; the caller asks it nothing more."""
        with self._wake:
            self._leaving.add(name)
            self._wake.notify()

    def counters(self) -> Counter[str]:
        """Those of all samplers together."""
        totals = Counter[str]()
        for sampler in self._samplers.values():
            totals.update(sampler.counters)
        return totals

    @property
    def cache_nbytes(self) -> int:
        return sum(sampler.cache_nbytes for sampler in self._samplers.values())

    def _post(self, work: Request | Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._wake:
            if self._ended:
                future.set_exception(EngineError("The engine has stopped."))
            else:
                self._inbox.append(_Message(work, future))
                self._wake.notify()
        return future

    # What follows runs on the thread.

    def _run(self) -> None:
        try:
            while True:
                while (message := self._next_message()) is not None:
                    self._do(message)
                for name, sampler in self._samplers.items():
                    self._step(name, sampler)
                self._let_go()
        except BaseException as error:
            _log.exception("The thread that samples and trains ended.")
            self._lost(f"The thread that samples and trains ended by {type(error).__name__}: {error}")
        finally:
            self._fail_all()

    def _next_message(self) -> _Message | None:
        """The next message in order, unless it is a job that has to wait; None as long as there is something to sample.

        Waits while there is nothing to do.
        """
        with self._wake:
            while True:
                busy = not all(sampler.idle for sampler in self._samplers.values())
                if self._inbox and (isinstance(self._inbox[0].work, Request) or not busy):
                    return self._inbox.popleft()
                if busy or self._leaving:
                    return None
                self._wake.wait()

    def _do(self, message: _Message) -> None:
        work, future = message.work, message.future
        try:
            if isinstance(work, Request):
                self._samplers[work.model].submit(work)
                self._futures[work.model, work.id] = future
            else:
                _succeed(future, work())
        except Exception as error:
            _fail(future, error)

    def _step(self, name: str, sampler: Sampler) -> None:
        for key in [key for key, future in self._futures.items() if key[0] == name and future.cancelled()]:
            del self._futures[key]
            sampler.abort(key[1])
        if sampler.idle:
            return
        try:
            finished = sampler.step()
        except Exception as error:
            _log.exception("Sampling from %r failed; its requests in flight are given up.", name)
            sampler.reset()
            for key in [key for key in self._futures if key[0] == name]:
                _fail(self._futures.pop(key), EngineError(f"Sampling failed: {type(error).__name__}: {error}"))
            return
        for generated in finished:
            _succeed(self._futures.pop((name, generated.request.id)), generated)

    def _let_go(self) -> None:
        with self._wake:
            gone = {name for name in self._leaving if self._samplers[name].idle and not self._inbox}
            self._leaving -= gone
        if gone:
            self._samplers = {name: sampler for name, sampler in self._samplers.items() if name not in gone}

    def _fail_all(self) -> None:
        error = EngineError("The engine stopped before it could answer.")
        with self._wake:
            self._ended = True
            unanswered = [*(message.future for message in self._inbox), *self._futures.values()]
            self._inbox.clear()
            self._futures.clear()
        for future in unanswered:
            _fail(future, error)


def _succeed(future: Future[Any], result: Any) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _fail(future: Future[Any], error: BaseException) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)
