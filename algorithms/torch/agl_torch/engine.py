"""The run's side of the torch engine: a child process that holds the weights, and HTTP on loopback to it.

Imports no torch: a run's own process stays small.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson

from agl_core import errors
from agl_core.errors import AglError, EngineError
from agl_core.protocols import EngineContext, Progress, UpdateResult, Upstream
from agl_core.types import Batch
from agl_core.wire.updates import UpdateRequest, decode_result
from agl_torch.options import TorchOptions
from agl_torch.wire import Ready, Settings

LOG_NAME = "engine.log"
SECONDS_TO_END = 5.0
"""How long the process may take to end by itself before it is killed."""
LINES_SHOWN = 12
"""How much of its log an error message shows."""


class TorchEngine:
    """One process that samples from and trains every policy; see `agl_core.protocols.Engine`.

    engine = TorchEngine(TorchOptions(), context)
    upstream = await engine.start()
    result = await engine.update("default", batch, "grpo", {})
    await engine.stop()
    """

    def __init__(self, options: TorchOptions, context: EngineContext) -> None:
        self._options = options
        self._context = context
        self._control_key = secrets.token_urlsafe(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._client: httpx.AsyncClient | None = None
        self._log = context.run_dir / LOG_NAME

    async def start(self) -> Upstream:
        """Start the process and wait until it serves. Raises EngineError with the reason if it does not."""
        if self._process is not None:
            raise EngineError("The engine was already started.")
        try:
            ready = await asyncio.to_thread(self._launch)
        except BaseException:
            await self.stop()
            raise
        self._client = httpx.AsyncClient(
            base_url=f"http://{self._options.url_host}:{ready.port}",
            headers={"authorization": f"Bearer {self._control_key}"},
            timeout=None,
            trust_env=False,
        )
        return Upstream(
            urls=(f"http://{self._options.url_host}:{ready.port}/v1",),
            models={name: name for name in self._context.policies},
            api_key=self._context.api_key,
            context_length=ready.context_length,
        )

    async def update(
        self, policy: str, batch: Batch, algorithm: str, options: Mapping[str, Any], progress: Progress | None = None
    ) -> UpdateResult:
        """Train on a batch; the new version is served, whole, when this returns."""
        body = UpdateRequest(policy, algorithm, options, batch).encode()
        with self._explaining("update"):
            async with self._connected().stream("POST", "/engine/update", content=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _error(orjson.loads(await response.aread()))
                async for line in response.aiter_lines():
                    value = orjson.loads(line)
                    if "result" in value:
                        return decode_result(value["result"])
                    if "error" in value:
                        raise _error(value)
                    if progress is not None:
                        progress(value["progress"])
                raise httpx.RemoteProtocolError("the reply to an update has no end")

    async def save(self, folder: Path) -> None:
        """Write every policy below `folder`; each is there whole or not at all."""
        await self._ask("POST", "save", _place(folder))

    async def load(self, folder: Path) -> None:
        """Restore exactly what `save` wrote."""
        await self._ask("POST", "load", _place(folder))

    async def versions(self) -> Mapping[str, int]:
        """The version being served of each policy."""
        versions: dict[str, int] = await self._ask("GET", "versions")
        return versions

    async def stats(self) -> Mapping[str, float]:
        """tokens_prefilled, tokens_reused, tokens_decoded, preempted since the start; peak_rss_bytes, cache_bytes."""
        stats: dict[str, float] = await self._ask("GET", "stats")
        return stats

    async def stop(self) -> None:
        """End the process; calling it again changes nothing."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
        process = self._process
        if process is not None:
            await asyncio.to_thread(_end, process)

    def _launch(self) -> Ready:
        """Start the process, tell it its settings, wait for its answer."""
        self._context.run_dir.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "agl_torch.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the run, which stops the engine when it is done with it.
            )
        assert process.stdin is not None
        assert process.stdout is not None
        settings = Settings(
            options=self._options,
            policies=dict(self._context.policies),
            seed=self._context.seed,
            deterministic=self._context.deterministic,
            updates=self._context.updates,
            plugin_files=tuple(file.absolute() for file in self._context.plugin_files),
            api_key=self._context.api_key,
            control_key=self._control_key,
        )
        with suppress(BrokenPipeError):
            process.stdin.write(settings.model_dump_json().encode() + b"\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise EngineError(
                f"The engine process ended before it served (exit code {_exit_code(process)}). {self._last_lines()}"
            )
        ready = Ready.model_validate_json(line)
        if ready.error is not None:
            raise EngineError(f"The engine did not start: {ready.error} (log: {self._log})")
        return ready

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            raise EngineError("The engine is not running: call start() first, and nothing after stop().")
        return self._client

    async def _ask(self, method: str, name: str, body: Mapping[str, str] | None = None) -> Any:
        content = None if body is None else orjson.dumps(body)
        with self._explaining(name):
            response = await self._connected().request(method, f"/engine/{name}", content=content)
        value = orjson.loads(response.content)
        if response.status_code != httpx.codes.OK:
            raise _error(value)
        return value

    @contextmanager
    def _explaining(self, doing: str) -> Iterator[None]:
        """Make an EngineError of a broken connection: the process died, or was stopped."""
        try:
            yield
        except httpx.TransportError as error:
            code = "none" if self._process is None else _exit_code(self._process)
            raise EngineError(
                f"The engine was lost during '{doing}' ({type(error).__name__}; exit code: {code}; -9 often means that "
                f"memory ran out: lower engine.torch.tokens_per_micro_batch or cache_mib). Resume the run from its "
                f"last checkpoint. {self._last_lines()}"
            ) from error

    def _last_lines(self) -> str:
        with suppress(OSError):
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_SHOWN:]
            return f"The end of {self._log}:\n" + "\n".join(lines)
        return f"See {self._log}."


def _place(folder: Path) -> dict[str, str]:
    """A folder as the process finds it, whatever its working directory."""
    return {"folder": str(folder.absolute())}


def _error(described: Mapping[str, str]) -> AglError:
    """The error that the process described, as the class it had there."""
    kind = getattr(errors, described["kind"], EngineError)
    return kind(described["error"]) if issubclass(kind, AglError) else EngineError(described["error"])


def _exit_code(process: subprocess.Popen[bytes]) -> int | str:
    try:
        return process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        return "none, it is still running"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close its standard input, which tells it to end; kill it if it does not."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
