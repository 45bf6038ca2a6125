"""What the model said in an attempt, so that what an agent echoes becomes the upstream's own message again.

Other APIs than chat completions write a reply in another form: arguments of tools as an object and not as text, no
content or an empty one. Translated back, such a message means the same, but it may be written otherwise, and then the
model server would not render it to the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from agl_core.server.attempts import ActiveAttempt
from agl_core.server.reply import Reply, reasoning_of
from agl_core.types import Json

Message: TypeAlias = Mapping[str, Json]
"""One message of a chat."""

_FEW = 64
"""Memories of closed attempts that are kept in any case."""
KEPT = 1000
"""So many conversations of an attempt can be continued by a reply's id; older ones are forgotten."""


@dataclass(slots=True, eq=False)
class ReplyMemory:
    """The replies of one attempt. It lives as long as the attempt and the server's process."""

    _own: dict[Any, list[Message]] = field(default_factory=dict)
    _asked: dict[str, str] = field(default_factory=dict)
    _conversations: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    _messages: dict[bytes, Message] = field(default_factory=dict)
    """Each message of the conversations once: a conversation repeats the one before it."""

    def add(self, reply: Reply, conversation: Sequence[Message] | None) -> None:
        """Remember a reply, and the conversation that it answers if a later request may continue it."""
        for choice in reply.choices:
            own = _echoed(choice.message)
            known = self._own.setdefault(_key(own), [])
            if own not in known:
                known.append(own)
            for call in own.get("tool_calls") or ():
                self._asked.setdefault(call.get("id"), reply.id)
        if conversation is not None:
            messages = (*conversation, _echoed(reply.choices[0].message))
            self._conversations[reply.id] = tuple(self._once(message) for message in messages)
            if len(self._conversations) > KEPT:
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
        """The id of the reply that asked for a tool call."""
        return self._asked.get(tool_call_id)

    def conversation(self, reply_id: str) -> tuple[Message, ...] | None:
        """All messages up to and with this reply; None if there is no such reply, or it is forgotten."""
        return self._conversations.get(reply_id)

    def _once(self, message: Message) -> Message:
        return self._messages.setdefault(orjson.dumps(message, option=orjson.OPT_SORT_KEYS), message)

    def _forget_oldest(self) -> None:
        del self._conversations[next(iter(self._conversations))]
        used = {id(message) for messages in self._conversations.values() for message in messages}
        self._messages = {text: message for text, message in self._messages.items() if id(message) in used}


class ReplyMemories:
    """The memories of the attempts that are open."""

    def __init__(self) -> None:
        self._of: dict[ActiveAttempt, ReplyMemory] = {}
        self._limit = _FEW

    def of(self, attempt: ActiveAttempt) -> ReplyMemory:
        """The memory of an attempt. Those of closed ones are dropped each time there are twice as many as were open."""
        memory = self._of.get(attempt)
        if memory is None:
            if len(self._of) >= self._limit:
                self._of = {other: kept for other, kept in self._of.items() if not other.closed}
                self._limit = max(_FEW, 2 * len(self._of))
            memory = self._of[attempt] = ReplyMemory()
        return memory


def _echoed(message: Message) -> Message:
    """A reply's message as a request of a chat repeats it: without what is null or empty."""
    said = {name: value for name, value in message.items() if value not in (None, [], {})}
    return {**said, "role": "assistant", "content": message.get("content")}


def _key(message: Message) -> Any:
    calls = tuple((call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or ())
    return message.get("content") or "", reasoning_of(message), calls


def _arguments(message: Message) -> list[Json]:
    return [_value(call["function"]["arguments"]) for call in message.get("tool_calls") or ()]


def _value(arguments: str) -> Json:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
