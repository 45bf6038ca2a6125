"""Writes replies as streams.

chunk ─▶ StreamedCompletion ─▶ deltas ─▶ Renderer ─▶ events of the client's API
                 └─▶ the whole chat completion, which is recorded
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Literal, TypeAlias

import orjson

from agl_core.apis.errors import ApiError, openai_problem
from agl_core.apis.reply import Reply, reasoning_of
from agl_core.apis.streamed import LAST_EVENT, Delta
from agl_core.types import Json
from agl_core.types.forms import parse_if_json

STREAM_TYPE, STREAM_HEADERS = "text/event-stream", {"Cache-Control": "no-cache"}
_CHUNK_FIELDS = ("created", "system_fingerprint", "service_tier")

Event: TypeAlias = Mapping[str, Json]


class Renderer(ABC):
    """Writes one reply as the server-sent events of an API, as it comes."""

    done: ClassVar[bytes] = b""
    """Follows the events of a complete reply."""

    @abstractmethod
    def start(self, head: Mapping[str, Any]) -> Iterable[Event]:
        """The events before the first delta; `head` has the fields beside the choices, so far."""

    @abstractmethod
    def feed(self, delta: Delta) -> Iterable[Event]:
        """Events of a delta."""

    @abstractmethod
    def finish(self, reply: Reply) -> Iterable[Event]:
        """The last events, after the deltas of this reply."""

    @abstractmethod
    def fail(self, error: ApiError) -> Event:
        """The last event of a reply that breaks off."""

    def encode(self, events: Iterable[Event]) -> bytes:
        """Events as sent, each named by its type."""
        return b"".join([b"event: %b\n%b" % (str(event["type"]).encode(), _data(event)) for event in events])

    def events(self, reply: Reply) -> Iterator[Event]:
        """The events of a whole reply, with one delta per choice."""
        yield from self.start({**reply.completion, "prompt_token_ids": reply.prompt_ids})
        shown: Any = reply.completion["choices"]
        for choice, of_client in zip(reply.choices, shown, strict=True):
            message = dict(choice.message)
            message["tool_calls"] = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls") or ())]
            logprobs = (of_client["logprobs"] or {}).get("content") or ()
            ids = () if choice.response_ids is None else choice.response_ids
            yield from self.feed(Delta(choice.index, message, logprobs, ids))
        yield from self.finish(reply)

    def stream(self, reply: Reply) -> bytes:
        return self.encode(self.events(reply)) + self.done


class _Chunks(Renderer):
    """Chunks of chat completions and completions: without names, and with a last `[DONE]`."""

    done = b"data: %b\n\n" % LAST_EVENT
    object: ClassVar[str]

    def __init__(self, model: str, reply_id: str, body: Mapping[str, Any], *, logprobs: bool) -> None:
        self._head: dict[str, Json] = {"id": reply_id, "object": self.object, "model": model}
        self._usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.logprobs, self.ids = logprobs, bool(body.get("return_token_ids"))
        self.of_prompt: dict[str, Any] = {}
        """Fields of the first chunk."""
        self._offsets: dict[int, int] = defaultdict(int)
        """By choice: characters of its tokens so far."""

    @abstractmethod
    def ended(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        """A choice in its last chunk."""

    def encode(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(_data, events))

    def start(self, head: Mapping[str, Any]) -> Iterable[Event]:
        self._head.update({name: head[name] for name in _CHUNK_FIELDS if name in head})
        if self.ids:
            self.of_prompt = {"prompt_token_ids": head.get("prompt_token_ids")}
        return ()

    def chunk(self, choice: Mapping[str, Any], **more: Any) -> Event:
        usage = {"usage": None} if self._usage else {}
        return {**self._head, **usage, **more, "choices": [choice]}

    def of_tokens(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": delta.token_ids} if self.ids and len(delta.token_ids) else {}

    def finish(self, reply: Reply) -> Iterable[Event]:
        choices: Any = reply.completion["choices"]
        yield from [self.chunk(self.ended(choice)) for choice in choices]
        if self._usage:
            yield {**self._head, "choices": [], "usage": reply.completion.get("usage")}

    def fail(self, error: ApiError) -> Event:
        return openai_problem(error)


def _data(event: Event) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(event, option=orjson.OPT_SERIALIZE_NUMPY)


class ChatChunks(_Chunks):
    object = "chat.completion.chunk"

    def feed(self, delta: Delta) -> Iterable[Event]:
        logprobs = {"content": delta.logprobs} if self.logprobs and delta.logprobs else None
        tokens = self.of_tokens(delta)
        *earlier, last = _one_by_one(delta.message) or [{}]
        for piece in earlier:
            yield self._chunk(delta.index, piece, None)
        if last or logprobs or tokens:
            yield self._chunk(delta.index, last, logprobs, **tokens)

    def _chunk(self, index: int, piece: Mapping[str, Json], logprobs: Json, **more: Any) -> Event:
        of_prompt, self.of_prompt = self.of_prompt, {}
        choice = {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": None, **more}
        return self.chunk(choice, **of_prompt)

    def ended(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"index": choice["index"], "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}


def _one_by_one(message: Mapping[str, Any]) -> list[dict[str, Json]]:
    """The role, texts and tool calls of a delta, apart: some clients read only the first."""
    content = message.get("content")
    pieces: list[dict[str, Json]] = []
    if "role" in message:
        pieces.append({"role": "assistant", "content": None if content is None else ""})
    others = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls")}
    pieces += [{name: value} for name, value in others.items() if value not in (None, "", [], {})]
    if content:
        pieces.append({"content": content})
    return [*pieces, *({"tool_calls": [call]} for call in message.get("tool_calls") or ())]


class TextChunks(_Chunks):
    object = "text_completion"

    def feed(self, delta: Delta) -> Iterable[Event]:
        text = delta.message.get("content") or delta.message.get("refusal") or ""
        logprobs = None
        if self.logprobs and delta.logprobs:
            logprobs = _text_logprobs(delta.logprobs, self._offsets[delta.index])
            self._offsets[delta.index] += sum(map(len, logprobs["tokens"]))
        tokens = self.of_tokens(delta)
        if text or logprobs or tokens:
            of_prompt, self.of_prompt = self.of_prompt, {}
            choice = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": None}
            yield self.chunk({**choice, **of_prompt, **tokens})

    def ended(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**text_choice(choice), "text": "", "logprobs": None}


def text_choice(choice: Mapping[str, Any]) -> dict[str, Json]:
    """A chat's choice as one of completions."""
    reason = choice["finish_reason"]
    return {
        "index": choice["index"],
        "text": choice["message"].get("content") or choice["message"].get("refusal") or "",
        "logprobs": choice["logprobs"] and _text_logprobs(choice["logprobs"].get("content") or ()),
        "finish_reason": reason if reason in ("length", "content_filter") else "stop",
    }


def _text_logprobs(entries: Sequence[Mapping[str, Any]], offset: int = 0) -> dict[str, list[Any]]:
    """The older shape, one list per kind of value; the first token's text begins at `offset`."""
    tokens = [entry.get("token") or "" for entry in entries]
    return {
        "tokens": tokens,
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            {other.get("token") or "": other.get("logprob") for other in entry.get("top_logprobs") or ()}
            for entry in entries
        ],
        "text_offset": [*accumulate(map(len, tokens[:-1]), initial=offset)] if tokens else [],
    }


@dataclass(slots=True, eq=False)
class Block:
    """A part of a message: a text of one kind, or a tool call."""

    kind: Literal["reasoning", "content", "refusal", "tool_call"]
    call: Mapping[str, Any] = field(default_factory=dict)
    """A tool call's id, type and name (`called`)."""
    pieces: list[str] = field(default_factory=list)
    """Pieces of its text, or of a tool call's arguments or input."""
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    """A content's, if the client is to see them."""
    sent: tuple[int, int] | None = None
    """Numbers of pieces and log-probabilities in events; None before it begins."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def can_grow(self) -> bool:
        """True if it is a tool call that may get more arguments."""
        may_be_whole = self.pieces and self.pieces[-1].rstrip().endswith("}")
        return self.kind == "tool_call" and not (may_be_whole and isinstance(parse_if_json(self.text), dict))


class BlockRenderer(Renderer):
    """For APIs whose replies are blocks in turn: those behind a tool call that can grow wait, as servers mix pieces."""

    def __init__(self, *, logprobs: bool = False) -> None:
        self.blocks: list[Block] = []
        self._logprobs = logprobs
        self._current = 0
        """The block that is open, or begins next."""
        self._pending: list[Mapping[str, Any]] = []
        """Log-probabilities of tokens without text yet."""

    @abstractmethod
    def opened(self, index: int, block: Block) -> Iterator[Event]:
        """Events that begin a block."""

    @abstractmethod
    def extended(self, index: int, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """Events of text added to a block."""

    @abstractmethod
    def closed(self, index: int, block: Block) -> Iterator[Event]:
        """Events that end a block."""

    def feed(self, delta: Delta) -> Iterator[Event]:
        if delta.index:  # These APIs have one choice.
            return
        self._pending += delta.logprobs if self._logprobs else ()
        message = delta.message
        texts = {
            "reasoning": reasoning_of(message),
            "content": message.get("content"),
            "refusal": message.get("refusal"),
        }
        for kind, text in texts.items():
            if text:
                yield from self.add(kind, text)
        for call in message.get("tool_calls") or ():
            own = call.get("custom") or call["function"]
            yield from self.add("tool_call", own.get("input") or own.get("arguments") or "", call)

    def add(self, kind: Any, text: str, call: Mapping[str, Any] | None = None) -> Iterator[Event]:
        """Add text, or a piece of a tool call, and return its events."""
        block = self.blocks[-1] if self.blocks and self.blocks[-1].kind == kind else None
        if call is not None:
            calls = [block for block in self.blocks if block.kind == kind]
            block = calls[call["index"]] if call["index"] < len(calls) else None
        if block is None:
            block = Block(kind, call or {})
            self.blocks.append(block)
        if kind == "content":
            block.logprobs += self._pending
            self._pending = []
        if text:
            block.pieces.append(text)
        yield from self._write()

    def end(self) -> Iterator[Event]:
        if self._pending and self.blocks and self.blocks[-1].kind == "content":
            yield from self.add("content", "")
        yield from self._write(is_over=True)

    def _write(self, *, is_over: bool = False) -> Iterator[Event]:
        """Events of all unsent pieces, up to the first block that may grow."""
        for index, block in enumerate(self.blocks[self._current :], self._current):
            if block.sent is None:
                block.sent = 0, 0
                yield from self.opened(index, Block(block.kind, block.call))
            pieces, logprobs = block.sent
            block.sent = len(block.pieces), len(block.logprobs)
            if block.sent != (pieces, logprobs):
                yield from self.extended(index, block, "".join(block.pieces[pieces:]), block.logprobs[logprobs:])
            if not is_over and (block is self.blocks[-1] or block.can_grow):
                return
            self._current += 1
            yield from self.closed(index, block)
