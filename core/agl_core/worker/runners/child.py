"""The process that was forked for one attempt: it calls the agent and reports to the worker, or becomes a command.

The job comes as one line of JSON over the channel. It sends `{"tool_result": …}`, `{"reward": …}` and `{"problem": …}`
as they happen, and at last `{"ended": {"ending", "result", "error"}}`, or `{"failed": reason}` if nothing could be run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import orjson

from agl_core.capture import Recording, running
from agl_core.wire.workers import Assignment
from agl_core.worker.agent import Agent
from agl_core.worker.environment import Ended, active_attempt, agent_context, attempt_variables, crashed
from agl_core.worker.runners.in_process import call_agent


def run_job(files: list[int], load: Callable[[], Agent | None]) -> None:
    """Do the job that comes over the first of `files`; a command writes its output to the other two."""
    channel = _Channel(socket.socket(fileno=files[0]))
    job = channel.receive()
    if "command" in job:
        channel.send(failed=_execute(job, *files[1:]))
        return
    if job["folder"] is not None:
        os.chdir(job["folder"])
    _reseed()
    assignment = Assignment.model_validate(job["assignment"])
    os.environ.update(attempt_variables(assignment, job["base_url"]))
    ended = _run(load, assignment, job["base_url"], channel)
    channel.send(ended={"ending": ended.ending, "result": ended.result, "error": ended.error})
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _run(load: Callable[[], Agent | None], assignment: Assignment, base_url: str, channel: _Channel) -> Ended:
    recording = Recording(lambda report: channel.send(**report.model_dump(mode="json", exclude_none=True)))
    try:
        with running(active_attempt(assignment, base_url, recording)):
            agent = load()
            assert agent is not None
            return call_agent(agent, assignment.task_input, agent_context(assignment, base_url))
    except BaseException as error:
        return crashed(error)
    finally:
        recording.close()


def _execute(job: dict[str, Any], stdout: int, stderr: int) -> str:
    """Become the command; returns why that is not possible."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.write(1, b"\n")  # Tells the worker which process this is.
        os.chdir(job["folder"])
        os.environ.update(job["variables"])
        os.execvp(job["command"][0], job["command"])
    except (OSError, ValueError) as error:
        return f"the command could not be run ({error})"


def _reseed() -> None:
    """Give this process random numbers of its own; Python does so for `random` itself."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


class _Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def receive(self) -> Any:
        with self._connection.makefile("rb") as lines:
            return orjson.loads(lines.readline())

    def send(self, **message: Any) -> None:
        """Send the worker a message; if it is gone, do nothing."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(orjson.dumps(message) + b"\n")
