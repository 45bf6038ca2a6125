"""Reads a streamed reply: its events, and the chat completion that they add up to."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agl_core.apis.reply import distinct_id, joined_content, not_a_completion, with_one_reasoning
from agl_core.types import Json
from agl_core.types.forms import parse_if_json

LAST_EVENT = b"[DONE]"
_TEXTS = frozenset({"content", "reasoning_content", "reasoning", "refusal"})
"""Fields of a message that come in pieces."""


class EventReader:
    """Splits an event stream into the data of its events, which may have several lines."""

    def __init__(self) -> None:
        self._rest = list[bytes]()
        """Pieces of an unfinished line."""
        self._data = list[bytes]()

    def feed(self, part: bytes) -> list[bytes]:
        """The data of the events that end with this part of the stream."""
        self._rest.append(part)
        if b"\n" not in part:
            return []
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest, events = [rest], list[bytes]()
        for line in lines:
            line = line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        return [event for event in events if event]

    def end(self) -> list[bytes]:
        """The data of an event that only the end of the stream ends, unless it is cut."""
        return [event for event in self.feed(b"\n\n") if event.endswith((b"}", LAST_EVENT))]


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    message: Mapping[str, Any]
    """Pieces of texts, and of `tool_calls`: each has its `index`, and id, type and name once."""
    logprobs: Sequence[Mapping[str, Any]] = ()
    token_ids: Any = ()
    """Some may be of text that comes later."""


class StreamedCompletion:
    """A chat completion in chunks. Tool calls get the ids of `read_reply` at once, as the client sees them first."""

    def __init__(self, reply_id: str) -> None:
        self.head: dict[str, Json] = {}
        """The fields beside the choices, so far."""
        self._choices: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, _StreamedCalls] = {}
        # Compact: as objects each token would take a kilobyte until the reply's end.
        self._logprobs: dict[int, bytearray] = {}
        self._ids: dict[int, array[int]] = {}
        self._reply_id = reply_id

    def add(self, chunk: Mapping[str, Any]) -> list[Delta]:
        """Additions by the next chunk; ApiError 502 if it is none."""
        try:
            self.head.update({k: v for k, v in chunk.items() if k != "choices" and v is not None})
            return [self._add(choice, choice.get("index", 0)) for choice in chunk.get("choices") or ()]
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise not_a_completion(error, repr(chunk).encode()) from error

    def end(self) -> list[Delta]:
        """Additions at the end: calls that waited, and `{}` for functions called without arguments."""
        deltas = []
        for index, calls in self._calls.items():
            for call in calls.all:
                if call.kind == "function" and not call.pieces:
                    calls.change(call)
                    call.add("{}")
            pieces = self._unsent(index, is_over=True)
            deltas += [Delta(index, {"tool_calls": pieces})] if pieces else []
        return deltas

    def whole(self) -> bytes:
        """The chat completion of all chunks; a choice without a finish reason was aborted."""
        choices = []
        for index, choice in sorted(self._choices.items()):
            texts = {name: "".join(pieces) for name, pieces in choice["message"].items() if name in _TEXTS}
            message = {**choice["message"], **texts}
            if calls := self._calls.get(index):
                message = {**message, "tool_calls": [call.whole() for call in calls.all]}
            message = {"role": "assistant", "content": None if message else "", **message}
            own: dict[str, Any] = {"finish_reason": "abort", **choice, "message": message}
            if index in self._logprobs:
                own["logprobs"] = {"content": orjson.Fragment(b"[" + self._logprobs[index][:-1] + b"]")}
            if index in self._ids:
                own["token_ids"] = self._ids[index].tolist()
            choices.append(own)
        # A copy, as it may be kept: orjson's own bytes take 4 to 8 KiB however few they are.
        return bytes(memoryview(orjson.dumps({**self.head, "object": "chat.completion", "choices": choices})))

    def _add(self, choice: Mapping[str, Any], index: int) -> Delta:
        is_first = index not in self._choices
        whole = self._choices.setdefault(index, {"index": index, "message": {}})
        delta = {name: value for name, value in (choice.get("delta") or {}).items() if value is not None}
        if isinstance(delta.get("content"), list):
            delta |= joined_content(delta["content"])
        for piece in delta.pop("tool_calls", ()):
            self._add_call(piece, index)
        delta.pop("role", None)
        delta = with_one_reasoning(delta)
        for name, value in delta.items():
            if name in _TEXTS and not isinstance(value, str):
                raise TypeError(f"the {name} of a delta is no text")
            if name not in _TEXTS:
                whole["message"][name] = _added(whole["message"].get(name), value)
            elif value:
                whole["message"].setdefault(name, []).append(value)
        logprobs, ids = (choice.get("logprobs") or {}).get("content"), choice.get("token_ids")
        if logprobs is not None:
            written = self._logprobs.setdefault(index, bytearray())
            for entry in logprobs:
                written += orjson.dumps(entry) + b","
        if ids is not None:
            self._ids.setdefault(index, array("q")).extend(ids)
        added_up = {"delta", "logprobs", "token_ids"}
        if whole.get("finish_reason") not in (None, "", "stop"):  # Some servers say `stop` behind `tool_calls`.
            added_up.add("finish_reason")
        whole.update({name: value for name, value in choice.items() if name not in added_up and value is not None})
        message = {"role": "assistant", "content": None, **delta} if is_first else delta
        if calls := self._unsent(index):
            message["tool_calls"] = calls
        return Delta(index, message, logprobs or (), ids or ())

    def _add_call(self, piece: Mapping[str, Any], choice: int) -> None:
        calls = self._calls.setdefault(choice, _StreamedCalls())
        own_id, number, kind = piece.get("id"), piece.get("index"), piece.get("type") or "function"
        written = piece.get(kind) or {}
        name, has_text = written.get("name"), bool(written.get("arguments") or written.get("input"))
        call = calls.under_way(own_id, number, name, has_text=has_text) or calls.begin(kind, number)
        calls.change(call, own_id)
        if name and not call.pieces and name != call.name:
            call.name += name
        text = (piece.get(call.kind) or {}).get(call.written) or ""
        call.add(text if isinstance(text, str) else orjson.dumps(text).decode())

    def _unsent(self, choice: int, *, is_over: bool = False) -> list[Mapping[str, Any]]:
        """Pieces of tool calls for the client: each call in its turn, its whole name first."""
        pieces, calls = list[Mapping[str, Any]](), self._calls.get(choice, _StreamedCalls())
        for place, call in sorted(calls.changed.items()):
            if not call.name or not (call.id or call.pieces or is_over or call is not calls.all[-1]):
                break  # The rest of its name may come.
            text = "".join(call.unsent)
            call.unsent.clear()
            del calls.changed[place]
            if call.id is None:
                call.id = distinct_id(call.own_id or f"call_{self._reply_id}_{choice}-{place}", calls.ids)
                calls.ids.add(call.id)
                pieces.append({"index": place, **call.whole()})
            elif text:
                pieces.append({"index": place, call.kind: {call.written: text}})
        return pieces


def _added(before: Any, piece: Any) -> Any:
    """A field of pieces: texts and lists are joined, and so are the fields of objects (OpenAI's `function_call`)."""
    if isinstance(before, dict) and isinstance(piece, dict):
        return {**before, **{name: _added(before.get(name), value) for name, value in piece.items()}}
    joined = isinstance(before, str | list) and type(before) is type(piece)
    return before + piece if joined else piece


@dataclass(slots=True, eq=False)
class _StreamedCall:
    kind: str
    number: int | None
    """The model server's index."""
    place: int
    own_id: str | None = None
    """The model server's id."""
    id: str | None = None
    """The client's id; set once the name is sent."""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    unsent: list[str] = field(default_factory=list)

    @property
    def written(self) -> str:
        """The field of its arguments."""
        return "input" if self.kind == "custom" else "arguments"

    def goes_on(self, own_id: str | None, number: int | None, name: str | None, *, has_text: bool) -> bool:
        """True if a piece with these belongs to this call."""
        if number not in (None, self.number):
            return False
        if own_id and self.own_id and (name or number is None):
            return own_id == self.own_id
        if name and self.pieces and not own_id:
            return name == self.name and not (has_text and self.is_whole)
        return number is not None or not name

    @property
    def is_whole(self) -> bool:
        """True if its arguments are a JSON object."""
        return self.pieces[-1].rstrip().endswith("}") and isinstance(parse_if_json("".join(self.pieces)), dict)

    def add(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.unsent.append(text)

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": self.kind,
            self.kind: {"name": self.name or None, self.written: "".join(self.pieces)},
        }


class _StreamedCalls:
    def __init__(self) -> None:
        self.all = list[_StreamedCall]()
        self.changed = dict[int, _StreamedCall]()
        """Calls with something that the client has not got yet, by their places."""
        self.ids = set[str]()
        self._by_id = dict[str, _StreamedCall]()
        self._by_number = dict[int | None, _StreamedCall]()

    def under_way(
        self, own_id: str | None, number: int | None, name: str | None, *, has_text: bool
    ) -> _StreamedCall | None:
        """The call to which a piece with these belongs; None: it begins one.

        A name with a new id begins a call, since some servers leave the index out, or send 0 for each call; so does a
        name without an id behind whole arguments. An id alone does not, as older vLLM makes one up for each piece.
        """
        named = self._by_id.get(own_id or "")
        if named is not None and number in (None, named.number):
            return named
        last = self._by_number.get(number) if number is not None else self.all[-1] if self.all else None
        return last if last is not None and last.goes_on(own_id, number, name, has_text=has_text) else None

    def begin(self, kind: str, number: int | None) -> _StreamedCall:
        call = self._by_number[number] = _StreamedCall(kind, number, len(self.all))
        self.all.append(call)
        return call

    def change(self, call: _StreamedCall, own_id: str | None = None) -> None:
        """Note that a call has something new; its first id stays."""
        self.changed[call.place] = call
        if own_id and not call.own_id:
            call.own_id = own_id
            self._by_id[own_id] = call
