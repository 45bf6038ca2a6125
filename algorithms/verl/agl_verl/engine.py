"""The run's side of the veRL engine: a child process that is veRL's driver, and pipes to it.

Imports neither veRL, Ray nor torch: a run's own process stays small, and Ray never runs inside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from agl_core import errors
from agl_core.errors import AglError, ConfigError, EngineError
from agl_core.protocols import EngineContext, Progress, UpdateResult, Upstream
from agl_core.types import Batch
from agl_core.wire.updates import UpdateRequest, decode_result
from agl_verl.faults import remedy_of
from agl_verl.options import VerlOptions
from agl_verl.wire import SECONDS_TO_NOTICE, Answer, Command, Ready, Settings

LOG_NAME = "engine.log"
SECONDS_TO_END = 30.0
"""How long the driver may take to end by itself, and Ray with it, before it is killed."""
LINES_SHOWN, LINES_SEARCHED = 12, 400
"""How much of its log an error message shows, and how much is searched for what is known."""
_COUNTERS = {
    "vllm:prompt_tokens_total": "tokens_prefilled",
    "vllm:prefix_cache_hits_total": "tokens_reused",
    "vllm:generation_tokens_total": "tokens_decoded",
}


class VerlEngine:
    """veRL on Ray; see `agl_core.protocols.Engine`.

    engine = VerlEngine(VerlOptions(), context)
    upstream = await engine.start()
    result = await engine.update("default", batch, "grpo", {})
    await engine.stop()
    """

    def __init__(self, options: VerlOptions, context: EngineContext) -> None:
        self._options = options
        self._context = context
        self._policy = _only_policy(context)
        self._process: subprocess.Popen[bytes] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._version = 0
        self._urls: tuple[str, ...] = ()
        self._log = context.run_dir / LOG_NAME
        self._log_start = 0

    async def start(self) -> Upstream:
        """Start the driver and wait until it serves. Raises EngineError with the reason if it does not."""
        if self._process is not None:
            raise EngineError("The engine was already started.")
        try:
            ready = await asyncio.to_thread(self._launch)
        except BaseException:
            await self.stop()
            raise
        self._urls = ready.urls
        return Upstream(
            urls=ready.urls,
            models={self._policy: self._policy},
            api_key=self._context.api_key,
            context_length=ready.context_length,
        )

    async def update(
        self, policy: str, batch: Batch, algorithm: str, options: Mapping[str, Any], progress: Progress | None = None
    ) -> UpdateResult:
        """Train on a batch; the new version is served, whole, when this returns."""
        body = UpdateRequest(policy, algorithm, options, batch).encode()
        result = decode_result(await self._ask(Command(do="update"), body))
        self._version = result.version
        if progress is not None:
            progress(1.0)
        return result

    async def save(self, folder: Path) -> None:
        """Write the policy below `folder`, which every node of the cluster has to see."""
        await self._ask(Command(do="save", folder=_place(folder)))

    async def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""
        value = await self._ask(Command(do="load", folder=_place(folder)))
        self._version = value["version"]

    async def versions(self) -> Mapping[str, int]:
        """The version being served."""
        return {self._policy: self._version}

    async def stats(self) -> Mapping[str, float]:
        """tokens_prefilled, tokens_reused, tokens_decoded since the start, over all servers."""
        totals = dict.fromkeys(_COUNTERS.values(), 0.0)
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            for url in self._urls:
                try:
                    reply = await client.get(f"{url.removesuffix('/v1')}/metrics")
                except httpx.TransportError as error:
                    async with self._one_at_a_time:
                        await asyncio.to_thread(self._tell_of_a_loss)
                    raise EngineError(
                        f"The vLLM server at {url} does not answer ({type(error).__name__}). Resume the run from its "
                        f"last checkpoint. {self._last_lines()}"
                    ) from error
                for name, value in _counters(reply.text):
                    totals[name] += value
        return totals

    async def stop(self) -> None:
        """End the driver and the Ray that it started; calling it again changes nothing."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_end, process)

    def describe(self) -> str:
        """veRL's resolved configuration and what it would take, without starting anything."""
        from agl_core.plugins import Kind, Plugins
        from agl_verl import config, cpu, mapping

        settings = self._settings()
        component = Plugins.load(settings.plugin_files).component(
            Kind.ALGORITHM, settings.spec.algorithm, "algorithm.name"
        )
        algorithm = component.options.model_validate(dict(settings.spec.algorithm_options))
        on_cpu = cpu.is_wanted(self._options.device, self._options.address)
        composed = config.compose(settings, algorithm=algorithm, cpu=on_cpu)
        return f"{config.as_text(composed)}# It would take {mapping.Resources.of(self._options, cpu=on_cpu)}.\n"

    def _settings(self) -> Settings:
        context = self._context
        return Settings(
            options=self._options,
            policy=self._policy,
            spec=context.policies[self._policy],
            seed=context.seed,
            deterministic=context.deterministic,
            updates=context.updates,
            run_dir=context.run_dir.absolute(),
            plugin_files=tuple(file.absolute() for file in context.plugin_files),
            api_key=context.api_key,
        )

    def _launch(self) -> Ready:
        """Start the driver, tell it its settings, wait for its answer."""
        self._context.run_dir.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._log_start = log.tell()  # What came before is of another incarnation, and explains nothing.
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "agl_verl.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which stops the engine when it is done with it.
            )
        self._send(process, self._settings().model_dump_json().encode() + b"\n")
        line = self._receive(process, "start")
        ready = Ready.model_validate_json(line)
        if ready.error is not None:
            raise EngineError(f"The engine did not start: {ready.error} {self._known_remedy()}(log: {self._log})")
        return ready

    async def _ask(self, command: Command, body: bytes = b"") -> dict[str, Any]:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._exchange, command, body)

    def _exchange(self, command: Command, body: bytes) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise EngineError("The engine is not running: call start() first, and nothing after stop().")
        self._send(process, command.encode(body))
        return self._value(self._receive(process, command.do), f"in '{command.do}'")

    def _value(self, line: bytes, when: str) -> dict[str, Any]:
        """What an answer brings; its error is raised."""
        answer = Answer.model_validate_json(line)
        if answer.error is not None:
            kind = getattr(errors, answer.kind, EngineError)
            if kind is EngineError:
                raise EngineError(
                    f"The engine failed {when}: {answer.error} Resume the run from its last checkpoint: "
                    f"agl train --resume {self._context.run_dir} (log: {self._log})"
                )
            raise kind(answer.error) if issubclass(kind, AglError) else EngineError(answer.error)
        return answer.value

    def _tell_of_a_loss(self) -> None:
        """Raise what the driver said about a loss before it ended, if it does so soon."""
        process = self._process
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_NOTICE)
                self._value(self._receive(process, "stats"), "between updates")

    def _send(self, process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # Its end says more than this.
            process.stdin.write(data)
            process.stdin.flush()

    def _receive(self, process: subprocess.Popen[bytes], doing: str) -> bytes:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END)
            raise EngineError(
                f"The engine was lost during '{doing}' (exit code {process.returncode}; -9 often means that memory ran "
                f"out). {self._known_remedy()}Resume the run from its last checkpoint. {self._last_lines()}"
            )
        return line

    def _known_remedy(self) -> str:
        remedy = remedy_of(*reversed(self._log_lines(LINES_SEARCHED)))
        return "" if remedy is None else f"{remedy} "

    def _last_lines(self) -> str:
        lines = self._log_lines(LINES_SHOWN)
        return f"The end of {self._log}:\n" + "\n".join(lines) if lines else f"See {self._log}."

    def _log_lines(self, count: int) -> list[str]:
        with suppress(OSError), self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace").splitlines()[-count:]
        return []


def _place(folder: Path) -> Path:
    """A folder as the driver finds it, whatever its working directory."""
    return folder.absolute()


def _only_policy(context: EngineContext) -> str:
    if len(context.policies) != 1:
        raise ConfigError(
            f"The veRL engine trains one policy, and the run has {len(context.policies)} "
            f"({', '.join(context.policies)}). Use the torch engine for several, or leave one."
        )
    return next(iter(context.policies))


def _counters(exposition: str) -> list[tuple[str, float]]:
    """agl's names and values of the counters in Prometheus' text format."""
    found = []
    for line in exposition.splitlines():
        name, _, rest = line.partition("{")
        if name in _COUNTERS:
            found.append((_COUNTERS[name], float(rest.rpartition("}")[2].split()[0])))
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input, which tells it to end; kill it if it does not."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    process.stdout.close()
