"""Files of conversations and of episodes, as recorded rollouts: to train on them, or to make a run (`agl import`)."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from agl_core.errors import EpisodesError
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.reading.files import is_recording, read_rows
from agl_core.reading.runs import PREFERENCES, check_name, write_capture
from agl_core.reading.shapes import PREFERENCE, conversations_of
from agl_core.store.interface import Record
from agl_core.store.sqlite import SqliteStore
from agl_core.training.run import first_free, removed_unless_begun
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

IMPORTED = "imported"
"""The source of rewards that a line names, and the split of its task without another."""
_MAX_NAMED_ROWS = 20
_BATCH = 2000
"""Records that are written together."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A run that was made of a file."""

    run: Path
    rollouts: int
    calls: int


def import_file(file: Path, name: str, runs: Path) -> Imported:
    """Make the run `runs/NAME` (`NAME-2` and so on if it is taken) of a file.

    EpisodesError names each bad row, and then there is no run.
    """
    return asyncio.run(_import(file, runs / check_name(name)))


async def _import(file: Path, base: Path) -> Imported:
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
    return Imported(folder, rollouts, calls)


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
        """These of its rollouts, with what was recorded of them."""
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
    conversations = conversations_of(data)
    numbers = [f"{number}"] if len(conversations) == 1 else [f"{number}-{n}" for n in range(len(conversations))]
    return [
        _of_conversation(f"{run}-{n}", run, number, conversation, members)
        for n, conversation in zip(numbers, conversations, strict=True)
    ]


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    tool_calls: list[dict[str, Any]] | None = None
    weight: float | None = None
    """0: it is part of prompts only."""


class _Conversation(BaseModel):
    """A line in OpenAI's chat format; keys that are not here are the task's metadata."""

    model_config = ConfigDict(extra="allow")

    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    id: StrictStr | StrictInt | None = None
    split: str = IMPORTED
    reward: float | None = Field(None, allow_inf_nan=False, strict=True)
    reward_name: str = "reward"
    model: str = "unknown"


def _of_conversation(
    id: str, run: str, number: int, data: dict[str, Any], members: Counter[tuple[str, str]]
) -> RecordedRollout:
    """A conversation, in which each assistant message is a call."""
    line = _Conversation.model_validate(data)
    messages = [{key: value for key, value in message.items() if key != "weight"} for message in data["messages"]]
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
    episode = Episode(
        rollout=id,
        attempt=0,
        group=task.id,
        member=member,
        task=task,
        mode=Mode.EVAL_SAMPLED,
        ending=Ending.FINISHED,
        transitions=(),
        result=messages[replies[-1]].get("content"),
        rewards=() if line.reward is None else (Reward(id, 0, line.reward_name, line.reward, IMPORTED),),
        terminal=line.reward,
    )
    return _recorded(episode, run, calls)


def _of_episode(episode: Episode, run: str) -> RecordedRollout:
    """An episode, as `agl_core.learning.transitions.build_episode` makes it again."""
    by_call: dict[str, list[Transition]] = {}
    for transition in episode.transitions:
        by_call.setdefault(transition.key.call, []).append(transition)
    return _recorded(episode, run, [_call(choices, time.time()) for choices in by_call.values()])


def _recorded(episode: Episode, run: str, calls: Sequence[Call]) -> RecordedRollout:
    """The rollout of an episode with these calls. ValueError if a part of it is of another one.

    The weights of the rules are not those of this run. Where the terminal reward is not the plain sum of theirs, a
    reward `rest` makes up the difference.
    """
    id, attempt, now = episode.rollout, episode.attempt, time.time()
    tool_results = [*(result for t in episode.transitions for result in t.tool_results), *episode.unjoined]
    rewards = [*episode.rewards, *(reward for t in episode.transitions for reward in t.rewards)]
    parts: list[Any] = [*(t.key for t in episode.transitions), *tool_results, *rewards]
    for part in parts:
        if (part.rollout, part.attempt) != (id, attempt):
            raise ValueError(f"the episode of '{id}' has a part of '{part.rollout}'")
    plain_sum = math.fsum(reward.value for reward in episode.rewards if reward.source != AGENT_SOURCE)
    if episode.terminal is not None and not math.isclose(episode.terminal, plain_sum, abs_tol=1e-9):
        rewards.append(Reward(id, attempt, "rest", episode.terminal - plain_sum, IMPORTED))
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
