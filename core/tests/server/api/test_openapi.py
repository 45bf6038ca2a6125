"""What /openapi.json says of the server is so: on every route, whatever is sent there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from agl_core.server import LightningServer
from agl_core.server.upstream import RunSettings
from agl_core.testing import episodes as make
from agl_core.testing.memory_store import MemoryStore
from agl_core.testing.server import Hooks, Stack, running_stack
from agl_core.types import AttemptKey
from agl_core.wire.headers import HEADER_ROLLOUT
from agl_core.wire.workers import OF_WORKERS, LeaseRequest

pytest_plugins = ["schemathesis.pytest.plugin"]

SETTINGS = RunSettings(sampling=None, seed=0, timeout=30, attempts=1)
DOCUMENT = LightningServer(MemoryStore(), None, SETTINGS, Hooks()).openapi
api = schemathesis.openapi.from_dict(DOCUMENT)

OWN = AttemptKey("own", 0)


@pytest.fixture
def served() -> Iterator[Stack]:
    """A server in a thread; one attempt is running."""
    found: list[Stack] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    async def serve() -> None:
        async with running_stack(timeout=3600) as stack:
            await stack.server.queue.enqueue([make.rollout("own")])
            await stack.server.queue.lease(LeaseRequest(worker="never beats", capacity=1))
            found.append(stack)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    yield found[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()
    loop.close()


@settings(max_examples=settings.default.max_examples // 5, suppress_health_check=list(HealthCheck))
@api.parametrize()
def test_no_request_gets_an_answer_that_is_not_described(served: Stack, case: Any) -> None:
    keys = served.server.keys
    [right, *_] = case.operation.tags
    key = {"agent": keys.of_attempt(OWN), "lease": keys.of_lease(OWN), "operator": keys.operator}.get(
        right, keys.worker
    )
    headers = {"Authorization": f"Bearer {key}"}
    if right == "agent":
        headers[HEADER_ROLLOUT] = "own/0"
    if "rollout" in case.path_parameters and right in ("agent", "lease"):
        case.path_parameters = {"rollout": "own", "attempt": "0"}
    if isinstance(case.body, dict) and "wait" in case.body:
        case.body["wait"] = 0
    response = case.call(base_url=served.server.base_url, headers=headers, timeout=30)
    case.validate_response(
        response,
        checks=(
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ),
    )


async def test_the_server_tells_it_to_anybody(stack: Stack) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        told = (await http.get(f"{stack.server.base_url}/openapi.json")).json()
    assert told == DOCUMENT
    described = {(method.upper(), path) for path, methods in told["paths"].items() for method in methods}
    for method, path in (("POST", "/agl/v1/leases"), ("GET", "/agl/v1/activity"), ("POST", "/v1/messages")):
        assert (method, path) in described
    routes = {path for _, path in described}
    assert len(described) == len(routes) == 5 + 2 * 8


async def test_every_operation_is_served_and_asks_for_a_key(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.server.base_url, trust_env=False) as http:
        for operation in OF_WORKERS:
            path = operation.path.format(rollout="own", attempt="0")
            answer = await http.request(operation.method, path)
            assert (operation.name, answer.status_code) == (operation.name, 401)
