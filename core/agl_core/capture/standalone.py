"""The records of an adapter that is used alone, without a gateway that records the calls."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from agl_core.capture.recording import Recording, jsonable
from agl_core.capture.reports import Latest
from agl_core.errors import EpisodesError
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    Episode,
    Identity,
    Json,
    Logprobs,
    Mode,
    Rollout,
    RolloutState,
    Sampling,
    Task,
    Tokens,
    ToolResult,
)
from agl_core.types.forms import dump_json, from_json, load_json, to_json

Records: TypeAlias = tuple[Rollout, Attempt, list[Call], list[ToolResult]]
"""`agl_core.learning.transitions.build_episode` makes an episode of these."""


class CapturedRollout:
    """One run of an agent, as its framework reports it."""

    def __init__(self, id: str, input: Any) -> None:
        self.id = id
        self.recording = Recording()
        self._task = Task(id, jsonable(input))
        self._started = time.time()
        self._sequence = itertools.count()
        self._calls: list[Call] = []
        self._attempt: Attempt | None = None

    def next_sequence(self) -> int:
        """The place of a call that starts now."""
        return next(self._sequence)

    def call(
        self,
        id: str,
        request: Mapping[str, Json],
        choices: tuple[Choice, ...],
        *,
        sequence: int,
        who: Identity,
        started: float,
        ended: float | None = None,
        prompt_ids: Tokens | None = None,
        api: str = "chat.completions",
    ) -> None:
        """Keep a call that has ended (just now, if `ended` is not given).

        `id` should not be the reply's own: some servers give every reply the same one. The sampling is what the
        request asked for, because nothing else is known.
        """
        sampling = Sampling(
            temperature=request.get("temperature"),
            top_p=request.get("top_p"),
            max_tokens=request.get("max_completion_tokens") or request.get("max_tokens"),
            seed=request.get("seed"),
        )
        call = Call(
            id=id,
            rollout=self.id,
            attempt=0,
            sequence=sequence,
            policy=str(request.get("model") or request.get("model_name") or "unknown"),
            version=None,
            request=request,
            choices=choices,
            started=started,
            ended=time.time() if ended is None else ended,
            api=api,
            agent=who.agent,
            parent_span=who.parent_span,
            prompt_ids=prompt_ids,
            requested=sampling,
            effective=sampling,
        )
        self._calls.append(call)

    def finish(self, result: Any = None, error: str | None = None) -> None:
        """The agent returned `result`, or raised `error`."""
        ending = Ending.CRASHED if error else Ending.FINISHED if self._calls else Ending.NO_CALL
        self._attempt = Attempt(self.id, 0, "", self._started, time.time(), ending, jsonable(result), error)

    @property
    def is_finished(self) -> bool:
        return self._attempt is not None

    def records(self) -> Records:
        """The records of a finished rollout."""
        assert self._attempt is not None, "the rollout has not finished"
        rollout = Rollout(
            id=self.id,
            run="alone",
            restart=0,
            group=self.id,
            task=self._task,
            # The sampling was not fixed by agl, so it is not training data.
            mode=Mode.EVAL_SAMPLED,
            step=0,
            member=0,
            state=RolloutState.DONE,
            counted_attempt=0,
            ending=self._attempt.ending,
        )
        tool_results = [replace(report, rollout=self.id) for report in self.recording.tool_results]
        return rollout, self._attempt, list(self._calls), tool_results


class Capture:
    """The latest rollouts that an adapter used alone has seen."""

    def __init__(self, keep: int) -> None:
        self._rollouts: Latest[str, CapturedRollout] = Latest(keep)
        self._lock = threading.Lock()

    def start(self, id: str, input: Any) -> CapturedRollout:
        """A new rollout; the oldest is forgotten when there are more than `keep`."""
        rollout = CapturedRollout(id, input)
        with self._lock:
            self._rollouts[id] = rollout
        return rollout

    def finished(self) -> list[CapturedRollout]:
        """The rollouts that have ended, in the order they started."""
        with self._lock:
            return [rollout for rollout in self._rollouts.values() if rollout.is_finished]

    def clear(self) -> None:
        with self._lock:
            self._rollouts.clear()


def ids_of(ids: Any) -> Tokens | None:
    """Token ids that an endpoint returned; None if it returned none."""
    return np.array(ids, np.int32) if isinstance(ids, list) and ids else None


def logprobs_of(logprobs: Any) -> Logprobs | None:
    """The log-probabilities of a choice's `logprobs`, one for each token; None if it has none."""
    content = logprobs.get("content") if isinstance(logprobs, Mapping) else None
    return np.array([token["logprob"] for token in content], np.float32) if content else None


def save_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> None:
    """Write episodes to a file, one JSON object a line; after an error there is no file, or the earlier one.

        agl_core.save_episodes("episodes.jsonl", callback.episodes())

    `agl reward try CONFIG --run episodes.jsonl` computes their rewards, and `load_episodes` gives them back exactly.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(json.dumps(load_json(dump_json(to_json(episode)))) + "\n")
    os.replace(part, target)


def load_episodes(path: str | os.PathLike[str]) -> list[Episode]:
    """The episodes that `save_episodes` wrote. EpisodesError names a line that is not an episode.

    episodes = agl_core.load_episodes("episodes.jsonl")
    """
    episodes = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise EpisodesError(f"The episodes in {path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            episodes.append(from_json(Episode, json.loads(line)))
        except ValueError as error:
            raise EpisodesError(
                f"Line {number} of {path} is no episode: {error}. Write it with agl_core.save_episodes, one a line."
            ) from error
    return episodes
