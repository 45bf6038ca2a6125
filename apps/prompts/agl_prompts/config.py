"""The table `[optimize]`, and the model servers that it names: one answers the agent, the other proposes prompts."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import orjson
from pydantic import Field

from agl_core import private
from agl_core.config.sections import Section
from agl_core.errors import EngineError
from agl_core.protocols import Engine, Upstream
from agl_core.types.forms import parse_json
from agl_server.commands.upstreams import open_upstream

RETRY_WAITS = (2.0, 4.0, 8.0)
"""Seconds before a message is sent again that a busy or failing proposer did not answer."""
_TIMEOUT = httpx.Timeout(600, connect=10)


class ModelServer(Section):
    """A model of an OpenAI-compatible server."""

    base_url: str = Field(pattern=r"^https?://[^\s?#]+$")
    """The server's address, ending in /v1."""
    model: str = Field(min_length=1)
    """The model's name there."""
    api_key_env: str | None = Field(None, min_length=1)
    """The environment variable with the server's key, which agents do not get to see."""


class OptimizeSection(Section):
    """Improving the prompts of `[prompts]` with `agl optimize` (docs/how-to/prompts.md)."""

    proposer: ModelServer
    """The model that writes prompts."""
    upstream: ModelServer | None = None
    """The model that answers the agent; absent: the run's policies, which are not updated."""
    budget: int = Field(300, ge=1)
    """Rollouts at most, not counting evaluations on held-out sets before and after. Candidates are compared on one
    training task for each 15 of them, at most half of a finite set; the others show the proposer what goes wrong."""


class ServedModel(Engine):
    """Stands in for a run's engine where a model server answers: its weights stay as they are."""

    def __init__(self, server: ModelServer, key: str, policies: Mapping[str, Any]) -> None:
        self._server, self._key, self._policies = server, key, list(policies) or ["default"]

    async def start(self) -> Upstream:
        server = self._server
        upstream, _ = await asyncio.to_thread(open_upstream, server.base_url.rstrip("/"), self._key, server.model)
        return replace(upstream, models=dict.fromkeys(self._policies, server.model))

    async def stop(self) -> None:
        """Nothing: the server is not this run's."""


class Proposer:
    """Asks the model that writes prompts. `file` keeps its replies: a resumed run gets the same again."""

    def __init__(self, server: ModelServer, key: str, file: Path) -> None:
        self._server, self._key, self._file = server, key, file
        self._kept = defaultdict[str, deque[str]](deque)
        """Replies of before that were not given yet, by the message's digest."""
        for line in file.read_bytes().splitlines() if file.is_file() else ():
            reply = orjson.loads(line)
            self._kept[reply["request"]].append(reply["text"])

    async def propose(self, request: str) -> str:
        """Its reply to a message; to the same message again, another reply. EngineError if there is none."""
        digest = blake2b(request.encode(), digest_size=16).hexdigest()
        if self._kept[digest]:
            return self._kept[digest].popleft()
        text = await self._post({"model": self._server.model, "messages": [{"role": "user", "content": request}]})
        self._write({"request": digest, "text": text})
        return text

    def _write(self, reply: Mapping[str, str]) -> None:
        with open(self._file, "ab", opener=private.opener) as file:
            file.write(orjson.dumps(reply) + b"\n")

    async def _post(self, body: Mapping[str, Any]) -> str:
        url = f"{self._server.base_url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {self._key}"}
        problem = ""
        async with httpx.AsyncClient(headers=headers, timeout=_TIMEOUT, trust_env=False) as client:
            for wait in (0.0, *RETRY_WAITS):
                await asyncio.sleep(wait)
                try:
                    response = await client.post(url, json=body)
                    if response.is_success:
                        return str(parse_json(response.content)["choices"][0]["message"]["content"] or "")
                    problem = f"{response.status_code}: {response.text[:300]}"
                    if response.status_code < 500 and response.status_code not in (408, 429):
                        break
                except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                    problem = f"{type(error).__name__}: {error}"
        raise EngineError(
            f"[optimize.proposer]: the model '{body['model']}' at {url} did not answer ({problem}). Check address, "
            f"model and key; then the run can be resumed."
        )
