"""Sessions: what a rollout was answered, so that an echoed reply keeps the very tokens that were sampled.

A chat client sends the whole conversation anew each turn. Rendering and tokenising it again would often give other
tokens for the assistant's earlier replies than those that were sampled (spacing, JSON style, merges). So the prompt of
a later turn is built as: the recorded prompt's ids + the recorded response's ids + the ids of only what is new.
"""

from __future__ import annotations

import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agl_core.types import Tokens
from agl_torch.chat.formats import Parsed
from agl_torch.chat.messages import Message, call_ids, digests, meaning
from agl_torch.chat.text import ChatText


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A rendered conversation as the engine will feed it."""

    ids: Tokens
    text: str
    prefix_broken: bool
    """An earlier reply is echoed, but its recorded ids could not be used."""


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A recorded choice of a call."""

    meaning: str
    call_ids: tuple[str | None, ...]
    ids: Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A recorded call."""

    prompt_ids: Tokens
    text_length: int
    text_digest: bytes
    replies: tuple[Reply, ...]

    @property
    def nbytes(self) -> int:
        return self.prompt_ids.nbytes + sum(reply.ids.nbytes + len(reply.meaning) for reply in self.replies)


@dataclass(slots=True)
class Session:
    """The calls of one rollout, by what their prompts meant."""

    turns: dict[bytes, list[Turn]] = field(default_factory=dict)
    calls: int = 0
    nbytes: int = 0

    def add(self, digest: bytes, turn: Turn) -> None:
        self.turns.setdefault(digest, []).append(turn)
        self.nbytes += turn.nbytes

    def said(self, what: str) -> bool:
        """Whether some recorded reply means this."""
        return any(reply.meaning == what for turns in self.turns.values() for turn in turns for reply in turn.replies)


class Sessions:
    """The sessions of one model, the least recently used forgotten when there are too many.

    `max_bytes` bounds the recorded ids, `max_sessions` the number. Used from one thread.
    """

    def __init__(self, text: ChatText, *, max_sessions: int = 4096, max_bytes: int = 256 << 20) -> None:
        self._text, self._max_sessions, self._max_bytes = text, max_sessions, max_bytes
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._nbytes = 0

    def next_call(self, key: str) -> int:
        """Number the calls of a session: 0, 1, …"""
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        session.calls += 1
        return session.calls - 1

    def prompt(
        self,
        key: str | None,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any] | None,
        parse: Callable[[str], Parsed],
    ) -> Prompt:
        """Render and encode a conversation, with the recorded ids of replies that it echoes."""

        def render(count: int, prompt: bool) -> str:
            return self._text.render(messages[:count], tools=tools, prompt=prompt, options=options)

        full = render(len(messages), True)
        session = self._sessions.get(key) if key is not None else None
        if session is None:
            return Prompt(np.array(self._text.encode(full), np.int32), full, prefix_broken=False)
        found = digests(messages)
        broken = False
        for at in range(len(messages) - 1, 0, -1):
            if messages[at]["role"] != "assistant":
                continue
            turns = session.turns.get(found[at], [])
            for turn, reply in _echoed(turns, messages[at]):
                tail = self._tail(full, turn, reply, messages[at], functools.partial(render, at + 1, False), parse)
                if tail is not None:
                    ids = np.concatenate([turn.prompt_ids, reply.ids, np.array(tail, np.int32)])
                    return Prompt(ids, full, broken)
            # It continues a recorded call by something else, or says elsewhere what was said here.
            broken = broken or bool(turns) or session.said(meaning(messages[at]))
        return Prompt(np.array(self._text.encode(full), np.int32), full, broken)

    def _tail(
        self,
        full: str,
        turn: Turn,
        reply: Reply,
        message: Message,
        render: Callable[[], str],
        parse: Callable[[str], Parsed],
    ) -> list[int] | None:
        """Ids of what stands after the reply in `full`; None if the template writes prompt or reply otherwise now."""
        if _digest(full[: turn.text_length]) != turn.text_digest:
            return None
        upto = render()
        if not full.startswith(upto) or len(upto) <= turn.text_length:
            return None
        after = upto[turn.text_length :]
        last = int(reply.ids[-1]) if len(reply.ids) else -1
        ended = last in self._text.eos_ids
        ends = [(at, len(mark)) for mark in self._text.eos_texts if (at := after.rfind(mark)) >= 0]
        if ends:
            # A sampled end token stands for the one that the template writes; a reply cut short gets the template's.
            at, width = max(ends)
            written, begin = after[:at], at + width if ended else at
        else:
            written = after.rstrip()
            begin = len(written)
        if not _means(parse(written), message):
            return None
        rest = full[turn.text_length + begin :]
        return self._text.encode_after(last, rest) if ended else self._text.encode(rest)

    def record(
        self,
        key: str,
        messages: Sequence[Message],
        prompt: Prompt,
        replies: Sequence[tuple[Message, Tokens]],
    ) -> None:
        """Remember a call: its prompt, and each choice's normalised message and response ids."""
        session = self._sessions.setdefault(key, Session())
        turn = Turn(
            prompt_ids=prompt.ids,
            text_length=len(prompt.text),
            text_digest=_digest(prompt.text),
            replies=tuple(Reply(meaning(message), call_ids(message), ids) for message, ids in replies),
        )
        session.add(digests(messages)[-1], turn)
        self._nbytes += turn.nbytes
        self._sessions.move_to_end(key)
        while len(self._sessions) > self._max_sessions or (self._nbytes > self._max_bytes and len(self._sessions) > 1):
            _, forgotten = self._sessions.popitem(last=False)
            self._nbytes -= forgotten.nbytes


def _echoed(turns: Sequence[Turn], message: Message) -> list[tuple[Turn, Reply]]:
    """Recorded replies that say what `message` says: those with its call ids first, the newest first among them."""
    what, ids = meaning(message), call_ids(message)
    same = [(turn, reply) for turn in reversed(turns) for reply in turn.replies if reply.meaning == what]
    return sorted(same, key=lambda pair: pair[1].call_ids != ids)


def _means(written: Parsed, message: Message) -> bool:
    calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in written.calls]
    return meaning({"role": "assistant", "content": written.content, "tool_calls": calls}) == meaning(message)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
