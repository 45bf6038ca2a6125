"""The shapes of recorded conversations that people have: each row as conversations in OpenAI's chat format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

PREFERENCE = "preference"
"""The name of the reward that says which of a pair of conversations is the better one."""

_ROLES = {
    "user": ("human", "prompter", "question"),
    "assistant": ("gpt", "model", "bot", "chatgpt", "bard", "bing", "answer", "function_call", "tool_call"),
    "tool": ("observation", "function_response", "function", "ipython"),
    "system": (),
}
"""OpenAI's roles, and what ShareGPT files call them."""
_ROLE_OF = {name: role for role, names in _ROLES.items() for name in (role, *names)}
_KNOWN = (
    "messages (OpenAI's chat format), conversations (ShareGPT), instruction and output (Alpaca), prompt and completion "
    "(with label: KTO), chosen and rejected (preferences), transitions (episodes)"
)
_OTHERS = {
    "text": "is a text without roles, of which no reply can be told apart; keep the messages it was made of",
    "rejected": "has no `chosen` beside `rejected`",
    "chosen": "has no `rejected` beside `chosen`",
    "completions": "has several completions of a prompt; write a row for each, with `reward`",
    "responses": "has several responses to a prompt; write a row for each, as `prompt`, `completion` and `reward`",
    "question": "is a task and no conversation; train on it with [tasks.train] source = 'jsonl' (docs/data.md)",
    "input": "is a task and no conversation; train on it with [tasks.train] source = 'jsonl' (docs/data.md)",
    "prompt": "is a task and no conversation; train on it with [tasks.train] source = 'jsonl' (docs/data.md)",
}
"""Forms that are recognised and not read, by a key of theirs, and why."""


def conversations_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row as conversations: each has `messages`, perhaps `tools`, `id` and `reward`, and the row's other keys.

    A pair of preferences is two, with the reward 1 and 0. Replies in a prompt, and those that both of a pair share,
    have the weight 0. ValueError names a form that is not read.
    """
    rest = {key: value for key, value in row.items() if value is not None}
    if isinstance(tools := rest.get("tools"), str):
        rest["tools"] = _parsed("tools", tools)
    if "messages" in rest:
        return [{**rest, "messages": _messages(rest["messages"], "messages")}]
    if (name := next((name for name in ("conversations", "conversation") if name in rest), None)) is not None:
        messages = _messages(rest.pop(name), name)
        system = rest.pop("system", None)
        return [{**rest, "messages": [*_said("system", system), *messages]}]
    if "chosen" in rest and "rejected" in rest:
        prompt = _messages(rest.pop("prompt", None) or [], "prompt", "user")
        both = [_after(prompt, rest.pop(name), name) for name in ("chosen", "rejected")]
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*both, strict=False)))
        return [
            {**rest, "messages": _from(messages, shared), "reward": reward, "reward_name": PREFERENCE}
            for messages, reward in zip(both, (1.0, 0.0), strict=True)
        ]
    if "prompt" in rest and "completion" in rest:
        prompt = _messages(rest.pop("prompt"), "prompt", "user")
        messages = _from(_after(prompt, rest.pop("completion"), "completion"), len(prompt))
        if "label" in rest:  # KTO: whether a reply is wanted; the replies to a prompt are compared.
            digest = blake2b(json.dumps(prompt, sort_keys=True).encode(), digest_size=8).hexdigest()
            rest = {"id": digest, **rest, "reward": float(_label(rest.pop("label")))}
        return [{**rest, "messages": messages}]
    if "instruction" in rest and "output" in rest:
        asked = "\n\n".join(str(text) for name in ("instruction", "input") if (text := rest.pop(name, None)))
        turns = [_said(r, t) for q, a in rest.pop("history", ()) for r, t in (("user", q), ("assistant", a))]
        system, output = rest.pop("system", None), rest.pop("output")
        messages = [*_said("system", system), *(m for turn in turns for m in turn), *_said("user", asked)]
        return [{**rest, "messages": [*messages, *_said("assistant", output)]}]
    if (key := next((key for key in _OTHERS if key in rest), None)) is not None:
        raise ValueError(f"'{key}' {_OTHERS[key]}")
    raise ValueError(f"its keys ({', '.join(map(str, rest)) or 'none'}) are none that are read: {_KNOWN}")


def _said(role: str, text: object) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if text else []


def _from(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The messages; those before the position are prompt only."""
    return [{**m, "weight": 0} if n < start and m["role"] == "assistant" else m for n, m in enumerate(messages)]


def _after(prompt: list[dict[str, Any]], reply: object, name: str) -> list[dict[str, Any]]:
    """The whole conversation: a reply that does not begin with the assistant is one already."""
    messages = _messages(reply, name, "assistant")
    return [*prompt, *messages] if messages and messages[0]["role"] == "assistant" else messages


def _messages(value: object, name: str, role: str | None = None) -> list[dict[str, Any]]:
    """Messages with OpenAI's roles and keys. A text is one by `role`, or JSON of several."""
    if isinstance(value, str):
        if role is not None:
            return [{"role": role, "content": value}]
        value = _parsed(name, value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"{name}: must be a list of messages")
    return [_message(message) for message in value]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message; ShareGPT has `from` and `value`, and a tool call as text."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "from" not in kept and "role" not in kept:
        return kept
    named = str(kept.pop("from", kept.get("role")))
    said = {"content": kept.pop("value")} if "value" in kept else {}
    if named in ("function_call", "tool_call"):
        function = _parsed(named, str(said.get("content")))
        calls = function if isinstance(function, list) else [function]
        said = {"content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}
    result = {**kept, **said, "role": _ROLE_OF.get(named, named)}
    if isinstance(result.get("tool_calls"), Sequence):
        result["tool_calls"] = [_tool_call(n, call) for n, call in enumerate(result["tool_calls"])]
    return result


def _tool_call(number: int, call: Any) -> Any:
    """A tool call with its arguments as text, and an id."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": f"call_{number}", "type": "function", **call, "function": {**function, "arguments": text}}


def _label(value: object) -> bool:
    """Whether a reply is wanted, as JSON or a CSV file says it."""
    return str(value).strip().lower() in ("true", "1", "1.0", "yes")


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{name}: is a text that is not JSON") from None
