"""The engine's process: what it needs to be started, asked and ended by `agl_core.engines.host`. Its main function:

    def main():
        host = Host.connect(MyOptions)
        with host.starting():
            host.stage("loading the weights")
            engine = MyEngine(host.options, host.context)
        host.serve(engine)

It writes its log to standard error, and ends when its standard input ends: it cannot outlive the run.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from agl_core import kinds
from agl_core.engines import wire
from agl_core.engines.updates import UpdateRequest, encode_result
from agl_core.errors import ConfigError, EngineError
from agl_core.plugins import Component, Plugins
from agl_core.protocols import EngineContext, PolicySpec, Progress, UpdateResult
from agl_core.types import Batch, Needs, RecordedReply, TokenizedReply, Workload

PROGRESS_STEP = 0.01
"""Progress is reported when it grew by this share."""
_log = logging.getLogger(__name__)


class Served(Protocol):
    """What the process brings: an engine that serves already.

    `update`, `save` and `load` come one after the other, on the main thread, and run to their end even if the run no
    longer waits for them. `versions` and `stats` are asked meanwhile too, on other threads.
    """

    @property
    def urls(self) -> tuple[str, ...]:
        """OpenAI-compatible base URLs, each ending in /v1."""

    @property
    def context_length(self) -> int:
        """Of the policies' contexts the shortest; 0 if there is none yet."""

    def update(self, request: UpdateRequest, progress: Progress) -> UpdateResult: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def versions(self) -> Mapping[str, int]: ...

    def stats(self) -> Mapping[str, float]: ...


@runtime_checkable
class FullyServed(Served, Protocol):
    """An engine that can do all that `agl_core.protocols` has of engines; one after the other, as updates are."""

    def publish(self, name: str, spec: PolicySpec) -> None: ...

    def withdraw(self, name: str) -> None: ...

    def merge(self, spec: PolicySpec, folder: Path) -> None: ...

    def estimate(self, work: Workload) -> Needs: ...

    def tokenize(self, policy: str, replies: Sequence[RecordedReply]) -> Sequence[TokenizedReply | None]: ...

    def logprobs(self, policy: str, batch: Batch) -> NDArray[np.float64]: ...


class Host(Generic[wire.Options]):
    """The run that started this process."""

    def __init__(self, options: wire.Options, context: EngineContext, answers: IO[bytes]) -> None:
        self.options = options
        self.context = context
        self._answers = answers
        self._writing = threading.Lock()
        self._engine: Served | None = None
        self._commands: queue.SimpleQueue[tuple[wire.Command, bytes]] = queue.SimpleQueue()

    @classmethod
    def connect(cls, options: type[wire.Options], at_end: Callable[[], None] | None = None) -> Host[wire.Options]:
        """Read the settings. `at_end` is called before this process ends because its standard input did.

        Standard output is for answers alone: whatever a library prints goes to the log.
        """
        answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        # A reader of its own: Python closes sys.stdin at the end, which fails while a thread reads from it.
        source = os.fdopen(0, "rb", closefd=False)
        host = cls(*wire.decode_settings(source.readline(), options), answers)
        threading.Thread(target=host._read, args=(source, at_end), name="agl-host", daemon=True).start()
        return host

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Tell the run of an error, and end."""
        try:
            yield
        except Exception as error:
            _log.exception("The engine cannot start.")
            self._write(wire.Answer.of_error(wire.START, error))
            sys.exit(1)

    def stage(self, name: str) -> None:
        """Tell the run what the start does from now on, as in "loading the weights"."""
        _log.info("Start: %s.", name)
        self._write(wire.Answer(number=wire.START, stage=name))

    def serve(self, engine: Served) -> NoReturn:
        """Say that the engine serves, and do what the run asks for."""
        self._engine = engine
        ready = wire.Ready(urls=engine.urls, context_length=engine.context_length)
        self._write(wire.Answer(number=wire.START, value=ready.model_dump(mode="json")))
        while True:
            self._answer(engine, *self._commands.get())

    def lost(self, reason: str) -> NoReturn:
        """Tell the run that the engine lost a part of itself, and end: what waits for that part may wait for ever."""
        _log.error("%s", reason)
        self._write(wire.Answer(number=None, error=reason))
        os._exit(1)

    def _read(self, source: IO[bytes], at_end: Callable[[], None] | None) -> None:
        while line := source.readline():
            command = wire.Command.model_validate_json(line)
            body = source.read(command.size)
            if command.do in ("versions", "stats"):
                threading.Thread(target=self._answer, args=(self._engine, command, body), daemon=True).start()
            else:
                self._commands.put((command, body))
        try:
            if at_end is not None:
                at_end()
        finally:
            os._exit(0)

    def _answer(self, engine: Served, command: wire.Command, body: bytes) -> None:
        try:
            answer = wire.Answer(number=command.number, value=self._done(engine, command, body))
        except Exception as error:
            answer = wire.Answer.of_error(command.number, error)
            if answer.kind is None:
                _log.exception("The engine failed in '%s'.", command.do)
        self._write(answer)

    def _done(self, engine: Served, command: wire.Command, body: bytes) -> Any:
        folder = command.folder or Path()
        match command.do:
            case "update":
                return encode_result(engine.update(UpdateRequest.decode(body), self._reporter(command.number)))
            case "save":
                return engine.save(folder)
            case "load":
                return engine.load(folder)
            case "versions":
                return dict(engine.versions())
            case "stats":
                return dict(engine.stats())
        if not isinstance(engine, FullyServed):
            raise EngineError(f"This engine does not support '{command.do}'.")
        policy = command.policy or ""
        match command.do:
            case "estimate":
                return asdict(engine.estimate(Workload(**json.loads(body))))
            case "tokenize":
                return wire.encode_tokens(engine.tokenize(policy, wire.decode_replies(body)))
            case "logprobs":
                request = UpdateRequest.decode(body)
                return engine.logprobs(request.policy, request.batch).tolist()
            case "publish":
                return engine.publish(policy, wire.SPEC.validate_json(body))
            case "withdraw":
                return engine.withdraw(policy)
            case "merge":
                return engine.merge(wire.SPEC.validate_json(body), folder)

    def _reporter(self, number: int) -> Progress:
        reported = 0.0

        def report(share: float) -> None:
            nonlocal reported
            if share >= reported + PROGRESS_STEP or share == 1.0:
                reported = share
                self._write(wire.Answer(number=number, progress=share))

        return report

    def _write(self, answer: wire.Answer) -> None:
        with self._writing:
            self._answers.write(answer.encode())
            self._answers.flush()


def find_algorithm(plugins: Plugins, name: str, options: Mapping[str, Any]) -> tuple[Component, BaseModel]:
    """What a plugin registered under the name, and the options as its settings; `component.build(settings)` builds it.

    PluginError if no plugin brings it, ConfigError for options that it does not have.
    """
    component = plugins.component(kinds.ALGORITHM, name, "algorithm.name")
    try:
        return component, component.options.model_validate(dict(options))
    except ValueError as error:
        raise ConfigError(f"algorithm.{name}: {error}") from error
