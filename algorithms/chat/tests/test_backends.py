"""Back ends against servers that speak as vLLM and SGLang document; `live_chat.py` of agl-verl has the real vLLM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from agl_chat.api import CHAT_COMPLETIONS, create_app
from agl_chat.backends import Backend, Generation, HttpBackend, Request, SampledToken, SglangBackend, VllmBackend
from agl_core.apis.errors import ApiError
from agl_core.errors import EngineError
from agl_core.types import FinishReason

from .conftest import ServedModel, client_of, listening

VLLM, SGLANG = "/inference/v1/generate", "/generate"
BACKENDS: dict[str, type[HttpBackend]] = {VLLM: VllmBackend, SGLANG: SglangBackend}
REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class Server:
    """Answers every request for tokens by `ids`; the log-probability of a token is minus its id."""

    def __init__(self, path: str, ids: list[int], reason: str = "stop", *, disjoint: bool = False) -> None:
        self.received: list[dict[str, Any]] = []
        self.ids, self.reason, self.disjoint = ids, reason, disjoint
        self.failure: Response | None = None
        self.go_on = asyncio.Event()
        """A stream waits for it after its first token."""
        self.go_on.set()
        self.last_events = ["[DONE]"]
        answer, events = (self.vllm, self.vllm_events) if path == VLLM else (self.sglang, self.sglang_events)

        async def stream(body: dict[str, Any]) -> AsyncIterator[str]:
            for number, event in enumerate(events(answer(body))):
                yield f"data: {json.dumps(event)}\n\n"
                if not number:
                    await self.go_on.wait()
            for last in self.last_events:
                yield f"data: {last}\n\n"

        async def generate(request: HttpRequest) -> Response:
            body = await request.json()
            self.received.append(body)
            if self.failure:
                return self.failure
            if body["stream"]:
                return StreamingResponse(stream(body), media_type="text/event-stream")
            return JSONResponse(answer(body))

        self.app = Starlette(routes=[Route(path, generate, methods=["POST"])])
        self.backend: Backend = BACKENDS[path](client_of(self.app), {1, 0})

    def vllm(self, body: dict[str, Any]) -> Any:
        count = body["sampling_params"]["logprobs"]

        def entry(token: int) -> dict[str, Any]:
            shown = [token, *(other for other in range(2, 9) if other != token)][: max(count, 1)]
            others = [{"token": f"token_id:{other}", "logprob": -float(other), "bytes": None} for other in shown]
            return {"token": f"token_id:{token}", "logprob": -float(token), "bytes": None, "top_logprobs": others}

        choices = [
            {
                "index": index,
                "token_ids": self.ids,
                "logprobs": {"content": [entry(token) for token in self.ids]},
                "finish_reason": self.reason,
            }
            for index in range(body["sampling_params"]["n"])
        ]
        usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}
        return {"request_id": body["request_id"], "choices": choices[::-1], "usage": usage}

    def vllm_events(self, answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number, token in enumerate(self.ids):
            for choice in answer["choices"]:
                logprobs = {"content": choice["logprobs"]["content"][number : number + 1]}
                ended = self.reason if number == len(self.ids) - 1 else None
                yield {"choices": [{**choice, "token_ids": [token], "logprobs": logprobs, "finish_reason": ended}]}
        yield {"choices": [], "usage": answer["usage"]}

    def sglang(self, body: dict[str, Any]) -> Any:
        top = [[[-float(other), other, None] for other in range(2, 2 + body["top_logprobs_num"])] for _ in self.ids]
        answers = [
            {
                "text": "what nobody reads",
                "output_ids": self.ids,
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": {"type": self.reason},
                    "prompt_tokens": 5,
                    "completion_tokens": len(self.ids),
                    "cached_tokens": 2,
                    "weight_version": "7",
                    "output_token_logprobs": [[-float(token), token, None] for token in self.ids],
                    "output_token_logprobs_length": len(self.ids),
                    **({"output_top_logprobs": top} if body["top_logprobs_num"] else {}),
                },
            }
            for _ in range(body["sampling_params"]["n"])
        ]
        return answers if len(answers) > 1 else answers[0]

    def sglang_events(self, answer: Any) -> Iterator[dict[str, Any]]:
        for end in range(1, len(self.ids) + 1):
            for index, choice in enumerate(answer if isinstance(answer, list) else [answer]):
                info = dict(choice["meta_info"])
                for name in ("output_token_logprobs", "output_top_logprobs"):
                    if name in info:
                        info[name] = info[name][end - 1 if self.disjoint else 0 : end]
                info["output_token_logprobs_length"] = end
                info["finish_reason"] = info["finish_reason"] if end == len(self.ids) else None
                yield {"index": index, "meta_info": info}

    async def ask(self, **fields: Any) -> Generation:
        request = Request("r", np.array([5, 6, 7], np.int32), **{"max_tokens": 16, "model": "m", **fields})
        return await self.backend.generate(request)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("path", BACKENDS)
async def test_ids_logprobs_and_reason_are_the_servers(path: str, reason: str) -> None:
    server = Server(path, [9, 4, 1], reason)
    generated = await server.ask(n=2)
    assert generated.version == (0 if path == VLLM else 7)
    assert len(generated.responses) == 2
    for response in generated.responses:
        assert response.ids.tolist() == [9, 4, 1]
        assert response.logprobs.tolist() == [-9, -4, -1]
        assert all(token.is_free for token in response.tokens)
        assert response.finish_reason is REASONS[reason]
        assert not any(token.likeliest for token in response.tokens)
    assert generated.prefilled + generated.reused == 2 * 3


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3, "top": 2}, {"forced_ids": (8, 3)}, {"forced_ids": (8, 3), "max_tokens": 2}]
)
@pytest.mark.parametrize(("path", "disjoint"), [(VLLM, False), (SGLANG, False), (SGLANG, True)])
async def test_tokens_that_are_watched_are_those_of_the_whole_reply(
    path: str, disjoint: bool, fields: dict[str, Any]
) -> None:
    server, watched = Server(path, [9, 4, 1], "length", disjoint=disjoint), list[SampledToken]()
    whole = await server.ask(**fields)
    streamed = await server.ask(**fields, watch=watched.append)
    assert [body["stream"] for body in server.received] == [False, path == SGLANG or "n" not in fields]
    for index, (expected, response) in enumerate(zip(whole.responses, streamed.responses, strict=True)):
        assert response.tokens == expected.tokens
        assert [token for token in watched if token.choice == index] == expected.tokens
        assert response.finish_reason is expected.finish_reason
    assert (streamed.version, streamed.reused) == (whole.version, whole.reused)


@pytest.mark.parametrize(
    ("last", "error", "words"),
    [
        ([], EngineError, "broke off"),
        (['{"error": {"message": "the engine died"}}'], EngineError, "the engine died"),
        (['{"error": {"message": "too long", "code": 400}}', "[DONE]"], ApiError, "too long"),
    ],
)
@pytest.mark.parametrize("path", BACKENDS)
async def test_a_stream_without_an_end_is_an_error(
    path: str, last: list[str], error: type[Exception], words: str
) -> None:
    server, watched = Server(path, [9, 4, 1]), list[SampledToken]()
    server.last_events = last
    with pytest.raises(error, match=words):
        await server.ask(watch=watched.append)
    assert [token.id for token in watched] == [9, 4, 1]


@pytest.mark.parametrize("path", BACKENDS)
async def test_a_chunk_goes_out_before_the_server_has_ended(path: str, qwen: ServedModel) -> None:
    ids = qwen.tokenizer("The answer is 42.", add_special_tokens=False)["input_ids"]
    server = Server(path, [*ids, qwen.tokenizer.eos_token_id])
    server.go_on.clear()
    text = ""
    async with (
        chat_before(server.app, BACKENDS[path], qwen) as (chat, body),
        chat.stream("POST", CHAT_COMPLETIONS, json={**body, "stream": True}) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                server.go_on.set()
                text += "".join(choice["delta"].get("content", "") for choice in json.loads(line[6:])["choices"])
    assert text == "The answer is 42."


@pytest.mark.parametrize("path", BACKENDS)
async def test_what_is_asked_reaches_the_server(path: str) -> None:
    server = Server(path, [9])
    distortions = {"top_k": 5, "logit_bias": {"9": 2.0}}
    await server.ask(
        temperature=0.7, top_p=0.9, seed=3, stops=("END",), forced_ids=(8, 8), n=2, distortions=distortions
    )
    (body,) = server.received
    sampling = body["sampling_params"]
    assert body.get("token_ids", body.get("input_ids")) == [5, 6, 7, 8, 8]
    assert (sampling["temperature"], sampling["top_p"], sampling["n"], sampling["stop"]) == (0.7, 0.9, 2, ["END"])
    assert sampling.get("seed", sampling.get("sampling_seed")) == 3
    assert sampling.get("max_tokens", sampling.get("max_new_tokens")) == 14
    assert sampling["stop_token_ids"] == [0, 1]
    assert not sampling["skip_special_tokens"]
    assert sampling.items() >= distortions.items()
    if path == SGLANG:
        with pytest.raises(ApiError, match="allowed_token_ids"):
            await server.ask(distortions={"allowed_token_ids": [4]})


@pytest.mark.parametrize(
    ("form", "sglang"),
    [
        ({"json": {"type": "array"}}, {"json_schema": '{"type":"array"}'}),
        ({"json_object": True}, {"json_schema": '{"type":"object"}'}),
        ({"choice": ["a.", "b"]}, {"regex": r"(a\.)|(b)"}),
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"or_call": True, "json_object": True}, None),
    ],
)
@pytest.mark.parametrize("path", BACKENDS)
async def test_the_form_of_replies_is_enforced_by_the_server(
    path: str, form: dict[str, Any], sglang: dict[str, Any] | None
) -> None:
    server = Server(path, [9])
    if sglang is None:
        with pytest.raises(ApiError, match="where tools are offered"):
            await server.ask(grammar=json.dumps(form))
        return
    await server.ask(grammar=json.dumps(form))
    (body,) = server.received
    expected = sglang if path == SGLANG else {"structured_outputs": form}
    assert body["sampling_params"].items() >= expected.items()


@pytest.mark.parametrize("path", BACKENDS)
async def test_forced_tokens_come_first_and_are_masked(path: str) -> None:
    server = Server(path, [9, 4, 1])
    (response,) = (await server.ask(forced_ids=(8, 3), top=1)).responses
    assert response.ids.tolist() == [8, 3, 9, 4, 1]
    assert [token.is_free for token in response.tokens] == [False, False, True, True, True]
    assert response.logprobs.tolist() == [0, 0, -9, -4, -1]
    (cut,) = (await server.ask(forced_ids=(8, 3), max_tokens=2)).responses
    assert (cut.ids.tolist(), cut.finish_reason) == ([8, 3], FinishReason.LENGTH)


@pytest.mark.parametrize("path", BACKENDS)
async def test_the_likeliest_are_the_best_whether_sampled_or_not(path: str) -> None:
    (response,) = (await Server(path, [9, 3]).ask(top=3)).responses
    assert [token.likeliest for token in response.tokens] == [{2: -2, 3: -3, 4: -4}] * 2


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (JSONResponse({"error": {"message": "too long", "type": "BadRequestError"}}, 400), ApiError, "too long"),
        (JSONResponse({"error": {"message": "the engine is dead"}}, 500), EngineError, "the engine is dead"),
        (PlainTextResponse("Bad Gateway", 502), EngineError, "Bad Gateway"),
        (PlainTextResponse("<html>Hello"), EngineError, "cannot be read.*<html>Hello"),
        (JSONResponse(5), EngineError, "cannot be read"),
        (JSONResponse({"choices": [{"token_ids": [9], "logprobs": None}]}), EngineError, "cannot be read"),
        (JSONResponse({"choices": [{"token_ids": [], "logprobs": {"content": []}}]}), EngineError, "cannot be read"),
    ],
)
@pytest.mark.parametrize("path", BACKENDS)
async def test_a_refusal_comes_in_the_servers_words(
    path: str, failure: Response, error: type[Exception], words: str
) -> None:
    server = Server(path, [])
    server.failure = failure
    with pytest.raises(error, match=words):
        await server.ask()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_heard_of(qwen: ServedModel, stream: bool) -> None:
    began, heard = asyncio.Event(), asyncio.Event()

    async def generate(request: HttpRequest) -> Response:
        assert (await request.json())["stream"] is stream
        began.set()
        assert (await request.receive())["type"] == "http.disconnect"
        heard.set()
        return Response()

    engine = Starlette(routes=[Route(VLLM, generate, methods=["POST"])])
    async with chat_before(engine, VllmBackend, qwen) as (chat, body):
        answer = asyncio.ensure_future(chat.post(CHAT_COMPLETIONS, json={**body, "stream": stream}))
        await began.wait()
        answer.cancel()
        await asyncio.wait_for(heard.wait(), 10)


@asynccontextmanager
async def chat_before(
    server: ASGIApp, backend: type[HttpBackend], model: ServedModel
) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, Any]]]:
    """A client of the chat layer, over connections that stream, and a request's body."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    async with listening(server) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        app = create_app({"m": model.server()}, backend(client), api_key="key")
        headers = {"authorization": "Bearer key"}
        async with listening(app) as front, httpx.AsyncClient(base_url=front, headers=headers, trust_env=False) as chat:
            yield chat, body


async def test_a_server_that_is_gone_is_an_engine_error() -> None:
    gone = VllmBackend(httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False))
    with pytest.raises(EngineError, match="does not answer"):
        await gone.generate(Request("c", np.array([5], np.int32), 4))
