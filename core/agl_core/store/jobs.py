"""The thread that writes a store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

Result = TypeVar("Result")


class JobThread:
    """Does jobs in a thread of its own, one after the other.

    An executor would do that too, but the locks and callbacks of its futures take more time than a small transaction.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Do a job that raises nothing, and that says itself when it is done."""
        self._jobs.put(job)

    async def result(self, job: Callable[[], Result]) -> Result:
        """Wait for what a job returns, or raises."""
        done: Future[Result] = Future()

        def settle() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(job())
                except BaseException as error:
                    done.set_exception(error)

        self.do(settle)
        return await asyncio.wrap_future(done)

    async def end(self) -> None:
        """End the thread after the jobs that it has."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
