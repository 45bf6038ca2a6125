"""The client of a Lightning Server, and where a run's server is.

A method raises UnreachableError if the server did not answer or failed, RefusedError if it refused the request, and
will again, and ConfigError if no request can carry the key. All requests may be repeated: the same one counts once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import orjson
from pydantic import ValidationError

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

if TYPE_CHECKING:  # It takes long to import, and no process of an agent needs it.
    from agl_core.config.models import RunConfig

_TIMEOUT = httpx.Timeout(30, read=90)
_URL = re.compile(r"https?://[^\s/]+")


class UnreachableError(ServerError):
    """The server did not answer, or cannot handle the request now: the same request may succeed later."""


class RefusedError(ServerError):
    """The server refused: a key, a body or an id is wrong."""


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
        """The reply to a request, which may be about the attempt of a lease.

        A body larger than the server reads is refused here: the server would hang up meanwhile.
        """
        content = body.model_dump_json().encode() if operation.has_body else b""
        if len(content) > operation.largest:
            raise RefusedError(
                f"{self.base_url}{operation.path}: the request body has {len(content)} bytes; "
                f"{operation.largest >> 20} MiB are the limit."
            )
        path, headers = operation.path, None
        if lease is not None:
            path, headers = path.format(rollout=lease.rollout, attempt=lease.attempt), _headers(lease.secret)
        try:
            response = await self._http.request(operation.method, path, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise UnreachableError(
                f"The Lightning Server at {self.base_url} cannot be reached ({type(error).__name__}: {error}). "
                f"Is it running, and is the address right?"
            ) from error
        if response.is_error:
            kind = UnreachableError if response.is_server_error else RefusedError
            raise kind(f"{response.url} answered {response.status_code}: {_reason(response)}")
        try:
            return operation.reply.model_validate_json(response.content)
        except ValidationError as error:
            text = f"{response.url} answered, but not as a Lightning Server of this version does."
            raise ServerError(text) from error

    async def __aenter__(self) -> LightningClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def _headers(key: str) -> dict[str, str]:
    if problem := problem_of_key("The server's key", key):
        raise ConfigError(problem)
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}


def _reason(response: httpx.Response) -> str:
    try:
        return str(orjson.loads(response.content)["error"]["message"])
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return response.text[:500]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's address, and a key to it."""

    base_url: str
    key: str = field(repr=False)


def find_server(
    config: RunConfig | None, folder: Path | None, url: str | None, chosen: Mapping[str, str], name: str = WORKER_KEY
) -> ServerAddress | None:
    """The server of a run: at `url`, else where the file in the run's `folder`, or in the newest run of its name, says.

    The key is the `chosen` one (`take_keys`) of the variable `name`, else the one in that file. None if there is no
    such file yet; ConfigError if only the key is missing, or if it is invalid.
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
