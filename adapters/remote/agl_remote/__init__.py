"""An agent that runs as a service elsewhere: it is sent the task, and where and with what key it may call models.

Over plain HTTP the service gets one JSON object and returns one; over A2A both travel in messages. See the README.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal

import httpx
import orjson

from agl_core.capture import reward
from agl_core.capture.requests import HEADER_ROLLOUT
from agl_core.client.agent import AgentContext
from agl_core.errors import AgentError
from agl_core.types import Json
from agl_core.types.forms import parse_json
from agl_core.wire import MAX_RESULT

CONNECT_TIMEOUT = 10.0
"""Seconds that a connection may take; how long the service may work, the attempt's own timeout says."""
POLL_INTERVAL = 0.5
"""Seconds between two questions after an A2A task that is still worked on."""
MAX_SHOWN = 300
"""Bytes of a wrong answer that the error quotes."""
UNFINISHED = ("submitted", "working")


class RemoteAgent:
    """An agent that runs as a service at `url`; what it makes is called as any agent is.

        solve = RemoteAgent("https://agents.example.com/solve")

    With `protocol="a2a"` the service is an A2A agent (JSON-RPC) of version 1.0. `headers`, such as a key, go with each
    task. AgentError (the attempt crashed) if it cannot be reached, or returns an error status or an unreadable reply.
    """

    def __init__(
        self,
        url: str,
        *,
        protocol: Literal["http", "a2a"] = "http",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise AgentError(f"RemoteAgent: '{url}' is no address. Begin it with http:// or https://.")
        ask = _PROTOCOLS.get(protocol)
        if ask is None:
            raise AgentError(f"RemoteAgent: there is no protocol '{protocol}'. Use one of: {', '.join(_PROTOCOLS)}.")
        self._url, self._headers, self._ask = url, dict(headers or {}), ask

    async def __call__(self, task: Json, context: AgentContext) -> Json:
        """The service's result for a task; its rewards are reported as the agent's own."""
        attempt = {
            "task_id": context.task_id,
            "split": context.split,
            "mode": str(context.mode),
            "rollout": context.rollout,
            "attempt": context.attempt,
            "base_url": context.base_url,
            "api_key": context.api_key,
            "headers": {HEADER_ROLLOUT: f"{context.rollout}/{context.attempt}"},
        }
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        async with httpx.AsyncClient(headers=self._headers, timeout=timeout) as client:
            result, rewards = await self._ask(_Service(client, self._url), task, attempt)
        for name, value in (rewards if isinstance(rewards, dict) else {"reward": rewards}).items():
            if value is not None:
                reward(value, name)
        return result


class _Service:
    """Sends JSON to the service and reads its JSON."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self._client, self._url = client, url

    async def post(self, body: Mapping[str, Any], **headers: str) -> dict[str, Any]:
        content, headers = orjson.dumps(body), {"content-type": "application/json", **headers}
        received = bytearray()
        try:
            async with self._client.stream("POST", self._url, content=content, headers=headers) as response:
                async for part in response.aiter_bytes():
                    received += part
                    if len(received) > MAX_RESULT:
                        raise self.failure(f"returned more than {MAX_RESULT} bytes, which is the limit")
        except httpx.HTTPError as error:
            raise self.failure(f"cannot be reached ({type(error).__name__}: {error})") from error
        if not response.is_success:
            raise self.failure(f"answered with status {response.status_code}: {_shown(received)}")
        try:
            answer = parse_json(received)
        except ValueError as error:
            raise self.failure(f"returned what is not JSON: {_shown(received)}") from error
        if not isinstance(answer, dict):
            raise self.failure(f"returned JSON that is no object: {_shown(received)}")
        return answer

    def failure(self, reason: str) -> AgentError:
        return AgentError(f"The remote agent at {self._url} {reason}")


async def _ask_http(service: _Service, task: Json, attempt: Mapping[str, Any]) -> tuple[Json, Json]:
    answer = await service.post({"task": task, **attempt})
    if "result" not in answer or set(answer) - {"result", "reward"}:
        raise service.failure(f"has to return an object with 'result', and may add 'reward'; it has {sorted(answer)}")
    return answer["result"], answer.get("reward")


async def _ask_a2a(service: _Service, task: Json, attempt: Mapping[str, Any]) -> tuple[Json, Json]:
    text = task if isinstance(task, str) else orjson.dumps(task).decode()
    message = {
        "role": "ROLE_USER",
        "messageId": uuid.uuid4().hex,
        "parts": [{"text": text}],
        "metadata": {"agl": attempt},
    }
    request = {"message": message, "configuration": {"returnImmediately": False}}
    answer = await _call(service, "SendMessage", request)
    while _state(answer) in UNFINISHED:
        await asyncio.sleep(POLL_INTERVAL)
        answer = await _call(service, "GetTask", {"id": answer["id"]})
    state, parts = _state(answer), [answer]
    if state is not None:
        message = answer["status"].get("message") or {}
        if state != "completed":
            raise service.failure(f"ended its task as {state}: {_text([message])}")
        parts = answer.get("artifacts") or [message]
    metadata = answer.get("metadata") or parts[-1].get("metadata") or {}
    return _text(parts), (metadata.get("agl") or {}).get("reward")


async def _call(service: _Service, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The task or the message that the service answers with."""
    body = {"jsonrpc": "2.0", "id": uuid.uuid4().hex, "method": method, "params": params}
    reply = await service.post(body, **{"a2a-version": "1.0"})
    if (error := reply.get("error")) is not None:
        raise service.failure(f"refused {method}: {_shown(orjson.dumps(error))}")
    result = reply.get("result")
    answer = (result.get("task") or result.get("message")) if isinstance(result, dict) else None
    if not isinstance(answer, dict) or not (_state(answer) or "parts" in answer):
        raise service.failure(f"answered {method} with what is no A2A message or task: {_shown(orjson.dumps(reply))}")
    return answer


def _state(answer: Mapping[str, Any]) -> str | None:
    """The state of a task; None for a message."""
    state = (answer.get("status") or {}).get("state")
    return None if state is None else str(state).removeprefix("TASK_STATE_").lower().replace("_", "-")


def _text(messages: list[dict[str, Any]]) -> str:
    parts = [part for message in messages for part in message.get("parts") or ()]
    return "".join(str(part["text"]) for part in parts if "text" in part)


def _shown(data: bytes | bytearray) -> str:
    return bytes(data[:MAX_SHOWN]).decode("utf-8", "replace")


_PROTOCOLS: Mapping[str, Callable[[_Service, Json, Mapping[str, Any]], Awaitable[tuple[Json, Json]]]] = {
    "http": _ask_http,
    "a2a": _ask_a2a,
}
