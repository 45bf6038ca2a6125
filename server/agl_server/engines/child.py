"""The engine's process: what it needs to be started, asked and ended by `agl_server.engines.host`. Its main function:

    def main():
        host = Host.connect(MyOptions)
        with host.starting():
            host.stage("loading the weights")
            engine = MyEngine(host.options, host.context)
        host.serve(engine)

It writes its log to standard error, and ends when its standard input ends: it cannot outlive the run.

Run and process send each other pickled tuples, each after its length: both are the user's own program. The first one
has the options and the context; each other one is a command `(number, method, arguments)`. The process answers
`(number, kind, value)`: any number of "stage" or "progress", then "value" or "error". An answer without a number says
what the engine lost; the process ends after it.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Generic, NoReturn, TypeVar

from pydantic import BaseModel

from agl_core import kinds
from agl_core.errors import AglError, ConfigError, EngineError, own_line
from agl_core.plugins import Plugins
from agl_core.protocols import EngineContext

START = 0
"""The number of the start: the answer says where the engine serves, or why it does not start."""
HEADER = 8
"""Bytes of the length before each message."""
Options = TypeVar("Options", bound=BaseModel)
_log = logging.getLogger(__name__)


class Host(Generic[Options]):
    """The run that started this process."""

    def __init__(self, options: Options, context: EngineContext, answers: IO[bytes]) -> None:
        self.options = options
        self.context = context
        self._answers = answers
        self._writing = threading.Lock()
        self._engine: Any = None
        self._commands: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()

    @classmethod
    def connect(cls, options: type[Options], at_end: Callable[[], None] | None = None) -> Host[Options]:
        """Read the settings; `at_end` is called before this process ends with its standard input."""
        answers = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # A library's prints go to the log.
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        # A reader of its own: Python closes sys.stdin at the end, which fails while a thread reads from it.
        source = os.fdopen(0, "rb", closefd=False)
        values, context = _read(source) or sys.exit(1)
        host = cls(options.model_validate(values), context, answers)
        threading.Thread(target=host._listen, args=(source, at_end), name="agl-host", daemon=True).start()
        return host

    @contextmanager
    def starting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _log.exception("The engine cannot start.")
            self._say(START, "error", described(error))
            sys.exit(1)

    def stage(self, name: str) -> None:
        """Tell the run what it waits for from now on, as in "loading the weights"; most engines do at the start."""
        _log.info("Stage: %s.", name)
        self._say(START, "stage", name)

    def serve(self, engine: Any) -> NoReturn:
        """Say that the engine serves, and do what the run asks for.

        It has `urls`, OpenAI-compatible base URLs that end in /v1, and `context_length`, the shortest of the policies',
        0 if there is none yet. It has the methods of `agl_core.protocols.Engine` as plain functions: `update`, `save`,
        `load`, `versions`, `stats`, and optional ones. They are called one after the other, on the main thread, and run
        to their end even if the run no longer waits for them; `versions` and `stats` are asked meanwhile too, on other
        threads. To its counters the memory of its processes on this machine is added.
        """
        self._engine = engine
        self._say(START, "value", (engine.urls, engine.context_length))
        while True:
            self._answer(*self._commands.get())

    def lost(self, reason: str) -> NoReturn:
        """Tell the run which part of the engine was lost, and end: what waits for it may wait for ever."""
        _log.error("%s", reason)
        self._say(None, "error", reason)
        os._exit(1)

    def _listen(self, source: IO[bytes], at_end: Callable[[], None] | None) -> None:
        while (command := _read(source)) is not None:
            if command[1] in ("versions", "stats"):
                threading.Thread(target=self._answer, args=command, daemon=True).start()
            else:
                self._commands.put(command)
        try:
            if at_end is not None:
                at_end()
        finally:
            os._exit(0)

    def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            function = getattr(self._engine, method, None)
            if function is None:
                raise EngineError(f"This engine does not support '{method}'.")
            progress = (partial(self._say, number, "progress"),) if method == "update" else ()
            value = function(*arguments, *progress)
            if method == "stats":
                value = {**value, "peak_rss_bytes": float(peak_rss_bytes() + descendants_bytes())}
            self._say(number, "value", value)
        except Exception as error:
            if not isinstance(error, AglError):
                _log.exception("The engine failed in '%s'.", method)
            self._say(number, "error", described(error))

    def _say(self, number: int | None, kind: str, value: Any) -> None:
        data = message((number, kind, value))
        with self._writing:
            self._answers.write(data)
            self._answers.flush()


def message(value: Any) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(HEADER) + data


def _read(source: IO[bytes]) -> Any:
    """The next message; None at the end."""
    size = int.from_bytes(source.read(HEADER))
    return pickle.loads(source.read(size)) if size else None


def described(error: Exception) -> tuple[str | None, str]:
    """An error on purpose crosses as its class and its text, any other as one line: the run may not have its class."""
    return (type(error).__name__, str(error)) if isinstance(error, AglError) else (None, in_one_line(error))


def in_one_line(error: Exception) -> str:
    """An error's class, the last line of its text, and the line of code outside of libraries that raised it.

    >>> in_one_line(ValueError("a traceback of another process\\nno such luck"))
    'ValueError: no such luck'
    """
    lines, code = str(error).strip().splitlines(), own_line(error, __file__)
    return f"{type(error).__name__}: {lines[-1].strip() if lines else ''}{f' ({code})' if code else ''}"


def peak_rss_bytes() -> int:
    """The most memory that this process had resident; on Linux, `getrusage` counts the parent's too."""
    if peak := _memory("self/status", "VmHWM"):
        return peak
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def descendants_bytes() -> int:
    """Bytes resident in the processes below this one; a page that some share counts once. 0 without /proc."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # A process may end meanwhile.
            children[int(status.read_text().rpartition(")")[2].split()[1])].append(int(status.parent.name))
    resident, below = 0, list(children[os.getpid()])
    while below:
        pid = below.pop()
        below += children[pid]
        resident += _memory(f"{pid}/smaps_rollup", "Pss")
    return resident


def _memory(file: str, field: str) -> int:
    """The bytes that a field of a file below /proc says; 0 where there is none, or its process has ended."""
    with suppress(OSError):
        if kib := re.search(rf"^{field}:\s+(\d+) kB", Path("/proc", file).read_text(), re.MULTILINE):
            return int(kib[1]) * 1024
    return 0


def build_algorithm(plugins: Plugins, name: str, options: Mapping[str, Any]) -> Any:
    """PluginError if no plugin brings the algorithm, ConfigError for options that it does not have."""
    component = plugins.component(kinds.ALGORITHM, name, "algorithm.name")
    try:
        settings = component.options.model_validate(dict(options))
    except ValueError as error:
        raise ConfigError(f"algorithm.{name}: {error}") from error
    return component.build(settings)
