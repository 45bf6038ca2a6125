"""The run's side of an engine: a child process that holds the weights, and pipes to it."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, cast

from agl_core import errors, private
from agl_core.errors import AglError, EngineError
from agl_core.protocols import (
    Engine,
    EngineContext,
    PolicySpec,
    Progress,
    ResponseScores,
    StageReport,
    UpdateResult,
    Upstream,
)
from agl_core.types import Batch, Call
from agl_server.engines.child import HEADER, START, Options, message

LOG_NAME = "engine.log"
LINES_SHOWN, LINES_SEARCHED = 12, 400
"""How many of the log's last lines an error shows, and how many are searched for a known reason."""


class ProcessEngine(Engine, Generic[Options]):
    """An engine in a process of its own; see `agl_core.protocols.Engine`. A subclass says what the process runs:

    class MyEngine(ProcessEngine[MyOptions]):
        module = "my_engine.process"  # python -m my_engine.process; see agl_server.engines.child
    """

    module: ClassVar[str]
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables of the process, where the run's own environment does not set them."""
    seconds_to_start: ClassVar[float] = 3600.0
    """Time until it serves, the download of a model included."""
    seconds_to_end: ClassVar[float] = 5.0
    """Time to end by itself before the process group is killed."""
    seconds_to_answer: ClassVar[float] = 120.0
    """Time to answer a question for its versions, even in an update, before the process group is killed."""

    def __init__(self, options: Options, context: EngineContext) -> None:
        self._options = options
        self._context = context
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._numbers = itertools.count(START)
        self._answers: dict[int, asyncio.Queue[tuple[str, Any] | None]] = {}
        """Answers to commands under way, by number; None: there will be no more."""
        self._loss = ""
        """The part that the process reported as lost."""
        self._stopped = False
        self._stage = "starting its process"
        self._began = self._stage_began = 0.0
        """The start and its stage, by `time.monotonic`."""
        self._report: StageReport = lambda stage, seconds: None
        self._log = context.run_dir / LOG_NAME
        self._log_start = 0

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        """Advice about an error, or the last lines of the log; `exit_code` is None while the process runs."""
        return None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def report_stages(self, report: StageReport) -> None:
        self._report = report

    async def start(self) -> Upstream:
        """Start the process and wait until it serves; an AglError says why it does not."""
        if self._process is not None:
            raise EngineError("The engine was already started.")
        self._began = self._stage_began = time.monotonic()
        try:
            await self._launch()
            files = tuple(file.absolute() for file in self._context.plugin_files)
            context = replace(self._context, run_dir=self._context.run_dir.absolute(), plugin_files=files)
            settings = message((self._options.model_dump(mode="json"), context))
            async with asyncio.timeout(self.seconds_to_start):
                urls, context_length = await self._exchange("start", next(self._numbers), settings)
        except TimeoutError as error:
            await self.stop()
            raise EngineError(
                _sentences(
                    f"The engine did not start in {self.seconds_to_start:g} s; it was {self._where}",
                    self.remedy(self._log_lines(LINES_SEARCHED), None),
                    self._end_of_log,
                )
            ) from error
        except BaseException:
            await self.stop()
            raise
        self._watching = asyncio.create_task(self._watch())
        return Upstream(
            urls=urls,
            models={name: name for name in self._context.policies},
            api_key=self._context.api_key,
            context_length=context_length or None,
            streams=True,
        )

    def check(self) -> None:
        if self._reading is not None and self._reading.done():
            raise self._lost("rollouts")

    async def update(self, policy: str, batch: Batch, progress: Progress | None = None) -> UpdateResult:
        return cast(UpdateResult, await self._ask("update", policy, batch, progress=progress))

    async def save(self, folder: Path) -> None:
        await self._ask("save", _absolute(folder))

    async def load(self, folder: Path) -> None:
        await self._ask("load", _absolute(folder))

    async def versions(self) -> Mapping[str, int]:
        return cast(Mapping[str, int], await self._ask("versions"))

    async def stats(self) -> Mapping[str, float]:
        return cast(Mapping[str, float], await self._ask("stats"))

    async def tokenize(self, policy: str, calls: Sequence[Call]) -> Sequence[Call]:
        return cast(Sequence[Call], await self._ask("tokenize", policy, calls))

    async def logprobs(self, policy: str, batch: Batch) -> ResponseScores:
        return cast(ResponseScores, await self._ask("logprobs", policy, batch))

    async def load_policy(self, name: str, spec: PolicySpec) -> None:
        await self._ask("load_policy", name, spec)

    async def unload_policy(self, name: str) -> None:
        await self._ask("unload_policy", name)

    async def stop(self) -> None:
        self._stopped = True
        if self._watching is not None:
            self._watching.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), self.seconds_to_end)
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._reading is not None:
            await self._reading

    async def _watch(self) -> None:
        """Kill a process that hangs: all that waits for it then hears that the engine was lost."""
        assert self._process is not None
        with suppress(AglError):
            while True:
                await asyncio.sleep(self.seconds_to_answer / 4)
                try:
                    await asyncio.wait_for(self.versions(), self.seconds_to_answer)
                except TimeoutError:
                    self._loss = f"It did not answer in {self.seconds_to_answer:g} s, and was ended"
                    with suppress(ProcessLookupError):
                        os.killpg(self._process.pid, signal.SIGKILL)

    async def _launch(self) -> None:
        self._context.run_dir.mkdir(parents=True, exist_ok=True)
        log = private.opener(str(self._log), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            self._log_start = os.fstat(log).st_size  # What came before is of another restart, and explains nothing.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                self.module,
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                env={**self.environment, **os.environ},
                start_new_session=True,  # Ctrl-C is for the run, which stops the engine when it is done with it.
            )
        finally:
            os.close(log)
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        with suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await process.stdout.readexactly(HEADER))
                number, kind, value = pickle.loads(await process.stdout.readexactly(size))
                if number is None:
                    self._loss = value
                elif kind == "stage":
                    self._stage, self._stage_began = value, time.monotonic()
                    self._report(value, self._stage_began - self._began)
                elif number in self._answers:  # Otherwise its caller has given up.
                    self._answers[number].put_nowait((kind, value))
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), self.seconds_to_end)
        for answers in self._answers.values():
            answers.put_nowait(None)

    async def _ask(self, method: str, *arguments: Any, progress: Progress | None = None) -> Any:
        if self._process is None or self._stopped:
            raise EngineError("The engine is not running: call start() first, and nothing after stop().")
        number = next(self._numbers)
        return await self._exchange(method, number, message((number, method, arguments)), progress)

    async def _exchange(self, doing: str, number: int, data: bytes, progress: Progress | None = None) -> Any:
        process, reading = self._process, self._reading
        assert process is not None
        assert process.stdin is not None
        assert reading is not None
        answers = self._answers[number] = asyncio.Queue()
        try:
            if reading.done():
                raise self._lost(doing)
            # The end of the process says more than this; uvloop calls a pipe that is closed a RuntimeError.
            with suppress(ConnectionError, RuntimeError):
                process.stdin.write(data)
                await process.stdin.drain()
            while (answer := await answers.get()) is not None:
                match answer:
                    case ("value", value):
                        return value
                    case ("error", (kind, text)):
                        raise self._failed(doing, kind, text)
                    case ("progress", share) if progress is not None:
                        progress(share)
            raise self._lost(doing)
        finally:
            del self._answers[number]

    @property
    def _where(self) -> str:
        return f"{self._stage}, for {time.monotonic() - self._stage_began:.0f} s"

    def _failed(self, doing: str, kind: str | None, text: str) -> AglError:
        """The error that the process described: on purpose as the class it had there, any other with its remedy."""
        starts = doing == "start"
        error_class: type[AglError] = getattr(errors, kind or "EngineError", EngineError)
        if kind is not None and not starts:
            return error_class(text)
        what = "The engine did not start" if starts else f"The engine failed in '{doing}'"
        end = f"(log: {self._log})" if starts else f"{self._how_to_resume} (log: {self._log})"
        remedy = self.remedy([text], None) or (self.remedy(self._log_lines(LINES_SEARCHED), None) if starts else None)
        return error_class(_sentences(f"{what}: {text}", remedy, end))

    def _lost(self, doing: str) -> EngineError:
        assert self._process is not None
        code = self._process.returncode
        lines = [self._loss] if self._loss else self._log_lines(LINES_SEARCHED)
        at = f"{self._where}; " if doing == "start" else ""
        return EngineError(
            _sentences(
                f"The engine was lost during '{doing}' ({at}exit code {'none' if code is None else code})",
                self._loss,
                self.remedy(lines, None if self._loss else code),
                self._how_to_resume,
                self._end_of_log,
            )
        )

    @property
    def _end_of_log(self) -> str:
        shown = self._log_lines(LINES_SHOWN)
        # The first error is the cause of those after it, of which there may be many.
        errors = [line for line in self._log_lines(LINES_SEARCHED) if re.search(r"(Error|Exception): ", line)]
        shown = [*(line for line in errors[:1] if line not in shown), *shown]
        return "\n".join([f"The end of {self._log}:", *shown]) if shown else f"See {self._log}."

    @property
    def _how_to_resume(self) -> str:
        if not self._context.policies:
            return "Start it again."
        return f"Resume the run from its last checkpoint: agl train --resume {self._context.run_dir}"

    def _log_lines(self, count: int) -> list[str]:
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").splitlines()[-count:]
        return []


def _sentences(*parts: str | None) -> str:
    """Parts of a message, each ended with a full stop but for the last."""
    *before, last = (part.strip() for part in parts if part)
    return " ".join([*(part if part.endswith((".", "?", "!")) else f"{part}." for part in before), last])


def _absolute(path: Path) -> Path:
    return path.absolute()  # The process may have another working directory.
