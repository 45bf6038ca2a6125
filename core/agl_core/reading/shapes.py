"""The forms of recorded conversations that people have: each row as conversations in OpenAI's chat format."""

from __future__ import annotations

import json
import re
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
_PROMPTS = ("prompt", "question", "instruction", "messages", "conversations", "conversation")
_CHATS = _PROMPTS[3:]
"""Keys of prompts, and those that may hold whole conversations."""
_TASK = (
    "is a task and no conversation; train on it with [tasks.train] source = 'jsonl', which needs the key `input` or "
    "the name of another, for instance columns = { input = 'question' } (docs/data.md)"
)
_FORMS: dict[tuple[str, ...], str] = {
    ("functions",): "is OpenAI's old form of `tools`",
    ("rejected_response",): "is ms-swift's form of preferences; write `prompt`, `chosen` and `rejected`",
    **{(prompt, "chosen", "rejected"): "" for prompt in _PROMPTS},
    ("chosen", "rejected"): "",
    **{(chat,): "" for chat in _CHATS},
    ("prompt", "completion"): "",
    ("prompt", "response"): "",
    ("question", "response"): "",
    ("instruction", "output"): "",
    ("preferred_output",): "is OpenAI's form of preferences; write `prompt` (input.messages), `chosen`, `rejected`",
    ("instruction", "response"): "beside `response` is Dolly's form; write `instruction`, `input` and `output`",
    ("contents",): "is Gemini's form; write `messages` in OpenAI's chat format",
    ("role", "content"): "is that of one message; a row has all of a conversation, as a list or in `messages`",
    ("text",): "is a text without roles, of which no reply can be told apart; keep the messages it was made of",
    ("rejected",): "has no `chosen` beside `rejected`",
    ("chosen",): "has no `rejected` beside `chosen`",
    ("completions",): "has several completions of a prompt; write a row for each, with `reward`",
    ("responses",): "has several responses to a prompt; write a row for each, as `prompt`, `completion` and `reward`",
    **{(task,): _TASK for task in ("question", "input", "prompt")},
}
"""Each form by the keys that tell it, and why it is not read. The first one that fits counts."""
_LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "yes": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0, "no": 0.0}
"""Rewards of KTO's labels, as JSON and CSV files write them."""


def conversations_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row as conversations: each has `messages`, perhaps `tools`, `id` and `reward`, and the row's other keys.

    A pair of preferences is two, with the reward 1 and 0. Replies in a prompt, and those that both of a pair share,
    have the weight 0. ValueError names a form that is not read.
    """
    rest = {key: value for key, value in row.items() if value is not None}
    keys = next((keys for keys in _FORMS if rest.keys() >= set(keys)), ())
    if not keys:
        raise ValueError(
            f"its keys ({', '.join(map(str, rest)) or 'none'}) are none that are read: messages, conversations, prompt "
            f"and completion, instruction and output, chosen and rejected, transitions (docs/data.md)"
        )
    if _FORMS[keys]:
        raise ValueError(f"'{keys[0]}' {_FORMS[keys]}")
    if isinstance(tools := rest.get("tools"), str):
        rest["tools"] = _parsed("tools", tools)
    system = _said("system", rest.pop("system", None) or rest.pop("system_prompt", None))
    prompt = _prompt(rest, keys[0]) if keys[0] in _PROMPTS else []
    whole = [_after(prompt, rest.pop(name), name) for name in keys if name not in _PROMPTS] or [prompt]
    start, marks = len(prompt) if keys[0] == "prompt" else 0, list[dict[str, Any]]([{}])
    if len(whole) == 2:
        start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*whole, strict=False)))
        marks = [{"reward": reward, "reward_name": PREFERENCE} for reward in (1.0, 0.0)]
    elif label := next((name for name in ("label", "kto_tag") if name in rest), None):
        start = max((at for at, message in enumerate(whole[0], 1) if message.get("role") == "user"), default=0)
        wanted = str(rest.pop(label)).strip().lower()
        if wanted not in _LABELS:
            raise ValueError(f"'{label}' is '{wanted}', which does not say whether the reply is wanted (KTO)")
        asked = json.dumps([system, whole[0][:start]], sort_keys=True)  # The replies to it are compared.
        marks = [{"reward": _LABELS[wanted]}]
        rest.setdefault("id", blake2b(asked.encode(), digest_size=8).hexdigest())
    return [
        {**rest, **mark, "messages": ([] if messages[:1] == system else system) + _from(messages, start)}
        for messages, mark in zip(whole, marks, strict=True)
    ]


def _prompt(rest: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """What is said before the reply, or the whole conversation, taken out of a row."""
    if key != "instruction":
        return _messages(rest.pop(key), key, None if key in _CHATS else "user")
    asked = "\n\n".join(str(text) for name in (key, "input") if (text := rest.pop(name, None)))
    turns = [_said(r, t) for q, a in rest.pop("history", ()) for r, t in (("user", q), ("assistant", a))]
    return [*(message for turn in turns for message in turn), *_said("user", asked)]


def _said(role: str, text: object) -> list[dict[str, Any]]:
    return [{"role": role, "content": text}] if text else []


def _from(messages: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The messages; those before the position are prompt only."""
    return [{**m, "weight": 0} if n < start and m.get("role") == "assistant" else m for n, m in enumerate(messages)]


def _after(prompt: list[dict[str, Any]], reply: object, name: str) -> list[dict[str, Any]]:
    """The whole conversation: a reply that does not begin with the assistant is one already."""
    if isinstance(reply, str) and not reply.strip():
        raise ValueError(f"'{name}' is an empty text; leave the row out")
    messages = _messages(reply, name, "assistant")
    return [*prompt, *messages] if messages and messages[0].get("role") == "assistant" else messages


def _messages(value: object, name: str, role: str | None = None) -> list[dict[str, Any]]:
    """Messages with OpenAI's roles and keys. A text is one by `role`, several as HH-RLHF writes them, or JSON."""
    if isinstance(value, str):
        if value.startswith("\n\nHuman:"):
            turns = re.findall(r"\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)", value, re.DOTALL)
            value = [{"from": who.lower(), "value": text.strip()} for who, text in turns if text.strip()]
        elif role is not None:
            return [{"role": role, "content": value}]
        else:
            value = _parsed(name, value)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, Sequence) or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f"{name}: must be a list of messages")
    return [_message(message) for message in value]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """One message; ShareGPT has `from` and `value`, and a tool call as text."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if "function_call" in kept:
        raise ValueError("a message has 'function_call', OpenAI's old form of `tool_calls`")
    if False in [kept.pop(mark) for mark in ("train", "training", "loss") if mark in kept]:
        kept["weight"] = 0
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


def _parsed(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"{name}: is a text that is not JSON") from None
