"""A worker leases rollouts, runs the agent on them concurrently, and reports how each attempt ended."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import socket
import threading
import traceback
from collections import Counter
from typing import Any

import orjson

from agl_core.capture import ActiveAttempt, Recording, running
from agl_core.client.agent import Agent, AgentContext
from agl_core.client.api import LightningClient
from agl_core.errors import ServerError
from agl_core.types import AttemptKey, Ending, Json
from agl_core.wire import CloseRequest, Lease, LeaseRequest, RewardReport

logger = logging.getLogger(__name__)

_CANCEL_GRACE = 2.0
"""Seconds an async agent gets to end after it was cancelled."""
_LEASE_WAIT = 5.0
_RECONNECT = 1.0
_CLOSE_TRIES = 5


class Worker:
    """Runs one agent for one server, in the event loop that calls `run`.

    Async agents are tasks of that loop; sync agents get a thread each. An attempt that exceeds its timeout is
    cancelled; a thread (or a task that swallows its cancellation) cannot be ended: it is abandoned, counted in
    `abandoned`, and whatever it does later does not count.
    """

    def __init__(self, client: LightningClient, agent: Agent, *, agent_key: str, concurrency: int) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{threading.get_ident()}"
        self.abandoned = 0
        self.problems: Counter[str] = Counter()
        """What adapters could not do, by message."""
        self._client, self._agent, self._agent_key, self._concurrency = client, agent, agent_key, concurrency
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self) -> None:
        """Work until the server says that the run is over, or until cancelled; then no attempt is left running."""
        try:
            while not self._stopping:
                await self._lease()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    async def _lease(self) -> None:
        free = self._concurrency - len(self._running)
        if free == 0:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            return
        try:
            reply = await self._client.lease(LeaseRequest(worker=self.name, capacity=free, wait=_LEASE_WAIT))
        except ServerError as error:
            logger.warning("%s Trying again.", error)
            await asyncio.sleep(_RECONNECT)
            return
        self._stopping = reply.closed
        for lease in reply.leases:
            task = asyncio.create_task(self._attempt(lease))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _attempt(self, lease: Lease) -> None:
        key = AttemptKey(lease.rollout, lease.attempt)
        recording = Recording()
        try:
            ending, result, error = await self._execute(lease, recording)
        except asyncio.CancelledError:
            recording.close()
            await self._report(key, CloseRequest(ending=Ending.CANCELLED), tries=1)
            raise
        recording.close()
        self.problems.update(recording.problems)
        rewards = list(recording.rewards)
        if isinstance(result, int | float) and not isinstance(result, bool):
            rewards.append(RewardReport(name="result", value=result))
        await self._report(
            key,
            CloseRequest(ending=ending, result=result, error=error, outcomes=list(recording.outcomes), rewards=rewards),
        )

    async def _report(self, key: AttemptKey, request: CloseRequest, tries: int = _CLOSE_TRIES) -> None:
        for left in reversed(range(tries)):
            try:
                await self._client.close_attempt(key, request)
            except ServerError as error:
                logger.warning("Could not report %s/%s: %s", *key, error)
                if left:
                    await asyncio.sleep(_RECONNECT)
            else:
                return

    async def _execute(self, lease: Lease, recording: Recording) -> tuple[Ending, Json, str | None]:
        active = ActiveAttempt(lease.rollout, lease.attempt, self._client.base_url, self._agent_key, recording)
        context = AgentContext(
            task_id=lease.task_id,
            split=lease.task_split,
            rollout=lease.rollout,
            attempt=lease.attempt,
            mode=lease.mode,
            base_url=f"{self._client.base_url}{lease.path}/v1",
            api_key=self._agent_key,
        )
        with running(active):
            work = asyncio.ensure_future(
                self._agent.call(lease.task_input, context)
                if self._agent.is_async
                else _in_thread(self._agent, lease.task_input, context)
            )
        try:
            done, _ = await asyncio.wait({work}, timeout=lease.timeout)
        except asyncio.CancelledError:
            await self._end(work)
            raise
        if not done:
            await self._end(work)
            return Ending.TIMED_OUT, None, f"the attempt took longer than {lease.timeout:g} seconds"
        try:
            result = work.result()
        except asyncio.CancelledError:
            return Ending.CRASHED, None, "the agent cancelled itself"
        except BaseException as error:
            return Ending.CRASHED, None, _describe(error)
        fault = _not_json(result)
        return (Ending.CRASHED, None, fault) if fault else (Ending.FINISHED, result, None)

    async def _end(self, work: asyncio.Future[Any]) -> None:
        work.cancel()
        await asyncio.wait({work}, timeout=_CANCEL_GRACE if self._agent.is_async else 0)
        if not self._agent.is_async or not work.done():
            self.abandoned += 1
            logger.warning("An agent did not end when cancelled and was abandoned (%d so far).", self.abandoned)


def _in_thread(agent: Agent, task_input: Json, context: AgentContext) -> asyncio.Future[Any]:
    """Run a sync agent in a daemon thread of its own, so that one that hangs keeps no other waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(_describe(error)))

    def work() -> None:
        result, error = None, None
        try:
            result = agent.call(task_input, context)
            if asyncio.iscoroutine(result):
                result = asyncio.run(result)
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            logger.debug("A thread ended after its worker.")

    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True, name="agl-agent").start()
    return future


def _describe(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({os.path.basename(last[0].filename)}:{last[0].lineno})" if last else ""
    return f"{type(error).__name__}: {error}{where}"


def _not_json(result: Any) -> str | None:
    try:
        encoded = orjson.dumps(result)
    except TypeError as error:
        return f"the agent returned what is not JSON ({error}); return a string, number, list or dict"
    if isinstance(result, float) and encoded == b"null":
        return "the agent returned a number that is not finite"
    return None


class WorkerThread:
    """A worker in a thread and event loop of its own, so that agents that block do not stop the server."""

    def __init__(self, agent: Agent, *, base_url: str, worker_key: str, agent_key: str, concurrency: int) -> None:
        self._agent, self._base_url, self._worker_key = agent, base_url, worker_key
        self._agent_key, self._concurrency = agent_key, concurrency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True, name="agl-worker")
        self._task: asyncio.Task[None] | None = None
        self.worker: Worker | None = None

    def start(self) -> None:
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._run())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            logger.debug("The worker was stopped.")
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _run(self) -> None:
        async with LightningClient(self._base_url, self._worker_key) as client:
            self.worker = Worker(client, self._agent, agent_key=self._agent_key, concurrency=self._concurrency)
            await self.worker.run()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def stop(self, timeout: float = 10.0) -> None:
        """Cancel what runs and wait for the thread; calling it again changes nothing."""
        if self._thread.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, timeout)
