"""The OpenAPI document names what the server serves, with its bodies."""

from __future__ import annotations

import httpx

from agl_core.testing.server import Stack
from agl_core.wire.workers import OF_WORKERS


async def test_the_document_names_every_route_and_body(stack: Stack) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        document = (await http.get(f"{stack.server.base_url}/openapi.json")).json()
    for operation in OF_WORKERS:
        described = document["paths"][operation.path][operation.method.lower()]
        schema = described["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert schema.rpartition("/")[2] == operation.reply.__name__
        assert ("requestBody" in described) is operation.has_body
        assert operation.reply.__name__ in document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/rollout/{rollout}/attempt/{attempt}/v1/messages", "/v1/traces"):
        assert "post" in document["paths"][path]
