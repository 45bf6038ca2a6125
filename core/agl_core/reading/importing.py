"""`agl import`: recorded conversations, or exported episodes, become a run."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from agl_core.errors import EpisodesError
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.reading.runs import PREFERENCES, check_name, write_capture
from agl_core.reading.shapes import PREFERENCE, conversations_of, is_recording, read_rows
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
    Json,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Run,
    Sampling,
    Task,
    Transition,
)
from agl_core.types.forms import from_json

IMPORTED = "imported"
"""The source of rewards that a line names, and the split of its task without another."""
_MAX_NAMED_LINES = 20
_BATCH = 2000
"""Records that are written together."""


@dataclass(frozen=True, slots=True)
class Imported:
    """A run that was made of a file."""

    run: Path
    rollouts: int
    calls: int


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


def import_file(file: Path, name: str, runs: Path) -> Imported:
    """Make the run `runs/NAME` (`NAME-2` and so on if it is taken) of a file.

    Each row of the file is a conversation, a pair of them (`agl_core.reading.shapes`), or an episode
    (`agl_core.save_episodes`, `agl export --to episodes`). EpisodesError names each bad row, and then there is no run.
    """
    base = runs / check_name(name)
    if not is_recording(file):
        raise EpisodesError(f"{file} is no file, and no folder of a saved dataset.")
    return asyncio.run(_import(file, base))


async def _import(file: Path, base: Path) -> Imported:
    folder = first_free(base, lambda folder: None)
    rollouts = calls = 0
    has_preferences = False
    bad: list[str] = []
    with removed_unless_begun(folder) as begun:
        async with SqliteStore(folder / "store.sqlite") as store:
            batch: list[Record] = [Run(folder.name, 0, time.time(), {"file": str(file)})]
            for records in _records(file, folder.name, bad):
                batch += [] if bad else records
                rollouts += 1
                calls += sum(isinstance(record, Call) for record in records)
                has_preferences |= any(isinstance(r, Reward) and r.name == PREFERENCE for r in records)
                if len(batch) >= _BATCH:
                    await store.put(*batch)
                    batch = []
            await store.put(*batch)
        if bad:
            more = [f"and {len(bad) - _MAX_NAMED_LINES} more"] if len(bad) > _MAX_NAMED_LINES else []
            heading = f"{file} has bad rows, so nothing was imported:"
            raise EpisodesError("\n  ".join([heading, *bad[:_MAX_NAMED_LINES], *more]))
        if not rollouts:
            raise EpisodesError(
                f"{file} has no row: it must have conversations or episodes, for instance one on each line."
            )
        write_capture(folder, {"imported": str(file), PREFERENCES: has_preferences})
        begun()
    return Imported(folder, rollouts, calls)


def _records(file: Path, run: str, bad: list[str]) -> Iterator[list[Record]]:
    """The records of each rollout of good rows; what is wrong with the others is added to `bad`."""
    places: dict[str, str] = {}
    members: Counter[tuple[str, str]] = Counter()
    for number, (place, row) in enumerate(read_rows(file), 1):
        try:
            data = json.loads(row) if isinstance(row, bytes) else row
            if not isinstance(data, dict):
                raise ValueError("must be a JSON object")
            if "transitions" in data:
                episode = from_json(Episode, data)
                _check_parts(episode)
                of_row = {episode.rollout: episode_records(episode, run)}
            else:
                found = conversations_of(data)
                ids = [f"{run}-{number}"] if len(found) == 1 else [f"{run}-{number}-{n}" for n in range(len(found))]
                of_row = {
                    id: _conversation_records(id, run, number, conversation, members)
                    for id, conversation in zip(ids, found, strict=True)
                }
            for id, records in of_row.items():
                if id in places:
                    raise ValueError(f"the rollout '{id}' is that of {places[id]} too")
                places[id] = place
                yield records
        except ValidationError as error:
            wrong = error.errors()[0]
            bad.append(f"{place}: {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}")
        except (ValueError, RecursionError) as error:
            bad.append(f"{place}: {error}")


def _check_parts(episode: Episode) -> None:
    parts: list[Any] = [*episode.unjoined, *episode.rewards]
    for transition in episode.transitions:
        parts += [transition.key, *transition.tool_results, *transition.rewards]
    for part in parts:
        if (part.rollout, part.attempt) != (episode.rollout, episode.attempt):
            raise ValueError(f"the episode of '{episode.rollout}' has a part of '{part.rollout}'")


def _conversation_records(
    id: str, run: str, number: int, data: dict[str, Any], members: Counter[tuple[str, str]]
) -> list[Record]:
    """The records of a conversation, in which each assistant message is a call."""
    line = _Conversation.model_validate(data)
    messages: list[dict[str, Json]] = [
        {key: value for key, value in message.items() if key != "weight"} for message in data["messages"]
    ]
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
    return [*episode_records(episode, run), *calls]


def episode_records(episode: Episode, run: str) -> list[Record]:
    """The records of an episode, from which `agl_core.learning.transitions.build_episode` makes the same one.

    The weights of the rules are not those of this run. Where the terminal reward is not the plain sum of theirs, a
    reward `rest` makes up the difference.
    """
    rollout, now = episode.rollout, time.time()
    records: list[Record] = [
        Rollout(
            id=rollout,
            run=run,
            restart=0,
            group=episode.group,
            task=episode.task,
            mode=episode.mode,
            step=episode.step,
            member=episode.member,
            state=RolloutState.DONE,
            counted_attempt=episode.attempt,
            ending=episode.ending,
        ),
        Attempt(rollout, episode.attempt, IMPORTED, now, now, episode.ending, episode.result),
    ]
    by_call: dict[str, list[Transition]] = {}
    for transition in episode.transitions:
        by_call.setdefault(transition.key.call, []).append(transition)
    records += [_call(transitions, now) for transitions in by_call.values()]
    records += [tool_result for transition in episode.transitions for tool_result in transition.tool_results]
    records += [*episode.unjoined, *episode.rewards]
    plain_sum = math.fsum(reward.value for reward in episode.rewards if reward.source != AGENT_SOURCE)
    if episode.terminal is not None and not math.isclose(episode.terminal, plain_sum, abs_tol=1e-9):
        records.append(Reward(rollout, episode.attempt, "rest", episode.terminal - plain_sum, IMPORTED))
    return records + [reward for transition in episode.transitions for reward in transition.rewards]


def _call(choices: Sequence[Transition], now: float) -> Call:
    """The call of these transitions, one for each of its choices."""
    first = choices[0]
    return Call(
        id=first.key.call,
        rollout=first.key.rollout,
        attempt=first.key.attempt,
        sequence=first.turn,
        policy=first.policy,
        version=first.version,
        request={"messages": list(first.messages), **({"tools": list(first.tools)} if first.tools else {})},
        choices=tuple(
            Choice(
                index=t.key.choice,
                message=t.response,
                finish_reason=t.finish_reason,
                response_ids=t.response_ids,
                logprobs=t.logprobs,
                mask=t.mask,
                parse_error=t.parse_error,
                lacks_ids=t.lacks_ids,
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
