"""Replies of an attempt, kept for its client's retries, for echoes of a reply, and for what continues one.

- A client's own retry of a call gets that call's reply; a second, equal request is a call of its own.
- An assistant message that echoes a reply becomes the upstream's own message again. Other APIs write it in another form
  (arguments as an object, empty content or none); translated back it might be rendered to other tokens.
- A later request may continue a reply by its id (Responses API).

All is in memory, bounded, and forgotten by a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
import orjson
from msgspec import Struct

from agl_core.apis.reply import PromptIds, RawReply, Reply, called, reasoning_of
from agl_core.capture.requests import HEADER_RETRIES
from agl_core.types import Call, Json
from agl_core.types.forms import count_values, parse_if_json, parse_json

Message: TypeAlias = Mapping[str, Json]
MAX_KEPT, MAX_RETRIED = 1000, 100
"""Finished exchanges kept per attempt, in all and for retries; the oldest goes first."""
_SHORT = 4 << 10
"""Bytes of a request up to which parsing all of it is faster than finding what is new."""
_KNOWN = -0x61676C5F6B6E6F77
"""Placeholder for known messages in the parsed text: a number that no client sends."""
_OVERHEAD = 2000
"""Bytes of an exchange's objects, at least."""
MAX_KEPT_BYTES = 64 << 20
"""Bytes of raw replies, and of requests that can be continued, kept per attempt."""
MAX_TOTAL_BYTES = 256 << 20
"""Bytes kept of all attempts; the one used least recently goes first."""
NOT_KEPT = (
    f"agl keeps the last {MAX_KEPT} responses of an attempt in memory ({MAX_KEPT_BYTES >> 20} MiB at most, and "
    f"{MAX_TOTAL_BYTES >> 20} MiB of all attempts), except those with 'store': false, and a restart forgets them."
)


@dataclass(slots=True, eq=False)
class ClientExchange:
    """One call with all requests for it, and its reply."""

    sequence: int
    tries: int = 0
    """The highest retry count seen."""
    supersedes: Call | None = None
    """An earlier record of it, whose reply did not arrive."""
    call: Call | None = None
    """The record; None before, and if it does not count."""
    waiting: list[Any] = field(default_factory=list)
    """Connections (`server.listening`) that asked for it."""
    arrived: bool = False
    """True if one of them got the reply."""
    reply: asyncio.Future[Reply] | None = None
    """None unless in flight, so that the retry of a failed call asks the upstream again."""
    kept: RawReply | None = None
    reply_id: str = ""
    messages: Sequence[Message] = ()
    """The upstream's own messages, one per choice, as a chat request repeats them."""
    conversation: Sequence[Message] | None = None
    """All messages up to and with the reply, if a later request may continue it."""
    request: Any = None
    """The `ModelRequest`, if the client may fetch the response again."""
    size: int = 0
    keys: list[tuple[str, Any]] = field(default_factory=list)
    """Index keys; none once it is forgotten."""


class SentMessages:
    """The messages of an attempt's latest request; of the next one, only what it adds is parsed, checked, counted."""

    def __init__(self) -> None:
        self.text = b""
        """The body up to the end of its last message."""
        self.n_known = 0
        """Messages that are the same objects as in the body before."""
        self._head, self._messages, self._n_values = b"", list[Message](), 0

    def count_values(self, body: bytes, limit: int) -> int:
        """An upper bound of a body's JSON values; exact above `limit`."""
        added = body.removeprefix(self.text)
        n_values = self._n_values + count_values(added, limit)
        return n_values if n_values <= limit and len(added) < len(body) else count_values(body, limit)

    def parse(self, body: bytes) -> Any:
        """A body's JSON; orjson.JSONDecodeError."""
        if self.text and body.startswith(self.text):
            with contextlib.suppress(orjson.JSONDecodeError):
                rest = b"%b%d%b" % (self._head, _KNOWN, body[len(self.text) :])
                parsed = parse_json(rest)
                if (added := _messages(parsed))[:1] == [_KNOWN]:  # Else they are another object's.
                    self.n_known, parsed["messages"] = len(self._messages), [*self._messages, *added[1:]]
                    self._keep(body, rest, parsed["messages"])
                    return parsed
        self.text, self.n_known, self._n_values = b"", 0, 0
        parsed = parse_json(body)
        if len(body) > _SHORT and (messages := _messages(parsed)):
            self._keep(body, body, messages)
        return parsed

    def _keep(self, body: bytes, parsed: bytes, messages: list[Message]) -> None:
        """Note where the messages end in a body, of which `parsed` was parsed."""
        written = bytes(_SENT.decode(parsed).messages)
        start = parsed.find(written)
        if not self.text:
            self._head = parsed[: start + 1]
        text = body[: len(body) - len(parsed) + start + len(written) - 1]
        self._n_values += count_values(text[len(self.text) :], len(text))
        self.text, self._messages = text, messages


def _messages(body: Json) -> list[Any]:
    messages = body.get("messages") if isinstance(body, dict) else None
    return messages if isinstance(messages, list) else []


class _Sent(Struct):
    messages: msgspec.Raw


_SENT = msgspec.json.Decoder(_Sent)


class ReplyCache:
    """The exchanges of one attempt."""

    def __init__(self) -> None:
        self._exchanges: dict[tuple[str, Any], list[ClientExchange]] = {}
        """By request, reply, message or tool call; the oldest first."""
        self._over: dict[ClientExchange, None] = {}
        """Finished ones, the oldest first."""
        self._retried: dict[ClientExchange, None] = {}
        """Finished ones that a retry may ask for again."""
        self._recorded: list[Call] = []
        self.size = 0
        self.prompt_ids, self.sent = PromptIds(), SentMessages()

    @property
    def kept_bytes(self) -> int:
        return self.size + 2 * len(self.sent.text)

    def retried(self, digest: int, count: int) -> ClientExchange | None:
        """The exchange that the `count`th retry of a request continues; None if it is a call of its own.

        Only an SDK's own count makes a retry. It claims the equal call whose last count is smaller and nearest, the
        oldest of several, so that each keeps its own retries.
        """
        if not count:
            return None
        equal = self._exchanges.get(("request", digest), ())
        exchange = max((e for e in equal if e.tries < count), key=lambda e: e.tries, default=None)
        if exchange is not None:
            exchange.tries = count
        return exchange

    def open(self, digest: int, count: int, sequence: int) -> ClientExchange:
        exchange = ClientExchange(sequence, count)
        self._index(exchange, "request", digest)
        return exchange

    def end(self, exchange: ClientExchange) -> None:
        """Keep an exchange that has its reply or failed for a retry, and forget the oldest beyond the bounds."""
        exchange.reply = None
        if exchange.keys and exchange not in self._over:
            self._retried[exchange] = None
            self._grow(exchange, _OVERHEAD + (0 if exchange.kept is None else len(exchange.kept.body)))
            if len(self._retried) > MAX_RETRIED:
                self._retry_no_more(next(iter(self._retried)))

    def remember(
        self, exchange: ClientExchange, reply: Reply, conversation: Sequence[Message] | None, size: int
    ) -> None:
        """Remember the upstream's own messages of a reply.

        `conversation` is what a later request may continue, if any may; `size` are the bytes of its request.
        """
        if exchange.messages:  # Its client asked again.
            return
        exchange.messages, exchange.reply_id = [_echoed(choice.message) for choice in reply.choices], reply.id
        self._index(exchange, "reply", reply.id)
        for message in exchange.messages:
            self._index(exchange, "message", _key(message))
        for call_id in {call.get("id") for message in exchange.messages for call in message.get("tool_calls") or ()}:
            self._index(exchange, "tool call", call_id)
        if conversation is not None:
            exchange.conversation = (*conversation, exchange.messages[0])
        kept = _OVERHEAD + len(reply.raw.body) + (0 if conversation is None else size)
        self._grow(exchange, kept - exchange.size)

    def of_reply(self, reply_id: str) -> ClientExchange | None:
        return next(iter(self._exchanges.get(("reply", reply_id), ())), None)

    def restore_echo(self, message: Message) -> Message:
        """The upstream's own message that an assistant message echoes, else the message itself.

        An echo has the same text, and calls the same tools by the same ids with equal arguments, however written.
        """
        key, arguments = _key(message), _arguments(message)
        for exchange in reversed(self._exchanges.get(("message", key), ())):
            for own in exchange.messages:
                if _key(own) == key and _arguments(own) == arguments:
                    return own
        return message

    def reply_of(self, tool_call_id: str) -> str | None:
        """The id of the reply that asked for a tool call; None if several did, as some endpoints count calls anew."""
        exchanges = self._exchanges.get(("tool call", tool_call_id), ())
        return exchanges[0].reply_id if len(exchanges) == 1 else None

    def recall(self, calls: Iterable[Call]) -> None:
        """Take in calls of the attempt that an earlier server recorded; it is unknown whether their replies arrived.

        A reply that ended before the last call began counts as arrived: an agent may ask the same twice.
        """
        counted = [call for call in calls if not call.late]
        last = max((call.started for call in counted), default=0.0)
        self._recorded = [call for call in counted if call.ended >= last][-MAX_KEPT:]

    def unanswered(self, api: str, request: Mapping[str, Json]) -> Call | None:
        """The recalled call that a retry without an exchange repeats; each is given once."""
        for index, call in enumerate(self._recorded):
            if (call.api, call.request) == (api, request):
                return self._recorded.pop(index)
        return None

    def forget(self) -> None:
        """Forget finished exchanges."""
        self.prompt_ids, self.sent = PromptIds(), SentMessages()
        for exchange in [*self._over]:
            self._forget(exchange)

    def clear(self) -> None:
        """Forget everything, and what is in flight once it ends."""
        self.forget()
        self._recorded.clear()
        for exchange in {exchange for exchanges in self._exchanges.values() for exchange in exchanges}:
            exchange.keys.clear()
        self._exchanges.clear()

    def _index(self, exchange: ClientExchange, kind: str, value: Any) -> None:
        exchanges = self._exchanges.setdefault((kind, value), [])
        if exchange not in exchanges[-1:]:
            exchanges.append(exchange)
            exchange.keys.append((kind, value))

    def _grow(self, exchange: ClientExchange, size: int) -> None:
        exchange.size += size
        self.size += size
        self._over[exchange] = None
        while len(self._over) > 1 and (len(self._over) > MAX_KEPT or self.size > MAX_KEPT_BYTES):
            self._forget(next(iter(self._over)))

    def _retry_no_more(self, exchange: ClientExchange) -> None:
        """Reduce an exchange to what a later request may name."""
        del self._retried[exchange]
        if not exchange.messages:
            self._forget(exchange)
        elif exchange.conversation is None:
            exchange.kept, size = None, _OVERHEAD + len(orjson.dumps(exchange.messages))
            self.size += size - exchange.size
            exchange.size = size
            self._unindex(exchange, *(key for key in exchange.keys if key[0] == "request"))

    def _forget(self, exchange: ClientExchange) -> None:
        del self._over[exchange]
        self._retried.pop(exchange, None)
        self.size -= exchange.size
        self._unindex(exchange, *exchange.keys)

    def _unindex(self, exchange: ClientExchange, *keys: tuple[str, Any]) -> None:
        for key in keys:
            exchange.keys.remove(key)
            exchanges = self._exchanges[key]
            exchanges.remove(exchange)
            if not exchanges:
                del self._exchanges[key]


class Budget:
    """Bounds the memory of all attempts by `MAX_TOTAL_BYTES`.

    An attempt that is forgotten goes on: echoes are translated anew, `previous_response_id` is refused, and a retry is
    a call of its own.
    """

    def __init__(self) -> None:
        self._sizes: OrderedDict[ReplyCache, int] = OrderedDict()
        """The latest used last."""
        self._total, self._limit = 0, 64

    def update(self, answered: ReplyCache) -> None:
        self._total += answered.kept_bytes - self._sizes.pop(answered, 0)
        self._sizes[answered] = answered.kept_bytes
        while self._total > MAX_TOTAL_BYTES and len(self._sizes) > 1:
            oldest, size = self._sizes.popitem(last=False)
            self._total -= size
            oldest.forget()
        if len(self._sizes) > self._limit:  # Closed attempts are empty.
            self._sizes = OrderedDict((other, other.kept_bytes) for other in self._sizes if other.kept_bytes)
            self._total = sum(self._sizes.values())
            self._limit = max(64, 2 * len(self._sizes))


def retry_count(headers: Mapping[str, str]) -> int:
    """The times that the client's SDK has sent this request before."""
    value = headers.get(HEADER_RETRIES, "0")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0


def _echoed(message: Message) -> Message:
    """A reply's message as a chat request repeats it: without null and empty fields."""
    named = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {**named, "role": "assistant", "content": message.get("content")}


def _key(message: Message) -> Any:
    calls = tuple((call.get("id"), called(call)[0]) for call in message.get("tool_calls") or ())
    return message.get("content") or "", reasoning_of(message), calls


def _arguments(message: Message) -> list[Json]:
    return [parse_if_json(called(call)[1]) for call in message.get("tool_calls") or ()]
