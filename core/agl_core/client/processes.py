"""Attempts in processes and folders of their own, which end as a whole: of Python agents, and of commands.

The process of a Python agent is a fork that has imported the agent. It sends `{"tool_result": …}`, `{"reward": …}` and
`{"problem": …}` as they happen, and at last `{"ended": {"ending", "result", "error"}}`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from agl_core.capture import Recording, attach, installed_adapters, running
from agl_core.capture.attaching import bootstrap_variables
from agl_core.capture.context import Report
from agl_core.capture.reports import read_spool
from agl_core.client.agent import (
    OTHER_KEY,
    Agent,
    AttemptEnd,
    active_attempt,
    attempt_variables,
    client_variables,
    crashed,
    finished,
    load_agent,
)
from agl_core.errors import AgentError
from agl_core.plugins import Plugins
from agl_core.processes import ForkServer, NoProcessError, Process, fate, request
from agl_core.protocols import Harness, Launch
from agl_core.types import AttemptKey, Ending, Json
from agl_core.types.forms import parse_json
from agl_core.wire import MAX_RESULT, OPERATOR_KEY, WORKER_KEY, Assignment

EXIT_GRACE = 2.0
"""Seconds for a process to exit after its result came, and for its output to end after it exited."""
_ENDED = TypeAdapter(AttemptEnd)
_MESSAGES = [{"role": "user", "content": "-"}]
_REPLY = {"choices": [{"message": {"tool_calls": [{"type": "function", "function": {}}]}}], "usage": {}, "content": []}
_FIRST_CALLS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "openai": lambda openai, settings: openai.OpenAI(**settings).chat.completions.create(model="-", messages=_MESSAGES),
    "anthropic": lambda anthropic, settings: anthropic.Anthropic(**settings).messages.create(
        model="-", max_tokens=1, messages=_MESSAGES
    ),
}
_MAX_TEXT = 1 << 20
"""Characters kept of an output that does not end with JSON; JSON writes one as six bytes at most."""
_MAX_ERRORS = 2000
"""Bytes kept of the stderr of a command that failed."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group (struct ucred)."""


class AgentProcesses(ForkServer):
    """Processes of an agent, which get none of the `secrets` among the variables, nor keys of workers or operators."""

    default_concurrency = 32

    def __init__(
        self, first: Mapping[str, Any], variables: Mapping[str, str], secrets: Collection[str], **options: Any
    ) -> None:
        names = {WORKER_KEY, OPERATOR_KEY, OTHER_KEY, *secrets}
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        super().__init__({**inherited, **variables}, first, **options)


@contextlib.contextmanager
def attempt_folder() -> Iterator[Path]:
    """A folder for one attempt; it is removed in the background, for an agent can make that take long, or fail."""
    folder = TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True)

    def remove() -> None:
        with contextlib.suppress(RecursionError):
            folder.cleanup()
        if Path(folder.name).exists():  # Python needs a call and an open file for each level; these do not.
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, "--", folder.name], stderr=subprocess.DEVNULL, check=False)

    try:
        yield Path(folder.name)
    finally:
        threading.Thread(target=remove, name="agl-remover").start()


class ProcessPerAttempt(AgentProcesses):
    """Runs each attempt of a Python agent in a fork of a process that has imported the agent, in milliseconds.

    When time is up, the fork and everything that it started are ended. Its working folder is empty and the attempt's
    own. The adapters of the files `plugins` are attached beside the installed ones (None: none are); `memory` is in
    bytes.
    """

    def __init__(
        self,
        entry: str,
        folder: Path,
        *,
        base_url: str,
        plugins: Sequence[Path] | None = (),
        memory: int | None = None,
        secrets: Collection[str] = (),
    ) -> None:
        self._agent = agent_import(entry, folder, plugins)
        first = request(_run_agent, prepare=(prepare_agent, *self._agent))
        super().__init__(first, client_variables(base_url), secrets, memory=memory)

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> AttemptEnd:
        ended: AttemptEnd | None = None
        with attempt_folder() as folder:
            try:
                async with self.started() as process:
                    job = {"assignment": assignment.model_dump(mode="json"), "base_url": base_url}
                    process.send({**job, "agent": self._agent, "folder": str(folder)})
                    ended = await _ended(process, recording)
                    await asyncio.wait({process.exited}, timeout=EXIT_GRACE)
            except NoProcessError as error:
                return AttemptEnd(Ending.LOST, error=str(error))
            except asyncio.CancelledError:
                if ended is None:
                    raise
        return ended


async def _ended(process: Process, recording: Recording) -> AttemptEnd:
    """How the agent ended, as soon as that is known; its process may still be exiting. Its reports are recorded."""
    try:
        async for message in process.messages():
            if "ended" in message:
                ended = _ENDED.validate_python(message["ended"])
                if ended.ending not in (Ending.FINISHED, Ending.CRASHED):  # Anything else is for the worker to say.
                    raise ValueError(f"it ended as {ended.ending}")
                return ended
            Report.model_validate(message).add_to(recording)
    except ValueError as error:
        problem = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else error
        return AttemptEnd(Ending.CRASHED, error=f"what the agent's process sent cannot be read ({problem})")
    return AttemptEnd(Ending.CRASHED, error=f"the agent's process {fate(await process.exited)} before it had a result")


def agent_import(entry: str, folder: Path, plugins: Sequence[Path] | None) -> tuple[Any, ...]:
    """The arguments of `import_agent`, as JSON has them."""
    return entry, str(folder), plugins is not None, *map(str, plugins or ())


@cache
def import_agent(entry: str, folder: str, attaches: bool, *plugins: str) -> Agent:
    """Import the agent, once; its adapters are attached before."""
    if attaches:
        attach(installed_adapters(Plugins.load([Path(path) for path in plugins])))
    return load_agent(entry, Path(folder))


def prepare_agent(*agent: Any) -> None:
    """Import the agent, and what its clients import at their first call: 50 ms of CPU in each fork for openai's."""
    import_agent(*agent)
    for name, call in _FIRST_CALLS.items():
        library: Any = sys.modules.get(name)
        if library is not None:
            with contextlib.suppress(Exception):
                httpx: Any = sys.modules[library.DefaultHttpxClient.__base__.__module__]
                _share_certificates(httpx)
                reply = httpx.Response(200, json=_REPLY)
                with httpx.Client(transport=httpx.MockTransport(lambda _, reply=reply: reply)) as http:
                    call(library, {"api_key": "-", "base_url": "http://agl", "http_client": http})
    "agl".encode("idna")


def _share_certificates(httpx: Any) -> None:
    """Have clients that the agent makes share one TLS context: to read the certificates takes each of them 40 ms."""
    transports: Any = sys.modules[f"{httpx.__name__}._transports.default"]
    if transports.create_ssl_context is httpx.create_ssl_context:

        @cache
        def usual(trust_env: bool, *files: str | None) -> Any:
            return httpx.create_ssl_context(trust_env=trust_env)

        def create(verify: Any = True, cert: Any = None, trust_env: bool = True) -> Any:
            if verify is not True or cert is not None:
                return httpx.create_ssl_context(verify, cert, trust_env)
            return usual(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))

        transports.create_ssl_context = create
        create()


def _run_agent(job: dict[str, Any], channel: socket.socket) -> None:
    """In the process: call the agent, which is imported here if that could not be done before."""
    os.chdir(job["folder"])
    draw_anew()
    assignment, base_url = Assignment.model_validate(job["assignment"]), job["base_url"]
    os.environ.update(attempt_variables(assignment, base_url))
    sending = threading.Lock()

    def send(message: dict[str, Any]) -> None:
        with sending, contextlib.suppress(OSError):  # The worker is gone.
            channel.sendall(orjson.dumps(message) + b"\n")

    recording = Recording(lambda report: send(report.model_dump(mode="json", exclude_none=True)))
    try:
        with running(active_attempt(assignment, base_url, recording)):
            result = import_agent(*job["agent"]).call(assignment, base_url)
            ended = finished(asyncio.run(result) if asyncio.iscoroutine(result) else result)
    except BaseException as error:
        ended = crashed(error)
    recording.close()
    send({"ended": asdict(ended)})
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()


def draw_anew() -> None:
    """Forks would draw the same numbers from numpy; Python itself takes care of `random`."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


class Command:
    """A user's command, which is run in an empty folder of the attempt's own.

    Arguments that name a file in `folder` are made absolute, and for -m and -c, Python finds modules there. AgentError
    if there is no such program.
    """

    def __init__(self, command: str | Sequence[str], folder: Path) -> None:
        program, *arguments = shlex.split(command) if isinstance(command, str) else command
        # A name with a slash is a path from the folder.
        if shutil.which(folder / program if os.path.dirname(program) else program) is None:
            raise AgentError(
                f"agent.command: there is no program '{program}' to run, neither on the PATH nor relative to "
                f"{folder}. Install it, or write its whole path."
            )
        folder = folder.absolute()
        program = str(folder / program) if os.path.dirname(program) else program
        self._command = [program, *(_from(folder, argument) for argument in arguments)]
        paths = (str(folder), os.environ.get("PYTHONPATH"))
        modules = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._variables = modules if {"-m", "-c"} & set(arguments) else {}

    @contextlib.asynccontextmanager
    async def launch(self, assignment: Assignment, base_url: str, folder: Path) -> AsyncIterator[Launch]:
        yield Launch(self._command, folder, self._variables)


class CommandPerAttempt(AgentProcesses):
    """Runs a program for each attempt, with the attempt in its environment.

    It printed the last line of its output if that is JSON, else the last 1 MiB; the output of other processes counts
    only if the program prints nothing. Any exit status but 0 is a crash. `memory` is in bytes. The installed adapters,
    and those of the files `plugins` (None: none), are attached in its Python processes.
    """

    def __init__(
        self,
        harness: Harness,
        *,
        plugins: Sequence[Path] | None = (),
        memory: int | None = None,
        secrets: Collection[str] = (),
    ) -> None:
        self._harness, self._plugins = harness, plugins
        super().__init__(request(_execute), {}, secrets, memory=memory)

    async def run(self, assignment: Assignment, base_url: str, recording: Recording) -> AttemptEnd:
        with attempt_folder() as folder:
            reports, work = folder / "reports", folder / "work"
            reports.mkdir()
            work.mkdir()
            async with self._harness.launch(assignment, base_url, work) as launch:
                variables = {**attempt_variables(assignment, base_url), **launch.variables}
                if self._plugins is not None:
                    key = AttemptKey(assignment.rollout, assignment.attempt)
                    inherited = {**os.environ, **variables}
                    variables |= bootstrap_variables(key, base_url, assignment.key, reports, inherited, self._plugins)
                try:
                    return await self._ended(launch, variables, recording)
                finally:
                    await asyncio.to_thread(read_spool, reports, recording)

    async def _ended(self, launch: Launch, variables: Mapping[str, str], recording: Recording) -> AttemptEnd:
        job = {"command": launch.command, "folder": str(launch.folder), "variables": variables}
        status, failures = None, list[str]()
        with TemporaryFile() as stderr, _Output() as output:
            try:
                async with self.started(output.theirs.fileno(), stderr.fileno()) as process:
                    output.theirs.close()
                    process.send(job)
                    failures = [message["failed"] async for message in process.messages() if "failed" in message]
                    status = await process.exited
                await asyncio.wait({output.ended}, timeout=EXIT_GRACE)
            except NoProcessError as error:
                return AttemptEnd(Ending.LOST, error=str(error))
            except asyncio.CancelledError:
                if status is None:
                    raise
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MAX_ERRORS))
            tail = stderr.read(_MAX_ERRORS).decode(errors="replace").strip()
        if failures:
            return AttemptEnd(Ending.CRASHED, error=failures[0])
        if status != 0:
            its_end = f"; the end of its stderr: {tail}" if tail else ""
            return AttemptEnd(Ending.CRASHED, error=f"the command {fate(status)}{its_end}")
        return finished(await asyncio.to_thread(launch.result, _printed(output.of_the_command(recording))))


def _execute(job: dict[str, Any], channel: socket.socket, stdout: int, stderr: int) -> None:
    """In the process: become the command, or say why that is not possible."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.write(1, b"\n")  # Tells the worker which process this is.
        os.chdir(job["folder"])
        os.environ.update(job["variables"])
        os.execvp(job["command"][0], job["command"])
    except (OSError, ValueError) as error:
        channel.sendall(orjson.dumps({"failed": f"the command could not be run ({error})"}) + b"\n")


def _from(folder: Path, argument: str) -> str:
    """The argument of a command; absolute if it names a file in `folder`, or a folder there by a path with a slash."""
    path = os.path.join(folder, argument)
    is_folder = os.path.isdir(path) and (os.sep in argument or argument == os.curdir)
    return path if is_folder or os.path.isfile(path) else argument


class _Tail:
    """The last `MAX_RESULT` bytes of what was printed."""

    def __init__(self) -> None:
        self.kept = bytearray()
        self.size = 0

    def add(self, data: bytes) -> None:
        self.kept += data
        self.size += len(data)
        del self.kept[:-MAX_RESULT]

    def text(self) -> str:
        return self.kept.decode(errors="replace").strip()


class _Output:
    """The end of a command's output, and apart from it what its own process, the first to write, has written.

    It is a socket: unlike a pipe, nobody can open it by /proc/PID/fd/1, and on Linux the system says who wrote.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        if sys.platform == "linux":
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._all, self._own = _Tail(), _Tail()
        self._command: int | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __enter__(self) -> _Output:
        asyncio.get_running_loop().add_reader(self._ours, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()

    def of_the_command(self, recording: Recording) -> _Tail:
        """The output of its own process, if there is any, else all output."""
        if not self._own.text():
            return self._all
        if self._all.size > self._own.size:
            recording.problem(
                "Other processes wrote to the output of the agent's command. That is no part of its result, since the "
                "command printed something itself. A shell script has to start its agent with exec."
            )
        return self._own

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._ours.recvmsg(2**16, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._ours)
            self.ended.set_result(None)
            return
        pids = [_CREDENTIALS.unpack(sent)[0] for _, _, sent in ancillary if len(sent) == _CREDENTIALS.size]
        writer = pids[0] if pids else 0
        self._command = writer if self._command is None else self._command
        self._all.add(data)
        if writer == self._command:
            self._own.add(data)


def _printed(output: _Tail) -> Json:
    text = output.text()
    try:
        return parse_json(text.rpartition("\n")[2])
    except orjson.JSONDecodeError:
        kept = text[-_MAX_TEXT:]
        left_out = output.size - len(output.kept) + len(text) - len(kept)
        note = f"(of its output, {left_out} characters more, which came before, were not kept)\n"
        return f"{note}{kept}" if left_out else kept or None
