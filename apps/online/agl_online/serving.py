"""Serving saved versions to any client of the model APIs (`agl policy serve`). Nothing is recorded."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

from starlette.datastructures import URL
from starlette.requests import Request

from agl_core.config.models import ServerSection
from agl_core.errors import ServerError
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, Upstream
from agl_core.server import Keys, LightningServer
from agl_core.server.attempt import ActiveAttempt
from agl_core.server.errors import ApiError
from agl_core.server.keys import SpanOwner, carries, is_loopback
from agl_core.server.upstream import Relay
from agl_core.store.interface import Store
from agl_core.store.sqlite import SqliteStore
from agl_core.training.server import run_settings
from agl_core.types import Attempt, Call, Mode, Rollout, RolloutState, Task, ToolResult
from agl_core.wire.keys import WORKER_KEY, problem_of_key
from agl_online.policies import Source, Version

POLICY_KEY = "AGL_POLICY_KEY"
"""The environment variable with the key that clients of served policies need."""


class _Clients(ActiveAttempt):
    """All calls together: they are answered and forgotten."""

    @property
    def refuses_late(self) -> bool:
        return False

    async def keep(self, store: Store, *calls: Call) -> None:
        return

    async def keep_spans(self, store: Store, *records: Call | ToolResult) -> None:
        return


class ServedPolicies:
    """Whose calls are answered: those with `key`, or without one those that are meant for this machine's own names.

    Without a key, a web page could otherwise send requests by another host name that leads here.
    """

    operations = ()
    routes = ()
    counters: Mapping[str, int] = {}

    def __init__(self, relay: Relay, key: str | None) -> None:
        rollout = Rollout("served", "served", 0, "served", Task("served", None), Mode.USE, 0, 0, RolloutState.RUNNING)
        attempt = Attempt("served", 0, "served", started=0.0)
        self._clients = _Clients(rollout, attempt, deadline=float("inf"), answered_by=relay)
        self._key = key

    async def start(self, base_url: str) -> None:
        return

    async def stop(self) -> None:
        return

    async def attempt_of(self, request: Request) -> ActiveAttempt:
        """The same for all. ApiError 401 without the key; without a key at all, 403 for requests by another name."""
        names = [f"http://{request.headers.get('host', '')}", request.headers.get("origin", "http://localhost")]
        if self._key is not None and not carries(request, self._key):
            raise ApiError(
                401,
                f"The API key (Authorization: Bearer …, or x-api-key) is missing or wrong. It is the value of "
                f"{POLICY_KEY} where `agl policy serve` was started.",
                code="invalid_api_key",
            )
        if self._key is None and not all(is_loopback(URL(name).hostname or "") for name in names):
            raise ApiError(
                403,
                f"Without a key, served policies answer only to this machine's own names, such as 127.0.0.1. Start "
                f"`agl policy serve` with {POLICY_KEY} set, and send its value.",
                code="foreign_name",
            )
        return self._clients

    async def owner_of_spans(self, request: Request) -> SpanOwner | None:
        return None


@asynccontextmanager
async def serving(
    names: Sequence[str], *, host: str, port: int, key: str | None, overrides: Sequence[str] = ()
) -> AsyncIterator[tuple[str, Engine]]:
    """Serve versions by these names until the block ends; yields the address and the engine that has them all.

    An AglError says why it cannot begin. `overrides` are `KEY=VALUE` texts for the configurations of the runs.
    """
    check_key(host, key)
    versions = {name: Version.find(name) for name in names}
    sources = {version.run: Source.of(version.run, overrides) for version in versions.values()}
    first = next(iter(sources.values()))
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-policy-")))
        store = await stack.enter_async_context(SqliteStore(folder / "store.sqlite"))
        engine = first.engine(folder)
        stack.push_async_callback(engine.stop)
        upstream = replace(await engine.start(), models={name: name for name in names}, returns_ids=False)
        for name, version in versions.items():
            await engine.publish(name, sources[version.run].spec(version))
        yield await stack.enter_async_context(answering(upstream, first, store, host=host, port=port, key=key)), engine


@asynccontextmanager
async def answering(
    upstream: Upstream, source: Source, store: Store, *, host: str, port: int, key: str | None
) -> AsyncIterator[str]:
    """Answer model calls by this upstream, sampled as the run asks; yields the address."""
    settings = replace(run_settings(source.loaded.config), agents={})
    relay = Relay(lambda lending: None)
    relay.serve(upstream, settings)
    # The address is checked above; nobody has the keys of workers here.
    keys = Keys(chosen=frozenset({WORKER_KEY}))
    listen = ServerSection(host=host, port=port)
    clients, hook = ServedPolicies(relay, key), Plugins().hook
    async with LightningServer(store, None, settings, hook, listen=listen, keys=keys, source=clients) as server:
        yield server.base_url
    relay.withdraw()


def check_key(host: str, key: str | None) -> None:
    """ServerError if the key is invalid, or there is none and others can reach `host`."""
    if key is not None and (problem := problem_of_key(POLICY_KEY, key)):
        raise ServerError(problem)
    if key is None and not is_loopback(host):
        raise ServerError(
            f"Policies are not served on {host}, where other machines can reach them, without a key. Set {POLICY_KEY} "
            f"here (`openssl rand -hex 24` makes one), which clients send as their API key, or use host 127.0.0.1."
        )
