"""Models of two architectures without weights: the tests write their responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import orjson
import pytest
import uvicorn
from starlette.types import ASGIApp
from tiny_tokenizers import make_tokenizer

from agl_chat.api import ModelServer
from agl_chat.backends import Generation, Request, Response, SampledToken
from agl_chat.conversation import ChatText
from agl_chat.requests import ChatRequest, parse_request
from agl_core.types import FinishReason


@dataclass(frozen=True)
class ServedModel:
    """The chat layer's knowledge of a model."""

    tokenizer: Any
    eos_ids: frozenset[int]
    context_length: int = 512

    def server(self) -> ModelServer:
        return ModelServer("m", ChatText(self.tokenizer, self.eos_ids), self.context_length)


def make_model(architecture: str, *ends: str) -> ServedModel:
    tokenizer = make_tokenizer(architecture)
    return ServedModel(tokenizer, frozenset(tokenizer.convert_tokens_to_ids(list(ends))))


def with_template(loaded: ServedModel, template: str) -> ServedModel:
    other = replace(loaded, tokenizer=type(loaded.tokenizer)(tokenizer_object=loaded.tokenizer.backend_tokenizer))
    other.tokenizer.chat_template = template
    other.tokenizer.eos_token = loaded.tokenizer.eos_token
    return other


@pytest.fixture(scope="session")
def qwen() -> ServedModel:
    return make_model("qwen2", "<|im_end|>", "<|endoftext|>")


@pytest.fixture(scope="session")
def llama() -> ServedModel:
    return make_model("llama", "<|eot_id|>", "<|end_of_text|>")


def client_of(app: ASGIApp) -> httpx.AsyncClient:
    """A client with the key, which gets replies once they are whole."""
    headers = {"authorization": "Bearer key"}
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://engine", headers=headers
    )


@asynccontextmanager
async def listening(app: ASGIApp) -> AsyncIterator[str]:
    """An app's URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    running = asyncio.ensure_future(server.serve())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await running


def parsed(body: dict[str, Any]) -> ChatRequest:
    """A request's body as the API takes it."""
    return parse_request(orjson.dumps(body))


class ScriptedChat:
    """A served model whose responses the test writes: chat in, chat out, no weights."""

    def __init__(self, model: ServedModel) -> None:
        self.served, self.model = model.server(), model

    def ask(self, messages: list[dict[str, Any]], *replies: str | Sequence[int], **fields: Any) -> dict[str, Any]:
        """Answer by `replies`: texts (the end token is added) or token ids; they follow what is forced."""
        session, moved = fields.pop("session", "r/0"), fields.pop("moved", False)
        body = {"model": "m", "messages": messages, "return_token_ids": True, "n": len(replies), **fields}
        exchange = self.served.begin(parsed(body), session, moved=moved)
        responses = []
        for choice, reply in enumerate(replies):
            sampled = [*self.encode(reply), self.model.tokenizer.eos_token_id] if isinstance(reply, str) else reply
            forced = [SampledToken(choice, token, 0.0, is_free=False) for token in exchange.request.forced_ids]
            tokens = [*forced, *(SampledToken(choice, token, 0.0) for token in sampled)]
            ended = tokens[-1].id in self.model.eos_ids
            responses.append(Response(tokens, FinishReason.STOP if ended else FinishReason.LENGTH))
        return self.served.finish(exchange, Generation(exchange.request, tuple(responses), 3, 5, 7))

    def encode(self, text: str) -> list[int]:
        return self.model.tokenizer(text, add_special_tokens=False)["input_ids"]

    def letters(self, text: str, end: str | None = None) -> list[int]:
        """A text one character at a time, as no tokenizer would write it, and the end token (or `end`)."""
        last = self.model.tokenizer.eos_token if end is None else end
        return [*(token for character in text for token in self.encode(character)), *self.encode(last)]


@pytest.fixture
def chat(qwen: ServedModel) -> ScriptedChat:
    return ScriptedChat(qwen)


def echo(body: dict[str, Any], choice: int = 0) -> dict[str, Any]:
    """A reply as most clients send it back: without its reasoning."""
    message = body["choices"][choice]["message"]
    return {key: value for key, value in message.items() if key not in ("refusal", "reasoning_content")}


def result(message: dict[str, Any]) -> dict[str, Any]:
    """The result of the tool that a reply called."""
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}


def assert_continues(
    first: dict[str, Any], second: dict[str, Any], tail: list[int] | None = None, choice: int = 0
) -> None:
    """The prompt of `second` begins with the ids of `first` and its reply; `tail` is all that follows, if given."""
    assert not second["agl"]["prefix_broken"]
    recorded = [*first["prompt_token_ids"], *first["choices"][choice]["token_ids"]]
    assert second["prompt_token_ids"][: len(recorded)] == recorded
    assert tail is None or second["prompt_token_ids"][len(recorded) :] == tail


@dataclass
class ScriptedBackend:
    """A back end that gives these responses, and tells of their first tokens as the test says."""

    responses: Sequence[Sequence[int]] = ()
    """Without the end token."""
    sent: int = 10**6
    pauses: Sequence[int] = ()
    """After which tokens those before are read."""
    failure: Exception | None = None

    async def generate(self, request: Request) -> Generation:
        answers = []
        for choice, ids in enumerate(self.responses):
            tokens = [
                SampledToken(choice, token, -0.1 * token, {token: -0.5} if request.top else {}) for token in (*ids, END)
            ]
            answers.append(Response(tokens, FinishReason.STOP))
            for number, token in enumerate(tokens[: self.sent]):
                if request.watch:
                    request.watch(token)
                if number in self.pauses:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        if self.failure:
            raise self.failure
        return Generation(request, tuple(answers), 3, 5, 7)


END = make_tokenizer("qwen2").eos_token_id
USER = {"role": "user", "content": "What is 12 plus 30?"}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+30"}}\n</tool_call>'
CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {}}}},
}
