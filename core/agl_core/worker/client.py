"""The client of a Lightning Server, and where a run's server is.

`ask` sends any `Operation`. A worker's key allows `LEASE` and `HEARTBEAT`, an operator's key `ACTIVITY`, and both allow
`HEALTH`; `CLOSE` sends the secret of the lease.

Every method raises UnreachableError if the server did not answer or failed: the same request may succeed later. It
raises RefusedError if the server refused the request, and will again; ConfigError if a request cannot carry the key.
All requests may be repeated: the same request counts once.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import orjson
from pydantic import BaseModel, ValidationError

from agl_core.config.models import RunConfig
from agl_core.errors import ConfigError, ServerError
from agl_core.wire import (
    OPERATOR_KEY,
    SERVER_FILE,
    WORKER_KEY,
    Answer,
    Asked,
    Lease,
    Operation,
    ServerFile,
    problem_of_key,
)

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_TIMEOUT = httpx.Timeout(30, read=90)
_FIRST_DELAY, _LONGEST_DELAY = 0.5, 10.0
_URL = re.compile(r"https?://[^\s/]+")


class UnreachableError(ServerError):
    """The server did not answer, or cannot handle the request now: the same request may succeed later."""


class RefusedError(ServerError):
    """The server refused: a key, a body or an id is wrong."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


class LightningClient:
    """A client of workers and operators; one instance per event loop.

    >>> async def example():
    ...     async with LightningClient("http://127.0.0.1:8000", key="…") as client:
    ...         return await client.ask(LEASE, LeaseRequest(worker="w1", capacity=4, wait=10))
    """

    def __init__(self, base_url: str, key: str, timeout: float | None = None) -> None:
        self.base_url, self.key = base_url, key
        limits = httpx.Limits(max_connections=64)
        self._http = httpx.AsyncClient(
            base_url=base_url, headers=_headers(key), timeout=timeout or _TIMEOUT, trust_env=False, limits=limits
        )

    async def ask(self, operation: Operation[Asked, Answer], body: Asked, lease: Lease | None = None) -> Answer:
        """Send one request, which may be about the attempt of a lease, and return the reply."""
        try:
            response = await self._http.request(**_request(self.base_url, operation, body, lease))
        except httpx.HTTPError as error:
            raise _unreachable(self.base_url, error) from error
        return _answer(response, operation.reply)

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _headers(key: str) -> dict[str, str]:
    if problem := problem_of_key("The server's key", key):
        raise ConfigError(problem)
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _request(
    base_url: str, operation: Operation[Any, Any], body: BaseModel, lease: Lease | None = None
) -> dict[str, Any]:
    """The request as httpx takes it. RefusedError if it is larger than the server reads: it would hang up meanwhile."""
    content = body.model_dump_json().encode() if operation.has_body else b""
    if len(content) > operation.largest:
        reason = f"The request body has {len(content)} bytes; {operation.largest >> 20} MiB are the limit."
        raise RefusedError(f"{base_url}{operation.path}: {reason}", 413, reason)
    path = operation.path if lease is None else operation.path.format(rollout=lease.rollout, attempt=lease.attempt)
    headers = None if lease is None else _headers(lease.secret)
    return {"method": operation.method, "url": path, "content": content, "headers": headers}


def _unreachable(base_url: str, error: httpx.HTTPError) -> UnreachableError:
    return UnreachableError(
        f"The Lightning Server at {base_url} cannot be reached ({type(error).__name__}: {error}). "
        f"Is it running, and is the address right?"
    )


def _answer(response: httpx.Response, reply: type[Answer]) -> Answer:
    if response.is_server_error:
        raise UnreachableError(f"{response.url} answered {response.status_code}: {_reason(response)}")
    if response.is_error:
        reason = _reason(response)
        raise RefusedError(f"{response.url} answered {response.status_code}: {reason}", response.status_code, reason)
    try:
        return reply.model_validate_json(response.content)
    except ValidationError as error:
        raise ServerError(f"{response.url} answered, but not as a Lightning Server of this version does.") from error


def _reason(response: httpx.Response) -> str:
    try:
        return str(orjson.loads(response.content)["error"]["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return response.text[:500]


async def persistently(
    ask: Callable[[], Coroutine[Any, Any, Result]], gives_up: Callable[[], bool] = lambda: False
) -> Result:
    """The server's answer, however long the server is away; UnreachableError once `gives_up` is true.

    The delays between tries double, up to ten seconds, with some randomness.
    """
    delay, since = _FIRST_DELAY, 0.0
    while True:
        try:
            answer = await ask()
        except UnreachableError as error:
            if not since:
                since = time.monotonic()
                logger.warning("%s Trying again until it answers.", error)
            if gives_up():
                raise
            await asyncio.sleep(delay * random.uniform(0.75, 1.25))
            delay = min(2 * delay, _LONGEST_DELAY)
        else:
            if since:
                logger.warning("The Lightning Server is back after %.0f seconds.", time.monotonic() - since)
            return answer


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a server listens, and a key to it."""

    base_url: str
    key: str = field(repr=False)


def find_server(
    config: RunConfig | None, folder: Path | None, url: str | None, chosen: Mapping[str, str], name: str = WORKER_KEY
) -> ServerAddress | None:
    """The server of a run: at `url`, else as the file in the run's `folder` says, or in the newest run of its name.

    Without a configuration it is at `url`, with the key that the user chose.

    `name` is the variable of the key that is needed. The key is the `chosen` one of this name (`take_keys`), else the
    one in that file. None if there is no such file yet; ConfigError if only the key is missing, or if it is invalid.
    """
    base_url = (url or "").rstrip("/")
    file = _newest(config, folder, base_url)
    base_url = base_url or (file.base_url if file and not file.over else "")
    if base_url and not _URL.fullmatch(base_url):
        raise ConfigError(f"{base_url!r} is no address of a server. Give it as http://HOST:PORT.")
    kept = "operator_key" if name == OPERATOR_KEY else "worker_key"
    key = chosen.get(name) or (file and getattr(file, kept))
    if key and (problem := problem_of_key(name if name in chosen else SERVER_FILE, key)):
        raise ConfigError(f"{problem} Set it anew, to the value that it has where the server runs.")
    if base_url and not key:
        raise ConfigError(
            f"The key of the server at {base_url} is not known here: set {name} to the value it has where the server "
            f"runs (where it has none, it is the {kept} in the run's {SERVER_FILE})."
        )
    return ServerAddress(base_url, key) if base_url and key else None


def is_over(config: RunConfig | None, folder: Path | None, server: ServerAddress) -> bool:
    """True if the file of this server says that its run is over; False on a machine that does not have the file."""
    file = _newest(config, folder, server.base_url)
    return file is not None and file.base_url == server.base_url and file.over


def _newest(config: RunConfig | None, folder: Path | None, base_url: str) -> ServerFile | None:
    """The file of this server, if there is one, else the newest one."""
    if folder is not None:
        files = [folder / SERVER_FILE]
    elif config is None:
        files = []
    else:
        same_name = re.compile(rf"{re.escape(config.name)}(-\d+)?")
        files = [file for file in config.runs.glob(f"*/{SERVER_FILE}") if same_name.fullmatch(file.parent.name)]
    servers = [(file.stat().st_mtime, server) for file in files if (server := ServerFile.read(file))]
    servers.sort(key=lambda entry: (entry[1].base_url == base_url, entry[0]))
    return servers[-1][1] if servers else None
