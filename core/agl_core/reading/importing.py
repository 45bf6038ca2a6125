"""`agl import`: recorded conversations, or exported episodes, become a run."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from agl_core import private
from agl_core.config import CONFIG_FILE
from agl_core.config.sections import FOLDER_NAME
from agl_core.errors import ConfigError, EpisodesError
from agl_core.store.interface import Record
from agl_core.store.sqlite import SqliteStore
from agl_core.training.server import first_free, removed_unless_begun
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    Episode,
    FinishReason,
    Json,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Task,
    ToolResult,
    Transition,
    TransitionKey,
)
from agl_core.types.forms import from_json

REWARD = "imported"
"""The source of the reward that a line of conversation names, and the split of its task without another."""
_KNOWN_KEYS = ("messages", "tools", "id", "split", "reward", "model")
_MAX_NAMED_LINES = 20
_BATCH = 2000
"""Records that are written together."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A run that was made of a file."""

    run: Path
    rollouts: int
    calls: int


def import_file(file: Path, name: str, runs: Path) -> Coroutine[Any, Any, Imported]:
    """Make the run `runs/NAME` (`NAME-2` and so on if it is taken) of a file, or of a folder that `agl export` made.

    Each line of the file is a conversation in OpenAI's chat format, a prompt and completion as TRL takes them, or an
    episode (`agl_core.save_episodes`, `agl export --to jsonl`). EpisodesError names each bad line, and then there is no
    run.
    """
    if not FOLDER_NAME.fullmatch(name):
        raise ConfigError(f"--name '{name}' cannot be a folder's name: use letters, digits, '.', '_' and '-'.")
    weights: Mapping[str, float] = {}
    if file.is_dir():
        weights = _reward_weights(file / "export.json")
        file = file / "episodes.jsonl"
    _check(file)
    return _write(file, runs / name, weights)


async def _write(file: Path, base: Path, weights: Mapping[str, float]) -> Imported:
    folder = first_free(base, lambda folder: None)
    described = {"file": str(file), "rewards": {source: {"weight": weight} for source, weight in weights.items()}}
    rollouts = calls = 0
    with removed_unless_begun(folder) as begun:
        async with SqliteStore(folder / "store.sqlite") as store:
            batch: list[Record] = [Run(folder.name, 0, time.time(), described)]
            for records in _Lines(file, folder.name).records():
                batch += records
                rollouts += 1
                calls += sum(isinstance(record, Call) for record in records)
                if len(batch) >= _BATCH:
                    await store.put(*batch)
                    batch = []
            await store.put(*batch)
        # The folder is a run once it has this file.
        private.write(folder / CONFIG_FILE, tomli_w.dumps({"config_version": 1, "capture": {"imported": str(file)}}))
        begun()
    return Imported(folder, rollouts, calls)


def _check(file: Path) -> None:
    """EpisodesError with each bad line."""
    lines = _Lines(file, "")
    good = sum(1 for _ in lines.records())
    if lines.bad:
        named = [f"line {number}: {problem}" for number, problem in lines.bad[:_MAX_NAMED_LINES]]
        if len(lines.bad) > _MAX_NAMED_LINES:
            named.append(f"and {len(lines.bad) - _MAX_NAMED_LINES} more")
        raise EpisodesError("\n  ".join([f"{file} has bad lines, so nothing was imported:", *named]))
    if not good:
        raise EpisodesError(f"{file} has no line: it must have one conversation or episode, as JSON, on each.")


def _reward_weights(about: Path) -> dict[str, float]:
    try:
        weights = json.loads(about.read_text())["reward_weights"]
        return {str(name): float(weight) for name, weight in weights.items()}
    except FileNotFoundError:
        raise EpisodesError(
            f"{about.parent} has no {about.name}, so `agl export --to jsonl` did not make it. Name a file instead."
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EpisodesError(f"{about} is not what `agl export` wrote ({error!r}). Export the run again.") from error


class _Lines:
    """The lines of a file as records, rollout by rollout; bad lines are kept with their numbers, and left out."""

    def __init__(self, file: Path, run: str) -> None:
        self._file, self._run = file, run
        self.bad: list[tuple[int, str]] = []
        self._line_of_rollout: dict[str, int] = {}
        self._members: Counter[tuple[str, str]] = Counter()

    def records(self) -> Iterator[list[Record]]:
        """The records of each good line."""
        try:
            with self._file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        try:
                            yield episode_records(self._episode(number, line), self._run)
                        except ValueError as error:
                            self.bad.append((number, str(error)))
        except OSError as error:
            raise EpisodesError(f"{self._file} cannot be read: {error.strerror}.") from error

    def _episode(self, number: int, line: bytes) -> Episode:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON ({error})") from None
        if not isinstance(data, dict):
            raise ValueError(f"must be a JSON object, not {type(data).__name__}")
        if "transitions" not in data:
            return self._conversation(number, _joined(data))
        episode = from_json(Episode, data)
        if episode.rollout in self._line_of_rollout:
            line_before = self._line_of_rollout[episode.rollout]
            raise ValueError(f"the rollout '{episode.rollout}' is that of line {line_before} too")
        self._line_of_rollout[episode.rollout] = number
        parts: list[TransitionKey | ToolResult | Reward] = [*episode.unjoined, *episode.rewards]
        for transition in episode.transitions:
            parts += [transition.key, *transition.tool_results, *transition.rewards]
        for part in parts:
            if (part.rollout, part.attempt) != (episode.rollout, episode.attempt):
                raise ValueError(f"the episode of '{episode.rollout}' has a part of '{part.rollout}'")
        return episode

    def _conversation(self, number: int, data: Mapping[str, Any]) -> Episode:
        if not isinstance(data.get("messages"), list):
            near = "; an exported table cannot be imported, episodes.jsonl can" if "rollout" in data else ""
            raise ValueError(
                f"has no list 'messages' of a conversation, no 'prompt' with 'completion', and no 'transitions' of an "
                f"episode{near}"
            )
        messages = [_message(at, message) for at, message in enumerate(data["messages"])]
        tools = data.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("'tools' must be a list of objects")
        task = _task(number, data, messages)
        replies = [
            at
            for at, message in enumerate(messages)
            if at and message["role"] == "assistant" and message.get("weight") != 0
        ]
        if not replies:
            raise ValueError("has no assistant message that follows another one, so there is nothing to record")
        rollout = f"{self._run}-{number}"
        sent = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        policy = str(data.get("model") or "unknown")
        transitions = [
            _transition(rollout, turn, sent[:at], sent[at], tools, policy) for turn, at in enumerate(replies)
        ]
        member = self._members[task.split, task.id]
        self._members[task.split, task.id] += 1
        reward = data.get("reward")
        return Episode(
            *(rollout, 0, task.id, member, task, Mode.EVAL_SAMPLED, Ending.FINISHED, tuple(transitions)),
            result=sent[replies[-1]].get("content"),
            rewards=() if reward is None else (Reward(rollout, 0, "reward", _number(reward), REWARD),),
        )


def episode_records(episode: Episode, run: str) -> list[Record]:
    """The records of an episode, from which `agl_core.learning.build_episode` makes the same one."""
    rollout, now = episode.rollout, time.time()
    records: list[Record] = [
        Rollout(
            *(rollout, run, 0, episode.group, episode.task, episode.mode, episode.step, episode.member),
            state=RolloutState.DONE,
            counted_attempt=episode.attempt,
            ending=episode.ending,
        ),
        Attempt(rollout, episode.attempt, REWARD, now, now, episode.ending, episode.result),
    ]
    by_call: dict[str, list[Transition]] = {}
    for transition in episode.transitions:
        by_call.setdefault(transition.key.call, []).append(transition)
    records += [_call(transitions, now) for transitions in by_call.values()]
    records += [tool_result for transition in episode.transitions for tool_result in transition.tool_results]
    records += [*episode.unjoined, *episode.rewards]
    return records + [reward for transition in episode.transitions for reward in transition.rewards]


def _call(choices: Sequence[Transition], now: float) -> Call:
    """The call of these transitions, one for each of its choices."""
    first = choices[0]
    return Call(
        *(first.key.call, first.key.rollout, first.key.attempt, first.turn, first.policy, first.version),
        request={"messages": list(first.messages), **({"tools": list(first.tools)} if first.tools else {})},
        choices=tuple(
            Choice(
                *(t.key.choice, t.response, t.finish_reason, t.response_ids, t.logprobs, t.mask),
                parse_error=t.parse_error,
            )
            for t in choices
        ),
        started=now,
        ended=now,
        agent=first.agent,
        parent_span=first.parent_span,
        prompt_ids=first.prompt_ids,
        effective=Sampling(temperature=first.temperature),
        prefix_broken=first.prefix_broken,
        state=first.state,
    )


def _transition(
    rollout: str,
    turn: int,
    prompt: Sequence[Mapping[str, Json]],
    reply: Mapping[str, Json],
    tools: Sequence[Mapping[str, Json]],
    policy: str,
) -> Transition:
    """One assistant message of a conversation, and what came before it."""
    name = reply.get("name")
    return Transition(
        key=TransitionKey(rollout, 0, f"{rollout}-c{turn}", 0),
        agent=name if isinstance(name, str) else None,
        turn=turn,
        agent_turn=turn,
        policy=policy,
        version=None,
        messages=tuple(prompt),
        response=reply,
        finish_reason=FinishReason.TOOL_CALLS if reply.get("tool_calls") else FinishReason.STOP,
        temperature=1.0,
        tools=tuple(tools),
    )


def _task(number: int, data: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> Task:
    task_id, split = data.get("id", number), data.get("split", REWARD)
    if not isinstance(task_id, str | int) or isinstance(task_id, bool):
        raise ValueError(f"'id' must be a text or an integer, not {task_id!r:.60}")
    if not isinstance(split, str):
        raise ValueError(f"'split' must be a text, not {split!r:.60}")
    question = next((message.get("content") for message in messages if message["role"] == "user"), None)
    return Task(str(task_id), question, split, {k: value for k, value in data.items() if k not in _KNOWN_KEYS})


def _joined(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """TRL's prompt and completion (as `agl export --to sft` writes them) as one conversation, whose prompt is given."""
    prompt, completion, tools = data.get("prompt"), data.get("completion"), data.get("tools")
    if not (isinstance(prompt, list) and isinstance(completion, list)):
        return data
    given = [{**message, "weight": 0} if isinstance(message, dict) else message for message in prompt]
    rest = {key: value for key, value in data.items() if key not in ("prompt", "completion")}
    if isinstance(tools, str):
        with suppress(ValueError):
            rest["tools"] = json.loads(tools)
    return {**rest, "messages": [*given, *completion]}


def _message(at: int, message: Any) -> Mapping[str, Json]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{at}] must be an object with a 'role', not {message!r:.60}")
    if message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls")):
        raise ValueError(f"messages[{at}] of the assistant has neither 'content' nor 'tool_calls'")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"messages[{at}].tool_calls must be a list of objects, not {calls!r:.60}")
    return message


def _number(value: Any) -> float:
    with suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(float(value)):
            return float(value)
    raise ValueError(f"'reward' must be a finite number, not {value!r:.60}")
