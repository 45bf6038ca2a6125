"""Files of conversations, in the forms that people have, and of episodes: to train on, or as a run (`agl import`)."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from agl_core.errors import EpisodesError
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.store import Record
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    Episode,
    FinishReason,
    Mode,
    RecordedRollout,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Task,
    Transition,
    derived,
)
from agl_core.types.forms import from_json
from agl_server.reading.files import is_recording, read_rows
from agl_server.reading.runs import PREFERENCES, check_name, write_capture
from agl_server.store.sqlite import SqliteStore
from agl_server.training.run import first_free, removed_unless_begun

IMPORTED = "imported"
"""The source of rewards that a line names, and the split of its task without another."""
PREFERENCE = "preference"
"""The name of the reward that says which of a pair of conversations is the better one."""
_MAX_NAMED_ROWS = 20
_BATCH = 2000
"""Records that are written together."""
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


@dataclass(frozen=True, slots=True)
class ImportSummary:
    run: Path
    rollouts: int
    calls: int


def import_file(file: Path, name: str, runs: Path) -> ImportSummary:
    """Make the run `runs/NAME` (or `NAME-2`, …) of a file; if rows are bad, none: EpisodesError names each."""
    return asyncio.run(_import(file, runs / check_name(name)))


async def _import(file: Path, base: Path) -> ImportSummary:
    folder = first_free(base, lambda folder: None)
    rollouts = calls = 0
    has_preferences = False
    with removed_unless_begun(folder) as begun:
        async with SqliteStore(folder / "store.sqlite") as store:
            batch: list[Record] = [Run(folder.name, 0, time.time(), {"file": str(file)})]
            for _, _, recorded in _rollouts_in(file, folder.name):
                batch += recorded.records
                rollouts += 1
                calls += len(recorded.calls)
                has_preferences |= _is_preferred(recorded)
                if len(batch) >= _BATCH:
                    await store.put(*batch)
                    batch = []
            await store.put(*batch)
        write_capture(folder, {"imported": str(file), PREFERENCES: has_preferences})
        begun()
    return ImportSummary(folder, rollouts, calls)


class RecordedFile:
    """The rollouts of a file, to train on. Its rows stay in memory as text, and are read when they are asked for."""

    def __init__(self, file: Path) -> None:
        """Read it once, to see what there is. EpisodesError names each bad row."""
        self.rollouts: list[Rollout] = []
        self.has_preferences = False
        self._rows: dict[str, tuple[int, Any]] = {}
        for number, row, recorded in _rollouts_in(file, IMPORTED):
            self.rollouts.append(recorded.rollout)
            self.has_preferences |= _is_preferred(recorded)
            self._rows[recorded.rollout.id] = number, row

    async def read(self, rollouts: Sequence[Rollout]) -> list[RecordedRollout]:
        return [
            replace(recorded, rollout=rollout)
            for rollout in rollouts
            for recorded in _rollouts_of(*self._rows[rollout.id], IMPORTED, Counter())
            if recorded.rollout.id == rollout.id
        ]


def _is_preferred(recorded: RecordedRollout) -> bool:
    return any(reward.name == PREFERENCE for reward in recorded.rewards)


def _rollouts_in(file: Path, run: str) -> Iterator[tuple[int, Any, RecordedRollout]]:
    """Each rollout of a file with its row, and the row's number among all. EpisodesError at the end names bad rows."""
    if not is_recording(file):
        raise EpisodesError(f"{file} is no file, and no folder of a saved dataset.")
    bad: list[str] = []
    places: dict[str, str] = {}
    members: Counter[tuple[str, str]] = Counter()
    for number, (place, row) in enumerate(read_rows(file), 1):
        try:
            for recorded in _rollouts_of(number, row, run, members):
                id = recorded.rollout.id
                if id in places:
                    raise ValueError(f"the rollout '{id}' is that of {places[id]} too")
                places[id] = place
                if not bad:
                    yield number, row, recorded
        except ValidationError as error:
            wrong = error.errors()[0]
            bad.append(f"{place}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")
        except (ValueError, RecursionError) as error:
            bad.append(f"{place}: {error}")
    if bad:
        more = [f"and {len(bad) - _MAX_NAMED_ROWS} more"] if len(bad) > _MAX_NAMED_ROWS else []
        heading = f"{file} has bad rows, so nothing was imported:"
        raise EpisodesError("\n  ".join([heading, *bad[:_MAX_NAMED_ROWS], *more]))
    if not places:
        raise EpisodesError(
            f"{file} has no row: it must have conversations or episodes, for instance one on each line."
        )


def _rollouts_of(number: int, row: Any, run: str, members: Counter[tuple[str, str]]) -> list[RecordedRollout]:
    """The rollouts of a row: two of a pair. `members` counts each task's so far. ValueError says what is wrong."""
    data = json.loads(row) if isinstance(row, str) else row
    if isinstance(data, list):
        data = {"messages": data}
    if not isinstance(data, dict):
        raise ValueError("must be a JSON object, or a list of messages")
    if "transitions" in data:
        return [_of_episode(from_json(Episode, data), run)]
    conversations = _conversations_of(data)
    numbers = [f"{number}"] if len(conversations) == 1 else [f"{number}-{n}" for n in range(len(conversations))]
    return [
        _of_conversation(f"{run}-{n}", run, number, conversation, members)
        for n, conversation in zip(numbers, conversations, strict=True)
    ]


def _conversations_of(row: Mapping[str, Any]) -> list[_Conversation]:
    """The conversations of a row, each with the row's other keys.

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
        _Conversation.model_validate(
            {**rest, **mark, "messages": ([] if messages[:1] == system else system) + _from(messages, start)}
        )
        for messages, mark in zip(whole, marks, strict=True)
    ]


def _prompt(rest: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The messages before the reply, or the whole conversation, taken out of a row."""
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


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    tool_calls: list[dict[str, Any]] | None = None
    weight: float | None = None
    """0: it is part of prompts only."""


class _Conversation(BaseModel):
    """A conversation in OpenAI's chat format; keys that are not here are the task's metadata."""

    model_config = ConfigDict(extra="allow")

    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    id: StrictStr | StrictInt | None = None
    split: str = IMPORTED
    reward: float | None = Field(None, allow_inf_nan=False, strict=True)
    reward_name: str = "reward"
    model: str = "unknown"


def _of_conversation(
    id: str, run: str, number: int, line: _Conversation, members: Counter[tuple[str, str]]
) -> RecordedRollout:
    """A conversation, in which each assistant message is a call."""
    messages = [message.model_dump(exclude={"weight"}, exclude_unset=True) for message in line.messages]
    replies = [
        at for at, message in enumerate(line.messages) if at and message.role == "assistant" and message.weight != 0
    ]
    if not replies:
        raise ValueError("has no assistant message that follows another one, so there is nothing to record")
    if not all(messages[at].get("content") or messages[at].get("tool_calls") for at in replies):
        raise ValueError("an assistant message has neither 'content' nor 'tool_calls'")
    question = next((message.get("content") for message in messages if message["role"] == "user"), None)
    now, offered = time.time(), {"tools": line.tools} if line.tools else {}
    task = Task(str(number if line.id is None else line.id), question, line.split, dict(line.model_extra or {}))
    member = members[task.split, task.id]
    members[task.split, task.id] += 1
    calls = [
        Call(
            id=f"{id}-c{turn}",
            rollout=id,
            attempt=0,
            sequence=turn,
            policy=line.model,
            version=None,
            request={"model": line.model, "messages": messages[:at], **offered},
            choices=(Choice(0, reply, FinishReason.read(None, calls_tools=bool(reply.get("tool_calls")))),),
            started=now,
            ended=now,
            agent=name if isinstance(name := reply.get("name"), str) else None,
        )
        for turn, at in enumerate(replies)
        for reply in [messages[at]]
    ]
    result, ending = messages[replies[-1]].get("content"), Ending.FINISHED
    rewards = () if line.reward is None else (Reward(id, 0, line.reward_name, line.reward, IMPORTED),)
    rollout = Rollout(id, run, 0, task.id, task, Mode.EVAL_SAMPLED, 0, member, RolloutState.DONE, 0, ending)
    attempt = Attempt(id, 0, IMPORTED, now, now, ending, result)
    return RecordedRollout(rollout, attempt, calls, (), rewards, terminal=line.reward)


def _of_episode(episode: Episode, run: str) -> RecordedRollout:
    """An episode, as `agl_core.learning.transitions.build_episode` makes it again. ValueError if a part is of another.

    A reward `rest` makes up the difference if the terminal reward is not the plain sum of what the rules gave.
    """
    id, attempt, now = episode.rollout, episode.attempt, time.time()
    tool_results = [*(result for t in episode.delivered for result in t.tool_results), *episode.unjoined]
    rewards = [*episode.rewards, *(reward for t in episode.transitions for reward in t.rewards)]
    parts: list[Any] = [*(t.key for t in episode.delivered), *tool_results, *rewards]
    for part in parts:
        if (part.rollout, part.attempt) != (id, attempt):
            raise ValueError(f"the episode of '{id}' has a part of '{part.rollout}'")
    plain_sum = math.fsum(reward.value for reward in episode.rewards if reward.source != AGENT_SOURCE)
    if episode.terminal is not None and not math.isclose(episode.terminal, plain_sum, abs_tol=1e-9):
        rewards.append(Reward(id, attempt, "rest", episode.terminal - plain_sum, IMPORTED))
    by_call: dict[str, list[Transition]] = {}
    for transition in episode.delivered:
        by_call.setdefault(transition.key.call, []).append(transition)
    calls = [_call(choices, now) for choices in by_call.values()]
    done = {"state": RolloutState.DONE, "counted_attempt": attempt}
    rollout = derived(Rollout, episode, id=id, run=run, restart=0, **done)
    ended = Attempt(id, attempt, IMPORTED, now, now, episode.ending, episode.result)
    return RecordedRollout(rollout, ended, calls, tool_results, rewards, terminal=episode.terminal)


def _call(choices: Sequence[Transition], now: float) -> Call:
    """The call of these transitions, one for each of its choices."""
    first = choices[0]
    return derived(
        Call,
        first,
        id=first.key.call,
        rollout=first.key.rollout,
        attempt=first.key.attempt,
        sequence=first.turn,
        request={"messages": list(first.messages), **({"tools": list(first.tools)} if first.tools else {})},
        choices=tuple(derived(Choice, t, index=t.key.choice, message=t.response) for t in choices),
        started=now,
        ended=now,
        effective=Sampling(temperature=first.temperature),
    )
