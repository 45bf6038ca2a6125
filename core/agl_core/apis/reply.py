"""Reads an upstream's reply into its record and the part that the agent may see."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import orjson
from msgspec import UNSET, Struct

from agl_core.apis.errors import ApiError
from agl_core.capture.requests import HEADER_IGNORED, HEADER_POLICY
from agl_core.types import Choice, FinishReason, Json, Logprobs, PrefixBreak, TokenMask, Tokens
from agl_core.types.forms import parse_json

_OPENAIS_WORDS = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter"})
"""Finish reasons that every client takes."""
_PROMPT_IDS = b'"prompt_token_ids":'
_LONG = 16 << 10
"""Bytes of a reply up to which parsing all of it is faster than finding what is new."""
_TOP = ("object", "created", "model", "usage", "system_fingerprint", "service_tier")


class _SentLogprob(Struct, gc=False):
    logprob: float | None = None


class _SentLogprobs(Struct):
    content: list[_SentLogprob] | None = None


class _SentChoice(Struct):
    message: dict[str, Json]
    index: int | None = None
    finish_reason: Json = None
    stop_reason: Json = None
    logprobs: _SentLogprobs | None = None
    token_ids: list[int] | None = None


class _ChoiceExtras(Struct):
    mask: list[bool] | None = None
    parse_error: str | None = None


class _Extras(Struct):
    """Fields that agl's own model servers add."""

    choices: Sequence[_ChoiceExtras] = ()
    version: int | None = None
    prefix_broken: Json = None
    prefilled: int = 0
    reused: int = 0


class _Sent(Struct):
    """The fields of a model server's reply that agl reads."""

    choices: list[_SentChoice]
    prompt_token_ids: list[int] | int | None = None
    usage: Json = UNSET
    object: Json = UNSET
    created: Json = UNSET
    model: Json = UNSET
    system_fingerprint: Json = UNSET
    service_tier: Json = UNSET
    prompt_logprobs: Json = None
    agl: _Extras | None = None


_NO_EXTRAS = _Extras()
_SENT, _IDS = msgspec.json.Decoder(_Sent), msgspec.json.Decoder(list[int])


class Usage(Struct, frozen=True):
    """Tokens of a call; `cached` is part of `prompt`."""

    prompt: int
    completion: int
    cached: int

    @classmethod
    def read(cls, usage: Json, prompt_ids: Any, sampled: int) -> Usage:
        """The model server's numbers, else the numbers of ids (None: unknown)."""
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("prompt_tokens_details")
        return cls(
            prompt=_count(usage.get("prompt_tokens"), 0 if prompt_ids is None else len(prompt_ids)),
            completion=_count(usage.get("completion_tokens"), sampled),
            cached=_count(details.get("cached_tokens") if isinstance(details, dict) else None, 0),
        )


class RawReply(Struct, frozen=True, eq=False):
    """An upstream's reply with status 200 as it came, and as it is kept: taken apart, it is a dozen objects."""

    body: bytes
    policy: str | None
    ignored: str | None
    reply_id: str
    logprobs: bool
    """True if the agent is to see log-probabilities."""

    def read(self, earlier: PromptIds | None = None) -> Reply:
        """Take it apart; ApiError 502 if it is no chat completion."""
        earlier = earlier or PromptIds()
        try:
            try:
                return _read(self, *earlier.parse(self.body))
            except orjson.JSONEncodeError:  # A number of more than 64 bits; too deep nesting raises again.
                return _read(self, *earlier.parse(orjson.dumps(parse_json(self.body))))
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise not_a_completion(error, self.body) from error


class Reply(Struct, frozen=True, eq=False):
    """A chat completion in vLLM's shape, taken apart."""

    raw: RawReply
    id: str
    """The call's id, on record and for the client."""
    completion: Mapping[str, Json]
    """The chat completion for the agent: without token ids and agl's extras."""
    choices: tuple[Choice, ...]
    prompt_ids: Tokens | None
    usage: Usage
    """The upstream's numbers, else counted ones; 0 if neither is known."""
    version: int | None
    """None if the upstream does not name it."""
    prefix_broken: PrefixBreak | None
    prefilled: int
    reused: int
    stop_sequence: str | None = None
    """The stop string that ended the first choice, if the upstream names it."""
    prompt_logprobs: Json = None


_NO_TOKENS: Tokens = np.empty(0, np.int32)


class PromptIds:
    """The prompt ids of an attempt's latest reply: if the next turn's begin with them, only added ones are parsed."""

    def __init__(self) -> None:
        self._text, self._ids = b"", _NO_TOKENS

    def parse(self, body: bytes) -> tuple[_Sent, Tokens | None]:
        key = body.find(_PROMPT_IDS) if len(body) > _LONG else -1
        start = key + len(_PROMPT_IDS)
        start += body.startswith(b" ", start)
        if key >= 0 and body.startswith(b"[", start):
            end = body.find(b"]", start)
            rest = _decode(b"%b-1%b" % (body[:start], body[end + 1 :]))
            if rest.prompt_token_ids == -1:  # Else it is another object's key.
                return rest, self._continue(body[start + 1 : end])
        sent = _decode(body)
        return sent, _ids(sent.prompt_token_ids)

    def _continue(self, text: bytes) -> Tokens:
        added = text.removeprefix(self._text)
        if len(added) == len(text) or added[:1] not in (b"", b","):
            ids = np.array(_IDS.decode(b"[%b]" % text), np.int32)
        else:
            ids = np.concatenate([self._ids, np.array(_IDS.decode(b"[0%b]" % added)[1:], np.int32)])
        self._text, self._ids = text, ids
        return ids


def read_reply(
    body: bytes, headers: Mapping[str, str], reply_id: str, *, logprobs: bool, earlier: PromptIds | None = None
) -> Reply:
    """Take apart a reply with status 200; ApiError 502 if it is no chat completion. `earlier`: of the same attempt."""
    return RawReply(body, headers.get(HEADER_POLICY), headers.get(HEADER_IGNORED), reply_id, logprobs).read(earlier)


def not_a_completion(error: Exception, body: bytes) -> ApiError:
    problem = f"is not a chat completion ({type(error).__name__}: {error}). It began with {body[:80]!r}."
    return ApiError(502, f"The model server's reply {problem}", type="upstream_error", code="upstream_garbage")


def _decode(body: bytes) -> _Sent:
    try:
        return _SENT.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _SENT.decode(orjson.dumps(parse_json(body)))  # parse_json reads halves of surrogate pairs.


def _read(raw: RawReply, sent: _Sent, prompt_ids: Tokens | None) -> Reply:
    if not sent.choices:
        raise ValueError("it has no choices")
    extras = sent.agl or _NO_EXTRAS
    choices = tuple([_choice(place, choice, extras, raw.reply_id) for place, choice in enumerate(sent.choices)])
    sampled = [0 if choice.response_ids is None else len(choice.response_ids) for choice in choices]
    usage = Usage.read(sent.usage, prompt_ids, sum(sampled))
    if all(sampled) and usage.completion > sum(sampled):
        choices = tuple(replace(choice, lacks_ids=True) for choice in choices)
    if sent.usage in (None, UNSET) and prompt_ids is not None and all(sampled):
        counted = {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion}
        sent.usage = {**counted, "total_tokens": sum(counted.values())}
    logprobs = (
        [own.get("logprobs") for own in parse_json(raw.body)["choices"]] if raw.logprobs else [None] * len(choices)
    )
    completion = {
        "id": raw.reply_id,
        **{name: value for name in _TOP if (value := getattr(sent, name)) is not UNSET},
        "choices": [
            {
                "index": choice.index,
                "message": choice.message,
                "logprobs": logprobs[place],
                "finish_reason": _shown(sent.choices[place].finish_reason, choice.finish_reason),
            }
            for place, choice in enumerate(choices)
        ],
    }
    orjson.dumps(completion)  # Raises if it is nested too deeply to be passed on.
    version, cause = raw.policy if extras.version is None else extras.version, extras.prefix_broken
    return Reply(
        raw=raw,
        id=raw.reply_id,
        completion=completion,
        choices=choices,
        prompt_ids=prompt_ids,
        usage=usage,
        version=None if version is None else int(version),
        prefix_broken=next((k for k in PrefixBreak if k == cause), PrefixBreak.OTHER) if cause else None,
        prefilled=extras.prefilled,
        reused=extras.reused,
        stop_sequence=_text(sent.choices[0].stop_reason),
        prompt_logprobs=sent.prompt_logprobs,
    )


def reasoning_of(message: Mapping[str, Json]) -> str | None:
    """The reasoning of a response, which older and newer vLLM name differently."""
    return _text(message.get("reasoning_content")) or _text(message.get("reasoning"))


def called(call: Mapping[str, Any]) -> tuple[str, str]:
    """A tool call's name, and its function's arguments or custom tool's input.

    >>> called({"type": "custom", "custom": {"name": "shell", "input": "ls"}})
    ('shell', 'ls')
    """
    if call.get("type") == "custom":
        return call["custom"]["name"], call["custom"]["input"]
    return call["function"]["name"], call["function"]["arguments"]


def _text(value: Json) -> str | None:
    return value if isinstance(value, str) else None


def _count(value: Json, default: int) -> int:
    return value if type(value) is int and value >= 0 else default


def _choice(place: int, sent: _SentChoice, extras: _Extras, reply_id: str) -> Choice:
    extra = extras.choices[place] if place < len(extras.choices) else _ChoiceExtras()
    message = _with_distinct_ids(_message(sent.message), f"call_{reply_id}_{place}")
    ids = _ids(sent.token_ids)
    calls_tools = bool(message.get("tool_calls") or message.get("function_call"))
    return Choice(
        index=place if sent.index is None else sent.index,
        message=message,
        finish_reason=FinishReason.read(sent.finish_reason, calls_tools=calls_tools),
        response_ids=ids,
        logprobs=_logprobs(sent.logprobs, ids),
        mask=_mask(extra.mask, ids),
        parse_error=extra.parse_error,
    )


def _with_distinct_ids(message: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """A message whose tool calls have distinct ids, by which agents join results to calls.

    >>> calls = [{"id": "c"}, {"id": "c"}, {"id": "d"}, {"id": None}]
    >>> [call["id"] for call in _with_distinct_ids({"tool_calls": calls}, "call")["tool_calls"]]
    ['c', 'c-1', 'd', 'call-3']
    """
    calls = message.get("tool_calls") or ()
    distinct: list[str] = []
    for place, call in enumerate(calls):
        distinct.append(distinct_id(call.get("id") or f"{prefix}-{place}", distinct))
    if distinct == [call.get("id") for call in calls]:
        return message
    return {**message, "tool_calls": [{**call, "id": own} for call, own in zip(calls, distinct, strict=True)]}


def distinct_id(id: str, others: Collection[str]) -> str:
    own, number = id, 0
    while own in others:
        number += 1
        own = f"{id}-{number}"
    return own


def _message(raw: dict[str, Json]) -> dict[str, Json]:
    """A message for OpenAI's clients: content is a text or null, arguments are texts."""
    message: dict[str, Any] = {"role": "assistant", **raw}
    if isinstance(message.get("content"), list):
        message |= joined_content(message["content"])
    if not isinstance(message.get("content"), str | None):
        raise TypeError("a message's content is no text")
    if message.get("tool_calls"):
        message["tool_calls"] = [_written(call) for call in message["tool_calls"]]
    return with_one_reasoning(message)


def with_one_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The same without `reasoning` if `reasoning_content` repeats it: clients would show both."""
    if message.get("reasoning_content") and message.get("reasoning"):
        del message["reasoning"]
    return message


def joined_content(parts: list[Any]) -> dict[str, str]:
    """The content, and reasoning and refusal if any, of a list of parts."""
    texts = {"text": "", "thinking": "", "refusal": ""}
    for part in parts:
        kind = part["type"]
        if kind not in texts or not isinstance(content := part[kind], str | list):
            raise TypeError(f"a message's content has a part of type {kind!r} that is no text")
        texts[kind] += content if isinstance(content, str) else joined_content(content)["content"]
    others = {"reasoning_content": texts["thinking"], "refusal": texts["refusal"]}
    return {"content": texts["text"]} | {name: text for name, text in others.items() if text}


def _written(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call whose arguments are a text; some servers send the object, or nothing if it is empty."""
    written = {"type": "function", **call}
    if written["type"] != "custom":
        passed = call["function"].get("arguments") or {}
        text = passed if isinstance(passed, str) else orjson.dumps(passed).decode()
        written["function"] = {**call["function"], "arguments": text}
    if not all(isinstance(text, str) for text in called(written)):
        raise TypeError("a tool call has no name or no input")
    return written


def _shown(word: Json, reason: FinishReason) -> str:
    """A finish reason for clients: the model server's own if it is one of OpenAI's."""
    if isinstance(word, str) and word in _OPENAIS_WORDS:
        return word
    return FinishReason.LENGTH.value if reason.is_cut else reason.value


def _ids(values: list[int] | int | None) -> Tokens | None:
    if isinstance(values, int):
        raise TypeError("token ids are no list")
    return None if values is None else np.array(values, np.int32)


def _logprobs(logprobs: _SentLogprobs | None, ids: Tokens | None) -> Logprobs | None:
    """None unless they belong one to one to the response's ids: better no value than a shifted one."""
    if logprobs is None or ids is None:
        return None
    values = [entry.logprob for entry in logprobs.content or ()]
    return None if len(values) != len(ids) or None in values else np.array(values, np.float32)


def _mask(values: list[bool] | None, ids: Tokens | None) -> TokenMask | None:
    if values is None or ids is None:
        return None
    if len(values) != len(ids):
        raise ValueError("a mask is not as long as its response")
    return np.array(values, np.bool_)
