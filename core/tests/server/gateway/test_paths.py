"""The paths that clients make of a base URL, all of which lead to the same routes."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from agl_core.testing.server import Stack
from agl_core.types import AttemptKey

from ..api_oracles import HELLO, client_of

CHAT: dict[str, Any] = {"model": "default", "messages": HELLO}


def root_of(stack: Stack, key: AttemptKey) -> str:
    return stack.url(key).removesuffix("/v1")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/{}",
        "/v1/{}/",
        "/v1//{}",
        "//v1/{}//",
        "/v1/v1/{}",
        "/{}",
        "/openai/v1/{}",
        "/v1/openai/v1/{}",
        "/openai/deployments/default/{}?api-version=2025-01-01-preview",
    ],
)
async def test_every_shape_of_path_is_served(stack: Stack, path: str) -> None:
    key = await stack.lease()
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": CHAT,
        "completions": {"model": "default", "prompt": "hello"},
        "responses": {"model": "default", "input": "hello"},
        "messages": {**CHAT, "max_tokens": 9},
        "messages/count_tokens": CHAT,
        "responses/input_tokens": {"model": "default", "input": "hello"},
    }
    headers = {"Authorization": f"Bearer {stack.key(key)}"}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
        for root in (root_of(stack, key), stack.server.base_url):
            for route, body in bodies.items():
                url = root + path.format(route)
                assert (await client.post(url, json=body)).status_code == 200, url
            listed = await client.get(root + path.format("models"))
            assert [each["id"] for each in listed.json()["data"]] == ["default"]
            model = await client.get(root + path.format("models/default"))
            assert model.json()["id"] == "default"
    assert len(await stack.calls(key)) == 8


async def test_azures_client(stack: Stack) -> None:
    key = await stack.lease()
    async with openai.AsyncAzureOpenAI(
        azure_endpoint=root_of(stack, key), api_key=stack.key(key), api_version="2025-01-01-preview", max_retries=0
    ) as client:
        reply = await client.chat.completions.create(model="gpt-x", messages=HELLO)
    assert reply.choices[0].message.content
    (call,) = await stack.calls(key)
    assert call.id == reply.id
    headers = {"api-key": stack.key(key)}
    url = f"{root_of(stack, key)}/openai/deployments/gpt-x/chat/completions?api-version=1"
    async with httpx.AsyncClient(trust_env=False, headers=headers) as bare:
        named = await bare.post(url, json={"messages": HELLO})
    assert named.json()["model"] == "gpt-x", "the path names the model"


async def test_anthropics_client_with_a_base_url_that_ends_in_v1(stack: Stack) -> None:
    key = await stack.lease()
    message = await client_of(stack, key, base_url=stack.url(key)).messages.create(max_tokens=9, **CHAT)
    assert [call.id for call in await stack.calls(key)] == [message.id]


async def test_other_paths_stay_what_they_are(stack: Stack) -> None:
    key = await stack.lease()
    headers = {"Authorization": f"Bearer {stack.key(key)}"}
    async with httpx.AsyncClient(trust_env=False, headers=headers) as client:
        for path in ("/files", "//agl/v1/lease", "/v1/agl/v1/lease", "/openai/deployments/x", "/v1", "/"):
            for root in (root_of(stack, key), stack.server.base_url):
                assert (await client.post(root + path, json={})).status_code == 404, path
