"""The model's replies in an attempt, so that an agent's echo of one becomes the upstream's own message again.

Other APIs than chat completions write a reply in another form: arguments of tools as an object and not as text, no
content or an empty one. Translated back, such a message means the same, but it may be written otherwise, and then the
model server would not render it to the same tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import orjson

from agl_core.server.dialects import fields
from agl_core.server.gateway.reply import Reply, called, reasoning_of
from agl_core.server.rollouts.attempt import ActiveAttempt
from agl_core.types import Json

Message: TypeAlias = Mapping[str, Json]
"""One message of a chat."""

_REFERENCE = 8
"""Bytes."""
_ECHOED = ("instructions", "text", "tools")
"""Fields of a response that repeat its request's."""
_FEW = 64
"""Memories of closed attempts that are kept in any case."""
KEPT = 1000
"""So many replies of an attempt are remembered; older ones are forgotten."""
KEPT_BYTES = 16 << 20
"""And so many bytes of them, as JSON, and of the conversations that they answered."""


KEPT_IN_ALL = 256 << 20
"""Bytes of memories that all attempts have together, and of replies that they keep for retries."""
NOT_KEPT = (
    f"agl keeps the last {KEPT} responses of an attempt in memory ({KEPT_BYTES >> 20} MiB at most, and "
    f"{KEPT_IN_ALL >> 20} MiB of all attempts), except those with 'store': false, and a restart forgets them."
)


@dataclass(slots=True, eq=False)
class _Remembered:
    """What is forgotten together: one reply, and the conversation up to it if a later request may continue that."""

    said: tuple[Any, ...]
    """Keys in `_own`."""
    message: Message
    """Of the first choice."""
    asked: frozenset[str]
    """Tool calls."""
    conversation: tuple[bytes, ...] | None
    """Keys in `_messages`."""
    size: int
    response: tuple[bytes, ...] = ()
    """Keys in `_messages`: the reply as its client got it, in two parts."""


@dataclass(slots=True, eq=False)
class _Shared:
    """A message of several conversations: each repeats the one before it."""

    message: Message
    size: int
    uses: int = 0


@dataclass(slots=True, eq=False)
class ReplyMemory:
    """The latest replies of one attempt. It lives as long as the attempt and the server's process."""

    _replies: dict[str, _Remembered] = field(default_factory=dict)
    _own: dict[Any, deque[Message]] = field(default_factory=dict)
    _asked: dict[str, set[str]] = field(default_factory=dict)
    """The replies that asked for each tool call: some endpoints count calls anew in each reply."""
    _messages: dict[bytes, _Shared] = field(default_factory=dict)
    size: int = 0
    """Bytes."""

    def add(self, reply: Reply, conversation: Sequence[Message] | None) -> None:
        """Remember a reply, and the conversation that it answers if a later request may continue it."""
        if reply.id in self._replies:  # Its client asked again.
            return
        own = [_echoed(choice.message) for choice in reply.choices]
        for message in own:
            self._own.setdefault(_key(message), deque()).append(message)
        asked = frozenset(call["id"] for message in own for call in message.get("tool_calls") or () if call.get("id"))
        for tool_call in asked:
            self._asked.setdefault(tool_call, set()).add(reply.id)
        known = None if conversation is None else tuple(self._share(each) for each in (*conversation, own[0]))
        size = sum(len(_text(message)) for message in own) + _REFERENCE * len(known or ())
        self._replies[reply.id] = _Remembered(tuple(map(_key, own)), own[0], asked, known, size)
        self.size += size
        self._bound()

    def keep(self, reply_id: str, response: Message) -> None:
        """Keep a reply as its client got it, if a later request may continue it."""
        kept = self._replies.get(reply_id)
        if kept is None or kept.conversation is None or kept.response:
            return
        echo = {name: response[name] for name in _ECHOED}  # These are the same in most replies of an agent.
        rest = {name: value for name, value in response.items() if name not in _ECHOED}
        kept.response = (self._share(echo), self._share(rest))
        self._bound()

    def response(self, reply_id: str) -> dict[str, Json] | None:
        """A reply as its client got it; None if there is no such reply, or it is forgotten."""
        kept = self._replies.get(reply_id)
        if kept is None or not kept.response:
            return None
        echo, rest = (self._messages[key].message for key in kept.response)
        return {**rest, **echo}

    def drop(self, reply_id: str) -> None:
        """Refuse to return or continue a reply from now on; its echoes are still known."""
        kept = self._replies[reply_id]
        self._release((*(kept.conversation or ()), *kept.response))
        kept.conversation, kept.response = None, ()

    def message(self, reply_id: str) -> Message | None:
        """The upstream's own message of a reply; None if there is no such reply, or it is forgotten."""
        kept = self._replies.get(reply_id)
        return None if kept is None else kept.message

    def _bound(self) -> None:
        while len(self._replies) > 1 and (len(self._replies) > KEPT or self.size > KEPT_BYTES):
            self._forget_oldest()

    def own(self, message: Message) -> Message:
        """The upstream's own message that an assistant message echoes; the message itself if it echoes none.

        It echoes a reply that says the same: the same text, and the same tools called by the same ids with equal
        arguments, however they are written.
        """
        for own in reversed(self._own.get(_key(message), ())):
            if _arguments(own) == _arguments(message):
                return own
        return message

    def reply_of(self, tool_call_id: str) -> str | None:
        """The id of the reply that asked for a tool call; None if none did, or several."""
        asked = self._asked.get(tool_call_id, ())
        return next(iter(asked)) if len(asked) == 1 else None

    def conversation(self, reply_id: str) -> tuple[Message, ...] | None:
        """All messages up to and with this reply; None if there is no such reply, or it is forgotten."""
        found = self._replies.get(reply_id)
        if found is None or found.conversation is None:
            return None
        return tuple(self._messages[key].message for key in found.conversation)

    def _share(self, message: Message) -> bytes:
        text = _text(message)
        key = blake2b(text, digest_size=16).digest()
        if key not in self._messages:
            self._messages[key] = _Shared(message, len(text))
            self.size += len(text)
        self._messages[key].uses += 1
        return key

    def _forget_oldest(self) -> None:
        reply_id = next(iter(self._replies))
        forgotten = self._replies.pop(reply_id)
        self.size -= forgotten.size
        for key in forgotten.said:
            self._own[key].popleft()
            if not self._own[key]:
                del self._own[key]
        for tool_call in forgotten.asked:
            self._asked[tool_call].discard(reply_id)
            if not self._asked[tool_call]:
                del self._asked[tool_call]
        self._release((*(forgotten.conversation or ()), *forgotten.response))

    def _release(self, keys: Sequence[bytes]) -> None:
        for shared in keys:
            self._messages[shared].uses -= 1
            if not self._messages[shared].uses:
                self.size -= self._messages.pop(shared).size


class _Total:
    """Bytes that are kept of several attempts, the one that was used last at the end."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[ActiveAttempt, int] = OrderedDict()
        self._size = 0

    def update(self, attempt: ActiveAttempt, size: int, most: int) -> Iterator[ActiveAttempt]:
        """Take note of what an attempt has now; yields those that are to have nothing any more, so that it is less."""
        self._size += size - self._sizes.pop(attempt, 0)
        self._sizes[attempt] = size
        while self._size > most and len(self._sizes) > 1:
            oldest, freed = self._sizes.popitem(last=False)
            self._size -= freed
            yield oldest

    def drop_closed(self) -> None:
        self._sizes = OrderedDict((attempt, size) for attempt, size in self._sizes.items() if not attempt.closed)
        self._size = sum(self._sizes.values())


class ReplyMemories:
    """The memories of the attempts that are open, and a bound for all that is kept of their replies."""

    def __init__(self) -> None:
        self._of: dict[ActiveAttempt, ReplyMemory] = {}
        self._limit = _FEW
        self._memories, self._exchanges = _Total(), _Total()

    def of(self, attempt: ActiveAttempt) -> ReplyMemory:
        """The memory of an attempt. Those of closed ones are dropped each time there are twice as many as were open."""
        memory = self._of.get(attempt)
        if memory is None:
            if len(self._of) >= self._limit:
                self._of = {other: kept for other, kept in self._of.items() if not other.closed}
                self._limit = max(_FEW, 2 * len(self._of))
                self._memories.drop_closed()
                self._exchanges.drop_closed()
            memory = self._of[attempt] = ReplyMemory()
        return memory

    def bound(self, attempt: ActiveAttempt) -> None:
        """After a reply: attempts that were not used for longest lose what is too much of all together.

        An echo is then translated anew, `previous_response_id` is refused, and a retry is a call of its own.
        """
        for other in self._memories.update(attempt, self.of(attempt).size, KEPT_IN_ALL):
            self._of.pop(other, None)
        for other in self._exchanges.update(attempt, attempt.retries.size, KEPT_IN_ALL):
            other.retries.forget()


def _echoed(message: Message) -> Message:
    """A reply's message as a request of a chat repeats it: without what is null or empty."""
    said = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {**said, "role": "assistant", "content": message.get("content")}


def _text(message: Message) -> bytes:
    return orjson.dumps(message, option=orjson.OPT_SORT_KEYS)


def _key(message: Message) -> Any:
    calls = tuple((call.get("id"), called(call)[0]) for call in message.get("tool_calls") or ())
    return message.get("content") or "", reasoning_of(message), calls


def _arguments(message: Message) -> list[Json]:
    return [_value(called(call)[1]) for call in message.get("tool_calls") or ()]


def _value(arguments: str) -> Json:
    try:
        return fields.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
