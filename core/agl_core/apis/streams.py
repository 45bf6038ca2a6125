"""Replies as streams: a model server's chunks added up to a chat completion, and how APIs write a reply as it comes.

    chunk ─▶ StreamedCompletion ─▶ deltas ─▶ Renderer ─▶ events of the client's API
                     └─▶ the chat completion that would have come whole, which is recorded

A reply that came whole is streamed by the same renderer, as one delta of each choice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import orjson
from starlette.responses import Response

from agl_core.apis.errors import ApiError, openai_problem
from agl_core.apis.reply import Reply, joined_content, not_a_completion, reasoning_of
from agl_core.types import Json
from agl_core.types.forms import parse_if_json

if TYPE_CHECKING:
    from agl_core.apis.dialect import ModelRequest

STREAM_TYPE, STREAM_HEADERS = "text/event-stream", {"Cache-Control": "no-cache"}
_CHUNK_FIELDS = ("created", "system_fingerprint", "service_tier")
_TEXTS = frozenset({"content", "reasoning_content", "reasoning", "refusal"})
"""Fields of a message that come in pieces."""

Event: TypeAlias = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Delta:
    """Addition to one choice."""

    index: int
    message: Mapping[str, Any]
    """Pieces of the message's texts, and of its `tool_calls`: each has its `index`, and id, type and name once."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    token_ids: Any = ()
    """Ids of these tokens; some may be of text that comes later."""


class StreamedCompletion:
    """A chat completion that comes in chunks.

    Tool calls get the ids here that `read_reply` would give them, because the client sees them before.
    """

    def __init__(self, reply_id: str) -> None:
        self.head: dict[str, Json] = {}
        """The fields beside the choices, so far."""
        self._choices: dict[int, _StreamedChoice] = {}
        self._reply_id = reply_id

    def add(self, chunk: Mapping[str, Any]) -> list[Delta]:
        """Additions by one more chunk. ApiError 502 if it is none."""
        try:
            self.head.update({k: v for k, v in chunk.items() if k != "choices" and v is not None})
            return [self._choice(choice.get("index", 0)).add(choice) for choice in chunk.get("choices") or ()]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise not_a_completion(error, repr(chunk).encode()) from error

    def end(self) -> list[Delta]:
        """Additions that no chunk made, and that make the message one that every client takes."""
        deltas = [Delta(index, choice.complete()) for index, choice in self._choices.items()]
        return [delta for delta in deltas if delta.message]

    def whole(self, *, cut: bool) -> bytes:
        """The chat completion of all chunks; `cut` says that no more are read, though the response had not ended."""
        choices = [self._choices[index].whole(cut) for index in sorted(self._choices)]
        return orjson.dumps({**self.head, "object": "chat.completion", "choices": choices})

    def _choice(self, index: int) -> _StreamedChoice:
        if index not in self._choices:
            self._choices[index] = _StreamedChoice(index, self._reply_id)
        return self._choices[index]


class _StreamedChoice:
    def __init__(self, index: int, reply_id: str) -> None:
        self._index, self._id_prefix = index, f"call_{reply_id}_{index}"
        self._texts: dict[str, list[str]] = {}
        self._message: dict[str, Json] = {}
        """Its other fields."""
        self._calls: dict[int, _StreamedCall] = {}
        self._fields: dict[str, Any] = {}
        """The choice's other fields."""
        self._token_ids: list[int] | None = None
        self._logprobs: list[Mapping[str, Any]] | None = None

    def add(self, choice: Mapping[str, Any]) -> Delta:
        delta = choice.get("delta") or {}
        if isinstance(delta.get("content"), list):
            delta = {**delta, **joined_content(delta["content"])}
        message = {} if self._fields else {"role": "assistant", "content": delta.get("content")}
        self._fields["index"] = self._index
        for name, value in delta.items():
            if name in _TEXTS and value:
                if not isinstance(value, str):
                    raise TypeError(f"the {name} of a delta is no text")
                self._texts.setdefault(name, []).append(value)
                message[name] = value
            elif name not in ("role", "tool_calls", *_TEXTS) and value is not None:
                self._message[name] = message[name] = value
        calls = [self._add_call(call, place) for place, call in enumerate(delta.get("tool_calls") or ())]
        if any(calls):
            message["tool_calls"] = [call for call in calls if call]
        logprobs, ids = (choice.get("logprobs") or {}).get("content"), choice.get("token_ids")
        if logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += logprobs
        if ids is not None:
            self._token_ids = self._token_ids or []
            self._token_ids += ids
        others = {k: v for k, v in choice.items() if k not in ("delta", "logprobs", "token_ids") and v is not None}
        self._fields.update(others)
        return Delta(self._index, message, logprobs or (), ids or ())

    def _add_call(self, piece: Mapping[str, Any], place: int) -> Mapping[str, Any] | None:
        number = piece.get("index", place)
        if number not in self._calls:
            self._calls[number] = _StreamedCall(len(self._calls), piece.get("type") or "function")
        call = self._calls[number]
        own, was_open = piece.get(call.type) or {}, call.name is not None
        written = own.get(call.written)
        if written is not None:
            call.pieces.append(written if isinstance(written, str) else orjson.dumps(written).decode())
        call.id, call.name = call.id or piece.get("id"), call.name or own.get("name")
        if was_open:
            return call.piece(call.pieces[-1]) if written else None
        if not call.name:
            return None
        used = {other.id for other in self._calls.values() if other is not call}
        given, number = call.id or f"{self._id_prefix}-{call.index}", 0
        call.id = given
        while call.id in used:
            number += 1
            call.id = f"{given}-{number}"
        return {**call.piece("".join(call.pieces), name=call.name), "id": call.id, "type": call.type}

    def complete(self) -> dict[str, Any]:
        """Arguments of the functions that are called without any."""
        calls = [call for call in self._calls.values() if call.type == "function" and not any(call.pieces)]
        for call in calls:
            call.pieces.append("{}")
        return {"tool_calls": [call.piece("{}") for call in calls]} if calls else {}

    def whole(self, cut: bool) -> dict[str, Any]:
        message = {**self._message, **{name: "".join(pieces) for name, pieces in self._texts.items()}}
        if self._calls:
            message["tool_calls"] = [call.whole() for call in self._calls.values()]
        message = {"role": "assistant", "content": None if message else "", **message}
        choice = {**self._fields, "message": message, "logprobs": None}
        if self._logprobs is not None:
            choice["logprobs"] = {"content": self._logprobs}
        if self._token_ids is not None:
            choice["token_ids"] = self._token_ids
        return {"finish_reason": "abort", **choice} if cut else choice


@dataclass(slots=True)
class _StreamedCall:
    index: int
    type: str
    id: str | None = None
    name: str | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def written(self) -> str:
        """The field that the model writes."""
        return "input" if self.type == "custom" else "arguments"

    def piece(self, text: str, **name: str) -> dict[str, Any]:
        return {"index": self.index, self.type: {**name, self.written: text}}

    def whole(self) -> dict[str, Any]:
        own = {"name": self.name, self.written: "".join(self.pieces)}
        return {"id": self.id, "type": self.type, self.type: own}


def deltas_of(reply: Reply) -> Iterator[Delta]:
    """A whole reply as a delta of each choice."""
    shown: Any = reply.completion["choices"]
    for choice, of_client in zip(reply.choices, shown, strict=True):
        message = dict(choice.message)
        message["tool_calls"] = [{**call, "index": i} for i, call in enumerate(message.get("tool_calls") or ())]
        logprobs = (of_client["logprobs"] or {}).get("content") or ()
        yield Delta(choice.index, message, logprobs, () if choice.response_ids is None else choice.response_ids)


class Renderer(ABC):
    """Writes one reply as the server-sent events of an API, as it comes."""

    @abstractmethod
    def start(self, head: Mapping[str, Any]) -> bytes:
        """The events before the first delta; `head` is what is known of the chat completion beside its choices."""

    @abstractmethod
    def feed(self, delta: Delta) -> bytes:
        """The events of a delta."""

    @abstractmethod
    def finish(self, reply: Reply) -> bytes:
        """The last events, after the deltas of this reply."""

    @abstractmethod
    def fail(self, error: ApiError) -> bytes:
        """The last events of a reply that does not come to its end."""

    def stream(self, reply: Reply) -> Response:
        """A reply that is there as a whole."""
        head = {**reply.completion, "prompt_token_ids": reply.prompt_ids}
        parts = [self.start(head), *map(self.feed, deltas_of(reply)), self.finish(reply)]
        return Response(b"".join(parts), media_type=STREAM_TYPE, headers=STREAM_HEADERS)


class _Chunks(Renderer):
    """Server-sent chunks without names and a last `[DONE]`, as chat completions and completions have them."""

    object: ClassVar[str]

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        self._head: dict[str, Json] = {"id": reply_id, "object": self.object, "model": request.model}
        self._usage = bool((request.body.get("stream_options") or {}).get("include_usage"))
        self.logprobs, self.ids = request.logprobs, bool(request.body.get("return_token_ids"))
        self.of_prompt: dict[str, Any] = {}
        """It goes into the first chunk."""

    def start(self, head: Mapping[str, Any]) -> bytes:
        self._head.update({name: head[name] for name in _CHUNK_FIELDS if name in head})
        if self.ids:
            self.of_prompt = {"prompt_token_ids": head.get("prompt_token_ids")}
        return b""

    def chunk(self, choice: Mapping[str, Any], **more: Any) -> bytes:
        """One chunk of one choice."""
        usage = {"usage": None} if self._usage else {}
        return _data({**self._head, **usage, **more, "choices": [choice]})

    def of_tokens(self, delta: Delta) -> dict[str, Any]:
        """A delta's token ids, if the client wants them."""
        return {"token_ids": delta.token_ids} if self.ids and len(delta.token_ids) else {}

    def last(self, usage: Json) -> bytes:
        """The end of a stream."""
        return (_data({**self._head, "choices": [], "usage": usage}) if self._usage else b"") + b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> bytes:
        return _data(openai_problem(error))


def _data(chunk: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(chunk, option=orjson.OPT_SERIALIZE_NUMPY)


class ChatChunks(_Chunks):
    """Those of chat completions."""

    object = "chat.completion.chunk"

    def feed(self, delta: Delta) -> bytes:
        logprobs = {"content": delta.logprobs} if self.logprobs and delta.logprobs else None
        tokens = self.of_tokens(delta)
        *earlier, last = _one_by_one(delta.message) or [{}]
        chunks = [self._chunk(delta.index, piece, None) for piece in earlier]
        if last or logprobs or tokens:
            chunks.append(self._chunk(delta.index, last, logprobs, **tokens))
        return b"".join(chunks)

    def _chunk(self, index: int, piece: Mapping[str, Json], logprobs: Json, **more: Any) -> bytes:
        of_prompt, self.of_prompt = self.of_prompt, {}
        choice = {"index": index, "delta": piece, "logprobs": logprobs, "finish_reason": None, **more}
        return self.chunk(choice, **of_prompt)

    def finish(self, reply: Reply) -> bytes:
        choices: Any = reply.completion["choices"]
        ended: dict[str, Json] = {"delta": {}, "logprobs": None}
        return b"".join(
            self.chunk({"index": choice["index"], **ended, "finish_reason": choice["finish_reason"]})
            for choice in choices
        ) + self.last(reply.completion.get("usage"))


def _one_by_one(message: Mapping[str, Any]) -> list[dict[str, Json]]:
    """The role, texts and tool calls of a delta, apart: some clients take the first that they find."""
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
    """Those of completions."""

    object = "text_completion"

    def __init__(self, request: ModelRequest, reply_id: str) -> None:
        super().__init__(request, reply_id)
        self._offsets: dict[int, int] = {}
        """By choice, the characters of its tokens so far."""

    def feed(self, delta: Delta) -> bytes:
        text = delta.message.get("content") or delta.message.get("refusal") or ""
        logprobs = None
        if self.logprobs and delta.logprobs:
            offset = self._offsets.get(delta.index, 0)
            logprobs = _text_logprobs(delta.logprobs, offset)
            self._offsets[delta.index] = offset + sum(map(len, logprobs["tokens"]))
        tokens = self.of_tokens(delta)
        if not (text or logprobs or tokens):
            return b""
        of_prompt, self.of_prompt = self.of_prompt, {}
        choice = {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": None}
        return self.chunk({**choice, **of_prompt, **tokens})

    def finish(self, reply: Reply) -> bytes:
        choices: Any = reply.completion["choices"]
        ended = [{**text_choice(choice), "text": "", "logprobs": None} for choice in choices]
        return b"".join(map(self.chunk, ended)) + self.last(reply.completion.get("usage"))


def text_choice(choice: Mapping[str, Any]) -> dict[str, Json]:
    """A choice of a chat as completions have it."""
    reason = choice["finish_reason"]
    return {
        "index": choice["index"],
        "text": choice["message"].get("content") or choice["message"].get("refusal") or "",
        "logprobs": choice["logprobs"] and _text_logprobs(choice["logprobs"].get("content") or ()),
        "finish_reason": reason if reason in ("length", "content_filter") else "stop",
    }


def _text_logprobs(entries: Sequence[Mapping[str, Any]], offset: int = 0) -> dict[str, list[Any]]:
    """In the older shape: one list per kind of value; `offset` is where the first token's text begins."""
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


def named_events(events: Iterable[Event]) -> bytes:
    """Server-sent events named by their `type`, as Responses and Messages have them."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (str(e["type"]).encode(), orjson.dumps(e)) for e in events)


@dataclass(slots=True, eq=False)
class Block:
    """A part of a message: a text of one kind, or a tool call."""

    kind: Literal["reasoning", "content", "refusal", "tool_call"]
    number: int
    """Among those of its kind."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """A tool call's id, type and name (`called`)."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    """Of a content's tokens, if the client is to see them."""
    is_open: bool = True

    @property
    def text(self) -> str:
        """Text of a tool call are its arguments or its input."""
        return "".join(self.pieces)


_Part: TypeAlias = tuple[Literal["reasoning", "content", "refusal", "tool_call"], Mapping[str, Any], str]


def _parts(message: Mapping[str, Any]) -> Iterator[_Part]:
    """The texts and tool calls of a message or delta, in the order of blocks; none of the texts is empty."""
    if reasoning := reasoning_of(message):
        yield "reasoning", {}, reasoning
    if message.get("content"):
        yield "content", {}, message["content"]
    if message.get("refusal"):
        yield "refusal", {}, message["refusal"]
    for call in message.get("tool_calls") or ():
        own = call.get("custom") or call["function"]
        yield "tool_call", call, own.get("input") or own.get("arguments") or ""


def blocks_of(message: Mapping[str, Any]) -> list[Block]:
    """A whole message as blocks."""
    parts = [*_parts(message)]
    n_texts = sum(kind != "tool_call" for kind, _, _ in parts)
    return [Block(kind, max(0, i - n_texts), call, [text]) for i, (kind, call, text) in enumerate(parts)]


class BlockRenderer(Renderer):
    """For APIs whose replies are lists of blocks, of which one begins after the other."""

    def __init__(self, *, logprobs: bool = False) -> None:
        self.blocks: list[Block] = []
        self._logprobs = logprobs
        self._pending: list[Mapping[str, Any]] = []
        """Log-probabilities of tokens without text so far."""

    @abstractmethod
    def opened(self, index: int, block: Block) -> Iterator[Event]:
        """The events by which a block begins."""

    @abstractmethod
    def extended(self, index: int, block: Block, text: str, logprobs: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
        """The events of a text that a block has now in addition."""

    @abstractmethod
    def closed(self, index: int, block: Block) -> Iterator[Event]:
        """The events by which a block ends."""

    def add(self, delta: Delta) -> Iterator[Event]:
        """The events of a delta; these APIs have one choice."""
        if delta.index == 0:
            self._pending += delta.logprobs if self._logprobs else ()
            for part in _parts(delta.message):
                yield from self.add_part(*part)

    def add_part(self, kind: Any, call: Mapping[str, Any], text: str) -> Iterator[Event]:
        """The events of a text, or of a tool call or what it has in addition."""
        of_kind = [block for block in self.blocks if block.kind == kind]
        if kind == "tool_call":
            block = of_kind[call["index"]] if call["index"] < len(of_kind) else None
        else:
            block = of_kind[-1] if of_kind and of_kind[-1] is self.blocks[-1] else None
        if block is None:
            yield from self.close(complete=True)
            block = Block(kind, len(of_kind), call)
            self.blocks.append(block)
            yield from self.opened(len(self.blocks) - 1, block)
        logprobs: list[Mapping[str, Any]] = []
        if kind == "content":
            logprobs, self._pending = self._pending, []
        block.pieces.append(text)
        block.logprobs += logprobs
        if text or logprobs:
            yield from self.extended(self.blocks.index(block), block, text, logprobs)

    def end(self) -> Iterator[Event]:
        """The events that end all blocks."""
        if self._pending and self.blocks and self.blocks[-1].kind == "content":
            yield from self.add_part("content", {}, "")
        yield from self.close(complete=False)

    def close(self, *, complete: bool) -> Iterator[Event]:
        """The events that end open blocks, or only those that are `complete`: a tool call may still get arguments."""
        for index, block in enumerate(self.blocks):
            can_grow = block.kind == "tool_call" and not isinstance(parse_if_json(block.text), dict)
            if block.is_open and not (complete and can_grow):
                block.is_open = False
                yield from self.closed(index, block)
