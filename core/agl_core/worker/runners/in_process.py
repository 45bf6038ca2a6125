"""Agents in the worker's own process: async ones as tasks of its loop, sync ones in threads."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from typing import Any

from agl_core.capture import Recording, running
from agl_core.types import Ending, Json
from agl_core.wire.workers import Assignment
from agl_core.worker.agent import Agent, AgentContext
from agl_core.worker.environment import Ended, active_attempt, agent_context, crashed, finished

logger = logging.getLogger(__name__)

_CANCEL_GRACE = 2.0
"""Seconds an async agent gets to end after it was cancelled."""


class InProcess:
    """Runs attempts in this process. Cheap, and nothing can be ended by force.

    A thread, or a task that swallows its cancellation, is abandoned when its time is up: it is counted in `abandoned`,
    and its later requests are refused. An async agent that blocks keeps all others waiting.
    """

    def __init__(self, agent: Agent) -> None:
        self.abandoned = 0
        self.at_once = 128 if agent.is_async else 32
        self._agent = agent

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> Ended:
        context = agent_context(assignment, base_url)
        with running(active_attempt(assignment, base_url, recording)):
            work = asyncio.ensure_future(
                _awaited(self._agent, assignment.task_input, context)
                if self._agent.is_async
                else _in_thread(self._agent, assignment.task_input, context)
            )
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            if not work.done():
                await self._end(work)
                raise
        try:
            result = work.result()
        except asyncio.CancelledError:
            return Ended(Ending.CRASHED, error="the agent cancelled itself")
        except BaseException as error:
            return crashed(error)
        return result if isinstance(result, Ended) else finished(result)

    async def _end(self, work: asyncio.Future[Any]) -> None:
        work.cancel()
        await asyncio.wait({work}, timeout=_CANCEL_GRACE if self._agent.is_async else 0)
        if not self._agent.is_async or not work.done():
            self.abandoned += 1
            logger.warning(
                "An agent did not end when cancelled and was abandoned (%d so far). [workers] isolation = 'process' "
                "ends such agents by force.",
                self.abandoned,
            )


async def _awaited(agent: Agent, task_input: Json, context: AgentContext) -> Any:
    return await agent.call(task_input, context)


def _in_thread(agent: Agent, task_input: Json, context: AgentContext) -> asyncio.Future[Ended]:
    """Run a sync agent in a daemon thread of its own, so that one that hangs keeps no other waiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Ended] = loop.create_future()

    def settle(ended: Ended) -> None:
        if not future.done():
            future.set_result(ended)

    def work() -> None:
        ended = call_agent(agent, task_input, context)
        try:
            loop.call_soon_threadsafe(settle, ended)
        except RuntimeError:
            logger.debug("A thread ended after its worker.")

    threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True, name="agl-agent").start()
    return future


def call_agent(agent: Agent, task_input: Json, context: AgentContext) -> Ended:
    """Call the agent, sync or async, where no event loop is running, and say how it ended; nothing is raised."""
    try:
        result = agent.call(task_input, context)
        if asyncio.iscoroutine(result):
            result = asyncio.run(result)
        return finished(result)
    except BaseException as error:
        return crashed(error)
