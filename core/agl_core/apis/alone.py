"""An agent's runs as episodes without a server.

An adapter begins and ends a run, and says who calls and what the tools did, as in a rollout. The HTTP library keeps the
bytes of model calls (`agl_core.capture.requests`), which are read here by the dialect of the API.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any
from urllib.parse import unquote

from agl_core.apis.answered import ReplyCache
from agl_core.apis.dialect import ChatCompletions, Completions, Dialect
from agl_core.apis.errors import ApiError
from agl_core.apis.messages import Messages
from agl_core.apis.reply import Reply, read_reply
from agl_core.apis.responses import Responses
from agl_core.apis.streamed import LAST_EVENT, EventReader, StreamedCompletion
from agl_core.apis.streams import STREAM_TYPE
from agl_core.capture import AttemptContext, Recording, jsonable, report_problem, unpack_variables
from agl_core.capture.context import SentCall
from agl_core.capture.requests import HEADER_AGENT, HEADER_PARENT_SPAN, HEADER_STATE
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.learning.transitions import build_episode
from agl_core.types import (
    Attempt,
    Call,
    Ending,
    Episode,
    Json,
    Mode,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Task,
    Transition,
)
from agl_core.types.forms import parse_json

_DIALECTS: Mapping[str, Dialect] = {
    "/chat/completions": ChatCompletions(),
    "/completions": Completions(),
    "/responses": Responses(),
    "/messages": Messages(),
}
"""By the end of the path; the first that fits."""


class LocalRollout:
    def __init__(self, id: str, task: Task, ended: deque[LocalRollout]) -> None:
        self.calls: list[SentCall] = []
        self.attempt = AttemptContext(id, 0, "", "", Recording(), calls=self.calls)
        """Entered around the agent."""
        self.task = task
        self._started, self._ended = time.time(), ended
        self._record: Attempt | None = None

    def finish(self, result: Any = None, error: str | None = None) -> None:
        """Keep the run of an agent that returned `result` or raised `error`."""
        ending = Ending.CRASHED if error else Ending.FINISHED if self.calls else Ending.NO_CALL
        self._record = Attempt(self.attempt.rollout, 0, "", self._started, time.time(), ending, jsonable(result), error)
        self._ended.append(self)

    def episode(self, member: int) -> Episode:
        """The record of a finished run of its task; an unreadable call counts as bypassed."""
        assert self._record is not None, "the run has not finished"
        id, recording = self.attempt.rollout, self.attempt.recording
        bypassed, calls = Counter(recording.bypassed_calls), []
        for sequence, sent in enumerate(self.calls):
            try:
                if sent.reply is not None:
                    calls.append(_recorded(id, sequence, sent, sent.reply))
            except (ApiError, ValueError, TypeError, KeyError, AttributeError) as error:
                report_problem(f"Reading a call to {sent.address}", error)
                bypassed[sent.address] += 1
        ids: Mapping[str | None, str] = {sent.reply_id: sent.id for sent in self.calls}
        task, mode, ending = self.task, Mode.EVAL_SAMPLED, self._record.ending  # agl did not fix its sampling.
        rollout = Rollout(id, "alone", 0, task.id, task, mode, 0, member, RolloutState.DONE, 0, ending)
        return build_episode(
            rollout,
            replace(self._record, bypassed=dict(bypassed) or None),
            calls,
            [replace(report, rollout=id) for report in recording.tool_results],
            [
                Reward(id, 0, report.name, report.value, AGENT_SOURCE, ids.get(report.call, report.call))
                for report in recording.rewards
            ],
        )


class LocalRollouts:
    """The agent's latest runs as data, for an adapter that is used without a server."""

    def __init__(self, keep: int = 1000, task: Task | None = None) -> None:
        self._ended: deque[LocalRollout] = deque(maxlen=keep)
        self.task = task
        """The task of runs that begin from now on; None: each run is a task of its own, its input."""

    def begin(self, id: str, input: Any = None) -> LocalRollout:
        return LocalRollout(id, self.task or Task(id, jsonable(input)), self._ended)

    def episodes(self) -> list[Episode]:
        """The finished runs, those of one task as a group, with token ids if the endpoint returned them."""
        members = defaultdict[str, Iterator[int]](count)
        return [rollout.episode(next(members[rollout.task.id])) for rollout in self._ended.copy()]

    def transitions(self) -> list[Transition]:
        return [transition for episode in self.episodes() for transition in episode.transitions]

    def clear(self) -> None:
        self._ended.clear()


def _recorded(rollout: str, sequence: int, sent: SentCall, body: bytes) -> Call:
    """A call with its reply's body; ApiError or a standard error if its API is unknown."""
    dialect = next((dialect for path, dialect in _DIALECTS.items() if sent.address.endswith(path)), None)
    if dialect is None:
        raise ValueError("agl does not know this API")
    request, requested = _request(dialect, sent.body)
    reply = _reply(dialect, sent, body)
    agent = sent.headers.get(HEADER_AGENT)
    return Call(
        id=sent.id,
        rollout=rollout,
        attempt=0,
        sequence=sequence,
        policy=str(request.get("model") or "unknown"),
        version=reply.version,
        request=request,
        choices=reply.choices,
        started=sent.started,
        ended=sent.ended,
        api=dialect.api,
        agent=None if agent is None else unquote(agent),
        parent_span=sent.headers.get(HEADER_PARENT_SPAN),
        prompt_ids=reply.prompt_ids,
        requested=requested,
        effective=requested,
        state=unpack_variables(sent.headers.get(HEADER_STATE)),
    )


def _request(dialect: Dialect, body: bytes) -> tuple[Mapping[str, Json], Sampling]:
    """The request on record; with the API's own conversation if agl could not translate it."""
    try:
        request = dialect.parse(body, ReplyCache())
    except ApiError:
        raw = parse_json(body)
        instructions, items = raw.get("instructions"), raw.get("messages") or raw["input"]
        system = [] if instructions is None else [{"role": "system", "content": instructions}]
        messages = [*system, *([{"role": "user", "content": items}] if isinstance(items, str) else items)]
        return {**raw, "messages": messages}, Sampling(raw.get("temperature"), raw.get("top_p"), seed=raw.get("seed"))
    return request.recorded, request.requested


def _reply(dialect: Dialect, sent: SentCall, body: bytes) -> Reply:
    """The reply, read as a stream, of which a whole one is the only event."""
    is_streamed = sent.reply_headers.get("content-type", "").startswith(STREAM_TYPE)
    reader = EventReader()
    events = [*reader.feed(body), *reader.end()] if is_streamed else [body]
    completion = StreamedCompletion(sent.id)
    for event in events:
        if event != LAST_EVENT:
            completion.add(dialect.chunk(parsed := parse_json(event)))
            own = next((part for part in map(parsed.get, ("message", "response")) if isinstance(part, dict)), parsed)
            sent.reply_id = sent.reply_id or own.get("id") or ""
    completion.end()
    return read_reply(completion.whole(), sent.reply_headers, sent.id, logprobs=False)
