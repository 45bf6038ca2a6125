"""A reply as its tokens come: the text of each response, and the chunks of chat completions that clients get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agl_chat.conversation import ChatText
from agl_chat.formats import Parsed, find_mark
from agl_chat.parsing import ReplyParser
from agl_chat.requests import Backend, Generated, SampledToken

if TYPE_CHECKING:
    from agl_chat.api import Exchange, ModelServer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes a part of a character to."""


class ResponseText:
    """The text of one response: decoded, cut at the first stop string, taken apart.

    Whole responses are fed in one piece. What `feed` and `end` give adds up to `parsed`.
    """

    def __init__(self, text: ChatText, parser: ReplyParser, stops: Sequence[str]) -> None:
        self.ids: list[int] = []
        self.parsed = Parsed("")
        self.stop: str | None = None
        """The stop string that the response has."""
        self._text, self._parser, self._stops = text, parser, stops
        self._start = self._known = 0
        """Some tokens are decoded twice, since a token's text depends on those before it: from `_start` on."""
        self._held = ""
        """What may be the beginning of a stop string."""

    def feed(self, ids: Sequence[int]) -> Parsed:
        """What is certain after these tokens and was not given before."""
        self.ids += ids
        piece = self._piece()
        if piece.endswith(_UNFINISHED):
            return Parsed("")
        if piece:
            self._start = self._known
        self._known = len(self.ids)
        return self._give(piece, is_over=False)

    def end(self) -> Parsed:
        """The rest, once there are no more tokens."""
        rest = self._give(self._piece(), is_over=True)
        last = self._parser.finish()
        self.parsed += last
        return rest + last

    def _piece(self) -> str:
        before = self._text.decode(self.ids[self._start : self._known])
        return self._text.decode(self.ids[self._start :])[len(before) :]

    def _give(self, text: str, *, is_over: bool) -> Parsed:
        if self.stop is not None:
            return Parsed("")
        text = self._held + text
        at, is_whole = find_mark(text, 0, self._stops)
        if is_whole:
            self.stop = next(stop for stop in self._stops if text.startswith(stop, at))
        elif is_over:
            at = len(text)
        self._held = text[at:]
        given = self._parser.feed(text[:at])
        self.parsed += given
        return given


async def stream_reply(model: ModelServer, exchange: Exchange, backend: Backend) -> AsyncGenerator[dict[str, Any]]:
    """The chunks of a reply. Each has the tokens that came since the one before, also where their text comes later.

    The first has the prompt's ids, the last one usage and agl's extras, if they are asked for. Closing the iterator
    ends the sampling. A response of a back end that tells of no token comes in one chunk.
    """
    loop, news, tokens = asyncio.get_running_loop(), asyncio.Event(), list[SampledToken]()

    def add(token: SampledToken) -> None:
        tokens.append(token)
        news.set()

    def watch(token: SampledToken) -> None:
        loop.call_soon_threadsafe(add, token)

    generating = asyncio.ensure_future(backend.generate(replace(exchange.request, watch=watch)))
    generating.add_done_callback(lambda _: news.set())
    texts = [model.response_text(exchange) for _ in range(exchange.request.n)]
    head = {**model.head(exchange), "object": "chat.completion.chunk"}
    of_prompt = {"prompt_token_ids": exchange.prompt.ids.tolist()} if exchange.chat.return_token_ids else {}
    try:
        while not generating.done():
            await news.wait()
            news.clear()
            came, tokens[:] = tokens[:], []
            for index, text in enumerate(texts):
                if some := [token for token in came if token.choice == index]:
                    yield {**head, **of_prompt, "choices": [_choice(model, exchange, index, text, some)]}
                    of_prompt = {}
        generated = generating.result()
    finally:
        generating.cancel()
    for index, text in enumerate(texts):
        if some := _rest(generated, index, len(text.ids)):
            yield {**head, **of_prompt, "choices": [_choice(model, exchange, index, text, some)]}
            of_prompt = {}
    lasts = [text.end() for text in texts]
    body = model.finish(exchange, generated, texts)
    for choice, last in zip(body["choices"], lasts, strict=True):
        delta = _delta(last)
        if calls := choice["message"].get("tool_calls"):
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        end = {name: choice[name] for name in ("index", "finish_reason", "stop_reason")}
        yield {**head, **of_prompt, "choices": [{**end, "delta": delta, "logprobs": None}]}
        of_prompt = {}
    more = {"agl": body["agl"]} if "agl" in body else {}
    if more or (exchange.chat.stream_options or {}).get("include_usage"):
        yield {**head, "choices": [], "usage": body["usage"], **more}


def _choice(
    model: ModelServer, exchange: Exchange, index: int, text: ResponseText, tokens: Sequence[SampledToken]
) -> dict[str, Any]:
    role = {} if text.ids else {"role": "assistant"}
    ids = [token.id for token in tokens]
    choice: dict[str, Any] = {
        "index": index,
        "delta": {**role, **_delta(text.feed(ids))},
        "finish_reason": None,
        "logprobs": None,
    }
    if exchange.chat.logprobs:
        choice["logprobs"] = {"content": model.entries(tokens)}
    if exchange.chat.return_token_ids:
        choice["token_ids"] = ids
    return choice


def _rest(generated: Generated, index: int, known: int) -> list[SampledToken]:
    """The tokens of a response that the back end did not tell of."""
    return generated.responses[index].tokens(index)[known:]


def _delta(parsed: Parsed) -> dict[str, Any]:
    texts = {"reasoning_content": parsed.reasoning, "content": parsed.content}
    return {name: text for name, text in texts.items() if text}
