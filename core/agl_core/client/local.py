"""The workers on this machine: how the attempts of an agent run, and in which processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import orjson

from agl_core.capture import attach, installed_adapters
from agl_core.client.agent import TaskPerAttempt, client_variables, load_agent
from agl_core.client.processes import (
    AgentProcesses,
    Command,
    CommandPerAttempt,
    ProcessPerAttempt,
    agent_import,
    draw_anew,
    import_agent,
    prepare_agent,
)
from agl_core.client.worker import LightningClient, Runner, Worker, until_signal
from agl_core.errors import AgentError, AglError
from agl_core.kinds import HARNESS
from agl_core.plugins import Plugins
from agl_core.processes import NoProcessError, fate, request
from agl_core.protocols import Harness

if TYPE_CHECKING:  # It takes long to import, and no process of an agent needs it.
    from agl_core.config.models import RunConfig

logger = logging.getLogger(__name__)

_MAX_PROCESSES = 16
"""More would each have few of the rollouts that run at the same time."""
_RESTART_DELAY = 1.0
_PROGRAMS_PER_CORE = 4
"""Some take ten seconds of a core to start, and time out where many start at once."""


def choose_runner(config: RunConfig, plugins: Plugins, base_url: str) -> Runner:
    """The runner of a configuration's agent, for the server at `base_url`.

    A Python agent is imported, with the adapters of `plugins` attached in this process; clients that its import makes
    find the server inside `agent_environment`. AgentError if the import fails, or if there is no such command.
    """
    agent, workers, folder = config.agent, config.workers, config.folder
    assert agent is not None
    files = config.plugin_files if agent.attach else None
    memory = None if workers.memory_mib is None else workers.memory_mib * 2**20
    secrets = config.secret_variables(os.environ)
    if agent.entry is None:
        if agent.command is not None:
            return CommandPerAttempt(Command(agent.command, folder), plugins=files, memory=memory, secrets=secrets)
        component = plugins.component(HARNESS, str(agent.harness), "agent.harness")
        harness: Harness = component.build(component.options(**agent.options or {}), config)
        # It has no framework that agl knows, and settings of its own.
        runner = CommandPerAttempt(harness, plugins=None, memory=memory, secrets=secrets)
        runner.default_concurrency = _PROGRAMS_PER_CORE * _cores()
        return runner
    if agent.attach:
        attach(installed_adapters(plugins))
    imported = load_agent(agent.entry, folder)
    if imported.is_async and workers.isolation == "auto" and memory is None:
        return TaskPerAttempt(imported)
    return ProcessPerAttempt(agent.entry, folder, base_url=base_url, plugins=files, memory=memory, secrets=secrets)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


async def workers_beside(
    config: RunConfig, runner: Runner, base_url: str, worker_key: str
) -> WorkerProcesses | WorkerThread:
    """Workers for the trainer's machine: processes for an async agent that they can import, else a thread."""
    agent, workers = config.agent, config.workers
    assert agent is not None
    total = workers.concurrency or runner.default_concurrency
    count = min(total, workers.processes or min(_cores(), _MAX_PROCESSES))
    if count > 1 and isinstance(runner, TaskPerAttempt):
        assert agent.entry is not None
        processes = WorkerProcesses(
            agent_import(agent.entry, config.folder, config.plugin_files if agent.attach else None),
            base_url,
            worker_key,
            concurrency=[len(range(number, total, count)) for number in range(count)],
            secrets=config.secret_variables(os.environ),
        )
        try:
            await processes.start()
        except AgentError as error:
            logger.warning("The agent runs in the trainer's process. %s", error)
        else:
            return processes
    return WorkerThread(runner, base_url=base_url, worker_key=worker_key, concurrency=workers.concurrency)


class WorkerProcesses(AgentProcesses):
    """Workers of an async agent, each in a process of its own; one that ends before the run is over is replaced."""

    def __init__(
        self,
        agent: Sequence[Any],
        base_url: str,
        worker_key: str,
        *,
        concurrency: Sequence[int],
        secrets: Collection[str] = (),
    ) -> None:
        """`agent` has the arguments of `import_agent`, `concurrency` the rollouts of each worker at the same time."""
        first = request(_run_worker, prepare=(prepare_agent, *agent))
        # Tools that outlive their attempt: a worker would keep each as a zombie once it exits.
        super().__init__(first, client_variables(base_url), secrets, adopt=False)
        self.problems: Counter[str] = Counter()
        job = {"agent": agent, "base_url": base_url, "key": worker_key}
        self._jobs = [{**job, "concurrency": most} for most in concurrency]
        self._working: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._working = asyncio.create_task(self._work())

    @property
    def alive(self) -> bool:
        return self._working is not None and not self._working.done()

    async def stop(self) -> None:
        """Give back what runs and end all workers; calling it again changes nothing."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.wait({self._working})
        await self.close()

    async def _work(self) -> None:
        try:
            async with asyncio.TaskGroup() as workers:
                for job in self._jobs:
                    workers.create_task(self._keep(job))
        except* AgentError as errors:
            logger.error("The workers stopped. %s", errors.exceptions[0])

    async def _keep(self, job: Mapping[str, Any]) -> None:
        """Have a worker in a process until the run is over."""
        while True:
            try:
                async with self.started() as process:
                    process.send(job)
                    async for message in process.messages():
                        self._take(message)
                    status = await process.exited
                if status == 0:
                    return
                ended = fate(status)
            except (NoProcessError, ValueError) as error:
                ended = f"was lost ({error})"
            logger.warning("A worker's process %s; another one is started.", ended)
            await asyncio.sleep(_RESTART_DELAY)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "failed" in message:
            raise AgentError(message["failed"])
        if "log" in message:
            name, level, text = message["log"]
            logging.getLogger(name).log(level, "%s", text)
        else:
            self.problems[message["problem"]] += 1


class _LogForwarder(logging.Handler):
    def __init__(self, channel: socket.socket) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        _send(self._channel, {"log": [record.name, record.levelno, self.format(record)]})


def _run_worker(job: dict[str, Any], channel: socket.socket) -> None:
    """In the process: be a worker until the run is over or this process is to end."""
    if not logging.root.handlers:
        logging.root.addHandler(_LogForwarder(channel))
    draw_anew()

    async def work() -> signal.Signals | None:
        async with LightningClient(job["base_url"], job["key"]) as client:
            worker = Worker(client, TaskPerAttempt(import_agent(*job["agent"])), concurrency=job["concurrency"])
            worker.on_problem = lambda text: _send(channel, {"problem": text})
            return await until_signal(worker.run())

    try:
        if asyncio.run(work()) is not None:
            sys.exit(1)
    except AglError as error:
        _send(channel, {"failed": str(error)})


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # The run is gone.
        channel.sendall(orjson.dumps(message) + b"\n")


class WorkerThread:
    """A worker in a thread and event loop of its own, so that agents that block do not stop the server."""

    def __init__(self, runner: Runner, *, base_url: str, worker_key: str, concurrency: int | None) -> None:
        self._runner, self._base_url, self._worker_key, self._concurrency = runner, base_url, worker_key, concurrency
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, daemon=True, name="agl-worker")
        self._task: asyncio.Task[None] | None = None
        self.worker: Worker | None = None

    def begin(self) -> None:
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._task = self._loop.create_task(self._run())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            logger.debug("The worker was stopped.")
        except AglError as error:
            logger.error("The worker stopped. %s", error)
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _run(self) -> None:
        async with LightningClient(self._base_url, self._worker_key) as client:
            self.worker = Worker(client, self._runner, concurrency=self._concurrency)
            await self.worker.run()

    @property
    def problems(self) -> Mapping[str, int]:
        return self.worker.problems if self.worker else {}

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def stop(self, timeout: float = 10.0) -> None:
        """Cancel what runs and wait for the thread; calling it again changes nothing."""
        if self._thread.ident is None:  # It never began.
            self._loop.close()
            return
        if self._thread.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
        await asyncio.to_thread(self._thread.join, timeout)
