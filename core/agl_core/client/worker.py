"""The client of a Lightning Server; a worker leases rollouts by it, and reports how each attempt ended.

A request raises UnreachableError if the server did not answer or failed, RefusedError if it refused the request, and
will again, and ConfigError if no request can carry the key. All requests may be repeated: the same one counts once.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx
import orjson
from pydantic import ValidationError

from agl_core.capture import Recording
from agl_core.capture.context import MAX_PROBLEMS
from agl_core.client.agent import AttemptEnd, closing
from agl_core.errors import ConfigError, ServerError
from agl_core.types import AttemptKey, Ending
from agl_core.wire import (
    CLOSE,
    HEARTBEAT,
    LEASE,
    MAX_LEASES,
    Answer,
    Asked,
    Assignment,
    CloseRequest,
    HeartbeatReply,
    HeartbeatRequest,
    HeldAttempt,
    Lease,
    LeaseRequest,
    Operation,
    problem_of_key,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(30, read=90)
_LEASE_WAIT = 5.0
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0
_HEARTBEAT_TIMEOUT = 10.0
_BEFORE_FIRST_LEASE = 5.0
"""Seconds between heartbeats until the first lease says how often the server wants them."""
_NOTICE = 0.5
"""Seconds to notice that an agent has ended by itself: a process that was stopped learns late that time is up."""


class UnreachableError(ServerError):
    """The server did not answer, or cannot handle the request now: the same request may succeed later."""


class RefusedError(ServerError):
    """The server refused: a key, a body or an id is wrong."""


class LightningClient:
    """A client of workers and operators; one instance per event loop.

    >>> async def example():
    ...     async with LightningClient("http://127.0.0.1:8000", key="…") as client:
    ...         return await client.ask(LEASE, LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str, timeout: float | None = None) -> None:
        self.base_url, self.key = base_url, key
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=_headers(key), timeout=timeout or _TIMEOUT, trust_env=False, limits=limits
        )

    async def ask(self, operation: Operation[Asked, Answer], body: Asked, lease: Lease | None = None) -> Answer:
        """The reply to a request, which may be about the attempt of a lease.

        A body larger than the server reads is refused here: the server would hang up meanwhile.
        """
        content = body.model_dump_json().encode() if operation.has_body else b""
        if len(content) > operation.largest:
            raise RefusedError(
                f"{self.base_url}{operation.path}: the request body has {len(content)} bytes; "
                f"{operation.largest >> 20} MiB are the limit."
            )
        path, headers = operation.path, None
        if lease is not None:
            path, headers = path.format(rollout=lease.rollout, attempt=lease.attempt), _headers(lease.secret)
        try:
            response = await self._http.request(operation.method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise UnreachableError(
                f"The Lightning Server at {self.base_url} cannot be reached ({type(error).__name__}: {error}). "
                f"Is it running, and is the address right?"
            ) from error
        if response.is_error:
            kind = UnreachableError if response.is_server_error else RefusedError
            raise kind(f"{response.url} answered {response.status_code}: {_reason(response)}")
        try:
            return operation.reply.model_validate_json(response.content)
        except ValidationError as error:
            text = f"{response.url} answered, but not as a Lightning Server of this version does."
            raise ServerError(text) from error

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def _headers(key: str) -> dict[str, str]:
    if problem := problem_of_key("The server's key", key):
        raise ConfigError(problem)
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _reason(response: httpx.Response) -> str:
    try:
        return str(orjson.loads(response.content)["error"]["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return response.text[:500]


class Runner(Protocol):
    """Runs attempts of one agent, in one way. All methods belong to the worker's event loop."""

    @property
    def default_concurrency(self) -> int:
        """How many attempts run at the same time, unless the configuration says otherwise."""

    async def start(self) -> None:
        """Get ready for the first attempt."""

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> AttemptEnd:
        """Run one attempt to its end.

        When this is cancelled, nothing of the attempt is left running; if it has ended already, its end is returned.
        """

    async def close(self) -> None:
        """Release what `start` took; no attempt is running any more."""


@dataclass(frozen=True, slots=True, eq=False)
class _RunningAttempt:
    lease: Lease
    task: asyncio.Task[None]
    lost: asyncio.Future[None]
    """Done when the server no longer counts it."""


class Worker:
    """Runs one agent for one server, in the event loop that calls `run`.

    An attempt that exceeds its timeout, or that the server no longer counts, is ended; one that had ended by then is
    reported all the same. The worker waits for a server that is away, unless `moved` says to look elsewhere.
    """

    def __init__(
        self,
        client: LightningClient,
        runner: Runner,
        *,
        concurrency: int | None,
        moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"
        self.endings: Counter[Ending] = Counter()
        """How attempts ended, as reported to the server."""
        self.problems: Counter[str] = Counter()
        self.on_problem: Callable[[str], None] = lambda text: None
        self._client, self._runner, self._concurrency, self._moved = client, runner, concurrency, moved
        self._running: dict[AttemptKey, _RunningAttempt] = {}
        self._stopped = asyncio.Event()
        self._patience = 0.0
        self._left = Ending.CANCELLED
        self._beating, self._beat_due, self._beat_interval = True, threading.Event(), _BEFORE_FIRST_LEASE

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [attempt.task for attempt in self._running.values()]

    async def run(self) -> None:
        """Work until the run is over, until drained, or until cancelled; no attempt is left running.

        AgentError if the agent cannot be started, ServerError if the server refuses this worker.
        """
        loop = asyncio.get_running_loop()
        heartbeats = threading.Thread(target=lambda: asyncio.run(self._beat(loop)), daemon=True, name="agl-heartbeats")
        await self._runner.start()
        heartbeats.start()
        try:
            while not self._stopped.is_set():
                await self._lease()
            if self._running and self._patience > 0:
                await asyncio.wait(self._tasks, timeout=self._patience)
        finally:
            attempts = self._tasks
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)
            self._beating = False
            self._beat_due.set()
            await self._runner.close()

    def drain(self, seconds: float) -> None:
        """Lease no more, and have `run` return when all attempts have ended, or after `seconds`.

        Attempts that still run then, or at a second call, are given back, to be tried again elsewhere.
        """
        if self._stopped.is_set():
            for attempt in self._tasks:
                attempt.cancel()
        self._left, self._patience = Ending.LOST, seconds
        self._stopped.set()

    async def _lease(self) -> None:
        free = (self._concurrency or self._runner.default_concurrency) - len(self._running)
        if free <= 0:
            await self._unless_stopped(asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED))
            return
        request = LeaseRequest(worker=self.name, capacity=min(free, MAX_LEASES), wait=_LEASE_WAIT)
        reply = await self._unless_stopped(self._answered(lambda: self._client.ask(LEASE, request)))
        if reply is None:
            return
        if reply.closed:
            self._stopped.set()
        for lease in reply.leases:
            key = AttemptKey(lease.rollout, lease.attempt)
            lost = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._attempt(lease, lost))
            task.add_done_callback(functools.partial(self._ended, key))
            self._running[key] = _RunningAttempt(lease, task, lost)
            self._beat_interval = lease.heartbeat
            self._beat_due.set()

    def _ended(self, key: AttemptKey, _: asyncio.Task[None]) -> None:
        self._running.pop(key, None)

    async def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send heartbeats, also without attempts, as often as the leases say; `loop` is the worker's.

        A thread and an HTTP client of its own keep the leases of an agent that blocks the worker's event loop. The
        server expects heartbeats from a worker that sent one, and so tries attempts again whose lease never arrived.
        """
        async with LightningClient(self._client.base_url, self._client.key, _HEARTBEAT_TIMEOUT) as client:
            while self._beating:
                leases = [attempt.lease for attempt in list(self._running.values())]
                held = [HeldAttempt(rollout=own.rollout, attempt=own.attempt, secret=own.secret) for own in leases]
                for start in range(0, max(len(held), 1), MAX_LEASES):
                    request = HeartbeatRequest(worker=self.name, attempts=held[start : start + MAX_LEASES])
                    try:
                        reply = await client.ask(HEARTBEAT, request)
                    except ServerError as error:
                        logger.debug("A heartbeat was not taken, as the next lease will not be: %s", error)
                    else:
                        with suppress(RuntimeError):  # The worker's loop has ended meanwhile, and so has all else.
                            loop.call_soon_threadsafe(self._heard, reply)
                self._beat_due.wait(self._beat_interval)  # Nothing else runs in this thread's event loop.
                self._beat_due.clear()

    def _heard(self, reply: HeartbeatReply) -> None:
        if reply.closed:
            self._stopped.set()
        for lost in reply.lost:
            attempt = self._running.get(AttemptKey(lost.rollout, lost.attempt))
            if attempt is not None and not attempt.lost.done():
                attempt.lost.set_result(None)

    async def _attempt(self, lease: Lease, lost: asyncio.Future[None]) -> None:
        recording = Recording()
        try:
            ended = await self._executed(lease, recording, lost)
        except asyncio.CancelledError:
            if not lost.done():
                request = closing(AttemptEnd(self._left, error="the worker was stopped"), recording)
                await self._report(lease, request, tries=1)
            raise
        if ended is not None:
            request = closing(ended, recording)
            for text in recording.problems:
                if len(self.problems) < MAX_PROBLEMS or text in self.problems:
                    self.problems[text] += 1
                    self.on_problem(text)
            await self._report(lease, request)

    async def _executed(self, lease: Lease, recording: Recording, lost: asyncio.Future[None]) -> AttemptEnd | None:
        """How the attempt ended; None if it was ended here because it was lost."""
        work = asyncio.create_task(self._runner.run(lease.assignment, self._client.base_url, recording))
        either: set[asyncio.Future[Any]] = {work, lost}
        try:
            await asyncio.wait(either, timeout=lease.timeout, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({work}, timeout=_NOTICE)
        finally:
            work.cancel()
            await asyncio.wait({work})
            recording.close()
        try:
            return work.result()
        except asyncio.CancelledError:
            error = f"the attempt took longer than {lease.timeout:g} seconds"
            return None if lost.done() else AttemptEnd(Ending.TIMED_OUT, error=error)
        except Exception as error:
            logger.exception("An attempt could not be run.")
            return AttemptEnd(Ending.LOST, error=f"the worker could not run it: {type(error).__name__}: {error}")

    async def _report(self, lease: Lease, request: CloseRequest, tries: int | None = None) -> None:
        """Close the attempt; while the server is away, `tries` times, or until it is back or this is cancelled."""
        self.endings[request.ending] += 1
        close = functools.partial(self._client.ask, CLOSE, request, lease)
        try:
            try:
                await self._answered(close, tries)
            except asyncio.CancelledError:
                await self._answered(close, tries=1)
                raise
        except ServerError as error:
            level = logging.DEBUG if isinstance(error, UnreachableError) else logging.WARNING
            logger.log(level, "How %s/%s ended could not be reported: %s", lease.rollout, lease.attempt, error)

    async def _answered(self, ask: Callable[[], Coroutine[Any, Any, T]], tries: int | None = None) -> T:
        """The server's answer, however long the server is away; UnreachableError after `tries`, or if it has moved."""
        delay, since, failures = _FIRST_DELAY, 0.0, 0
        while True:
            try:
                answer = await ask()
            except UnreachableError as error:
                if not since:
                    since = time.monotonic()
                    logger.warning("%s Trying again until it answers.", error)
                failures += 1
                if failures == tries:
                    raise
                if self._moved():
                    self._stopped.set()
                    raise
                await asyncio.sleep(delay * random.uniform(0.75, 1.25))
                delay = min(2 * delay, _LONGEST_DELAY)
            else:
                if since:
                    logger.warning("The Lightning Server is back after %.0f seconds.", time.monotonic() - since)
                return answer

    async def _unless_stopped(self, question: Coroutine[Any, Any, T]) -> T | None:
        """The answer, or None if the worker is to stop before it comes."""
        asking, stopping = asyncio.ensure_future(question), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({asking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return None if self._stopped.is_set() and not asking.done() else await asking
        except UnreachableError:
            if self._stopped.is_set():
                return None
            raise
        finally:
            asking.cancel()
            stopping.cancel()


@contextmanager
def on_signals(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Inside, `handle` gets Ctrl-C and SIGTERM, in the running event loop."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


async def until_signal(work: Coroutine[Any, Any, T]) -> T | signal.Signals:
    """The result of `work`; or Ctrl-C or SIGTERM, which cancels it. A second signal gets the default treatment."""
    task, received = asyncio.ensure_future(work), list[signal.Signals]()
    with ExitStack() as handling:

        def stop(number: signal.Signals) -> None:
            handling.close()
            received.append(number)
            task.cancel()

        handling.enter_context(on_signals(stop))
        try:
            return await task
        except asyncio.CancelledError:
            if not received:
                raise
            return received[0]
