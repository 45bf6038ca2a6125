"""One session as the gateway has it; its calls are redacted and recorded without holding up its use."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agl_core.errors import StoreError
from agl_core.store import Record, Store
from agl_core.types import Call, Choice, Ending, Json, RolloutState
from agl_server.gateway.attempts import ActiveAttempt

logger = logging.getLogger(__name__)

UNRECORDED_CALLS = "unrecorded"
"""The key in the result of a session's attempt: its calls that were answered and not recorded."""
LONGEST_WAIT = 5.0
"""Seconds in which records of a session should be in the store."""
_PATIENCE = 2.0
"""Seconds that a reply waits for its call to be written."""
_MAX_WAITING = 256
"""Calls that may wait to be written; further ones are not recorded."""


class SharedBySessions(Protocol):
    """State that the sessions of a server share."""

    redaction: Redaction
    counted: dict[str, int]
    writing: set[asyncio.Task[None]]

    async def end(self, session: ActiveSession, by: str) -> None: ...


@dataclass(slots=True, weakref_slot=True, eq=False, kw_only=True)
class ActiveSession(ActiveAttempt):
    """A session that is open, or was. Its calls are answered even if they cannot be recorded."""

    shared: SharedBySessions
    used: float
    """Last, in Unix seconds."""
    recorded: bool = True
    """False if nothing of it may be stored."""
    begun: bool = False
    """True if the store has it."""
    missed: int = 0
    """Calls that were not recorded."""
    ends_with_reply: bool = False
    """The next reply is its last."""

    @property
    def id(self) -> str:
        return self.rollout.id

    def call_id(self, prefix: str) -> str:
        """The id of a new call, which names its session for feedback."""
        return f"{prefix}{self.id}.{uuid.uuid4().hex[:16]}"

    async def delivered(self, arrived: bool) -> None:
        self.used = time.time()
        if arrived and self.ends_with_reply and not self.asking:
            await self.shared.end(self, "reply")

    async def keep(self, store: Store, *calls: Call) -> None:
        """Write calls, redacted, with the session if the store lacks it. Returns in time; failures are counted."""
        if not self.recorded or (self.closed and not self.begun):
            return
        try:
            kept = [self.shared.redaction.call(call) for call in calls]
        except Exception:
            logger.exception("A call of session %s is not recorded, because it could not be redacted.", self.id)
            self._count_missed()
            return
        self.shared.counted["redacted"] += sum(now is not before for now, before in zip(kept, calls, strict=True))
        is_new = not self.closed and (self.missed or not self.begun)
        records: list[Record] = [self.rollout, self.record, *kept] if is_new else [*kept]
        writing = self.shared.writing
        if records and len(writing) >= _MAX_WAITING:
            self._count_missed()
        elif records:
            task = asyncio.create_task(self._put(store, records))
            for tasks in (writing, self.committing):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.wait({task}, timeout=_PATIENCE)  # What takes longer goes on.

    async def write_end(self, store: Store) -> bool:
        """Write its end; False if that has to be tried again."""
        if not await self.wait_until_written():
            return False
        if self.begun and self.recorded:
            ending, error = Ending.FINISHED, None
            if self.missed:
                ending, error = Ending.LOST, f"{self.missed} of its calls were answered and could not be recorded."
            elif not self.completed_calls:
                ending = Ending.NO_CALL
            passed_through = self.passed_through or None
            record = replace(self.record, ended=self.used, ending=ending, error=error, passed_through=passed_through)
            rollout = replace(self.rollout, state=RolloutState.DONE, ending=ending, counted_attempt=0)
            try:
                await store.put(record, rollout)
            except StoreError as failed:
                logger.error("The end of session %s is not written yet: %s", self.id, failed)
                return False
        return True

    async def wait_until_written(self) -> bool:
        """Wait for its writes under way; False if they take longer than `LONGEST_WAIT`."""
        if self.committing:
            _, writing = await asyncio.wait(set(self.committing), timeout=LONGEST_WAIT)
            return not writing
        return True

    async def _put(self, store: Store, records: list[Record]) -> None:
        try:
            await store.put(*records)
            self.begun = True
        except Exception as error:
            trace = not isinstance(error, StoreError)
            logger.error("What session %s did is not recorded: %s", self.id, error, exc_info=trace)
            if any(isinstance(record, Call) for record in records):
                self._count_missed()

    def _count_missed(self) -> None:
        self.shared.counted["unrecorded"] += 1
        self.missed += 1
        if not self.closed:
            self.record = replace(self.record, result={UNRECORDED_CALLS: self.missed})


PATTERNS: Mapping[str, str] = {
    "email": r"[\w.%+-]{1,64}@[\w-]+(?:\.[\w-]+)+",
    "card": r"\b\d(?:[ -]?\d){12,18}\b",
    "phone": r"(?<![\w+])(?:\+|00)?\d(?:[ ()./-]{0,2}\d){7,14}(?!\w)",
    "ip": r"\b\d{1,3}(?:\.\d{1,3}){3}\b",
    "secret": r"\b(?:sk|pk|rk|ghp|gho|glpat|xox[abprs]|AKIA)[-_A-Za-z0-9]{12,}|(?<=Bearer )[-_.=+/A-Za-z0-9]{12,}",
}
"""The patterns with names. The part before an @ is bounded as in RFC 5321, so that the search for it is bounded."""


def _is_text_part(value: Json) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("text"), str)


class Redaction:
    """Replaces what the patterns match: names of `PATTERNS`, and regular expressions.

    >>> Redaction(["email", "order [0-9]+"]).text("ada@example.org asks for order 17")
    '[EMAIL] asks for [REDACTED]'
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = [
            (re.compile(PATTERNS.get(pattern, pattern)), f"[{pattern.upper() if pattern in PATTERNS else 'REDACTED'}]")
            for pattern in patterns
        ]

    def text(self, text: str) -> str:
        for pattern, mark in self._patterns:
            text = pattern.sub(mark, text)
        return text

    def json(self, value: Json) -> Json:
        """Redact all texts, keys, and numbers that read like a match."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.json(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return self._parts([self.json(part) for part in value])
        if isinstance(value, int | float) and not isinstance(value, bool):
            written = str(value)
            redacted = self.text(written)
            return value if redacted == written else redacted
        return value

    def _parts(self, values: list[Json]) -> list[Json]:
        """Redact matches across text parts beside each other too: the first part then has all of their text."""
        redacted: list[Json] = []
        for is_text, run in itertools.groupby(values, _is_text_part):
            parts: list[Any] = list(run)
            whole = "".join(part["text"] for part in parts) if is_text and len(parts) > 1 else ""
            if (text := self.text(whole)) != whole:
                parts = [{**parts[0], "text": text}, *({**part, "text": ""} for part in parts[1:])]
            redacted += parts
        return redacted

    def call(self, call: Call) -> Call:
        """Redact a call. If its texts change, it loses its token ids, which would bring the texts back."""
        if not self._patterns:
            return call
        messages = [[choice.message, choice.parse_error] for choice in call.choices]
        texts: list[Any] = [call.request, call.state, call.agent, call.parent_span, messages]
        redacted = [self.json(text) for text in texts]
        if redacted == texts:
            return call
        request, state, agent, parent_span, messages = redacted
        choices = tuple(
            Choice(choice.index, message, choice.finish_reason, parse_error=parse_error)
            for choice, (message, parse_error) in zip(call.choices, messages, strict=True)
        )
        return replace(
            call,
            request=request,
            state=state,
            agent=agent,
            parent_span=parent_span,
            choices=choices,
            prompt_ids=None,
        )
