"""The attempt, agent and state of the running code, what is reported of the attempt, and the call that tools follow.

All of it is one context variable, so that concurrent rollouts can share an agent that was made once at import.

An agent written from scratch asks the model, runs what the reply asks for, and asks again: each call begins a step,
whose tools are that call's. The step's span is stamped on the call, and reported with the tools, as their parent span.
If calls of one scope overlap, a tool belongs to the call of its own task, or, if that is not clear, to none.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict

from agl_core.types import Identity, Json, ToolResult
from agl_core.types.forms import jsonable
from agl_core.wire import MAX_ADDRESS, MAX_BYPASSED, RewardReport

V = TypeVar("V")

_MAX_STATE = 16_384
"""Bytes of JSON."""
_MAX_HEADER = 6_144
"""Bytes of the packed header: proxies take headers of 8 KiB, and the others need room too."""
MAX_PROBLEMS, _MAX_PROBLEM = 100, 2000
"""Problems that are kept, and the characters of one: any process that a command starts may report them."""


def new_span() -> str:
    """A span id in OpenTelemetry's form."""
    return uuid.uuid4().hex[:16]


class Step:
    """A call, and what follows until the next one."""

    __slots__ = ("agent", "is_followed", "span", "steps", "thread")

    def __init__(self, steps: Steps, agent: str | None) -> None:
        self.steps, self.agent, self.span, self.thread = steps, agent, new_span(), threading.get_ident()
        self.is_followed = False
        """A context that inherited this step has begun another."""


class Steps:
    """The steps of one scope (an agent's run, or a tool's)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Step] = set()
        """Steps whose call has no reply yet."""
        self._latest: Step | None = None
        self._have_overlapped = False

    def begin(self, agent: str | None) -> Step:
        step, before = Step(self, agent), self._inherited()
        with self._lock:
            if before is not None:
                before.is_followed = True
            self._have_overlapped |= bool(self._running)
            self._latest = step
            self._running.add(step)
        move(step=step)
        return step

    def end_call(self, step: Step) -> None:
        """The call of this step has its reply, or failed; a second time changes nothing."""
        with self._lock:
            self._running.discard(step)

    def span(self) -> str | None:
        step = self.step()
        return None if step is None else step.span

    def step(self) -> Step | None:
        """The step that a tool run here belongs to; None before any call, and if it is not clear."""
        step, latest = self._inherited(), self._latest
        if step is not None and not step.is_followed:
            return step
        if latest is None or self._have_overlapped:
            return None
        # A call of another context: this one waited for it if it began with no step, as in `asyncio.wait_for`, or if it
        # was of this thread, in which no event loop runs any more, as after `asyncio.run`.
        has_come_back = latest.thread == threading.get_ident() and asyncio._get_running_loop() is None
        return latest if step is None or has_come_back else None

    def _inherited(self) -> Step | None:
        step = HERE.get().step
        return step if step is not None and step.steps is self else None


class Report(BaseModel):
    """A report of an agent's process: one field is set, named after the method of `Recording` that takes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool_result: ToolResult | None = None
    reward: RewardReport | None = None
    problem: str | None = None
    bypassed: str | None = None

    def add_to(self, recording: Recording) -> None:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if value is not None:
                getattr(recording, name)(value)


class Recording:
    """Collects the reports of one attempt, from any thread, until it is closed.

    In an agent's process, `send` also passes each report on at once, so that nothing is lost if that is killed.
    """

    def __init__(self, send: Callable[[Report], None] = lambda report: None) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._tool_results: dict[str, ToolResult] = {}
        self._rewards: list[RewardReport] = []
        self._problems: dict[str, None] = {}
        self._bypassed: Counter[str] = Counter()
        self._closed = False

    @property
    def tool_results(self) -> tuple[ToolResult, ...]:
        """In the order reported; an id reported twice counts once."""
        with self._lock:
            return tuple(self._tool_results.values())

    @property
    def rewards(self) -> tuple[RewardReport, ...]:
        with self._lock:
            return tuple(self._rewards)

    @property
    def problems(self) -> tuple[str, ...]:
        """Failures of adapters, each once."""
        with self._lock:
            return tuple(self._problems)

    @property
    def bypassed_calls(self) -> dict[str, int]:
        """Calls of model APIs that are not agl's, by address."""
        with self._lock:
            return dict(self._bypassed)

    def tool_result(self, report: ToolResult) -> None:
        with self._lock:
            if not self._closed:
                self._tool_results.setdefault(report.id, report)
        self._send(Report(tool_result=report))

    def reward(self, report: RewardReport) -> None:
        with self._lock:
            if not self._closed:
                self._rewards.append(report)
        self._send(Report(reward=report))

    def problem(self, text: str) -> bool:
        """Keep a failure of an adapter, also after the end; True if it is new and among the first."""
        text = text[:_MAX_PROBLEM]
        with self._lock:
            is_new = text not in self._problems and len(self._problems) < MAX_PROBLEMS
            if is_new:
                self._problems[text] = None
        if is_new:
            self._send(Report(problem=text))
        return is_new

    def bypassed(self, address: str) -> None:
        address = address[:MAX_ADDRESS]
        with self._lock:
            has_room = address in self._bypassed or len(self._bypassed) < MAX_BYPASSED
            if has_room and not self._closed:
                self._bypassed[address] += 1
        self._send(Report(bypassed=address))

    def close(self) -> None:
        """Keep no more; closing it again changes nothing."""
        with self._lock:
            self._closed = True


@dataclass(slots=True, eq=False)
class SentCall:
    """A model call of an attempt without a server, as it was sent, and its reply as it came."""

    address: str
    body: bytes
    headers: dict[str, str]
    """The headers of the request, and who makes the call, as a server would have got them."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: float = field(default_factory=time.time)
    ended: float = 0.0
    reply: bytes | None = None
    """None before it has come, and if it has another status than 200."""
    reply_id: str = ""
    reply_headers: Mapping[str, str] = field(default_factory=dict)
    result: Any = None
    """The reply as its HTTP library has it."""

    def end(self, reply: bytes) -> None:
        self.reply, self.ended = reply, time.time()


@dataclass(frozen=True, slots=True, eq=False)
class AttemptContext:
    rollout: str
    attempt: int
    base_url: str
    """The root of the Lightning Server, `http://127.0.0.1:8000` say; only requests below it are stamped."""
    api_key: str
    recording: Recording
    prompts: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    calls: list[SentCall] | None = field(default=None, kw_only=True)
    """Its model calls, if no server records them."""


@dataclass(slots=True, eq=False)
class IdentityScope:
    """The time in which an identity holds; the innermost open scope counts.

    It is closed, not reset: the end may come in another context, where the token of a context variable is of no use.
    """

    identity: Identity
    outer: IdentityScope | None
    steps: Steps | None = None
    """None if the framework itself has a span around each call."""
    variables: Mapping[str, Json] | None = None
    """The framework's semantic variables, or else those of the scope around this one."""
    attempt: AttemptContext | None = None
    """An adapter's own attempt, which runs inside if no other does."""
    run: Any = None
    """Its run of an agent or a tool (`agl_core.capture.marking`), if it is one."""
    is_open: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.variables = self.variables or (self.outer.variables if self.outer else None)

    def close(self) -> None:
        """End it in all contexts; closing it again changes nothing."""
        self.is_open = False


@dataclass(frozen=True, slots=True)
class Here:
    """The attempt and agent that the running code belongs to."""

    attempt: AttemptContext | None = None
    scope: IdentityScope | None = None
    """The innermost one; it may be closed."""
    step: Step | None = None
    """The step of any scope; when a scope has ended, the one before that scope."""
    variables: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Here:
        """The attempt and the innermost open scope of this context, to be carried elsewhere."""
        return replace(HERE.get(), attempt=current_attempt(), scope=current_scope())

    @property
    def is_nowhere(self) -> bool:
        return self.attempt is None and self.scope is None


NOWHERE = Here()
HERE: ContextVar[Here] = ContextVar("agl_here", default=NOWHERE)
"""Threads do not inherit it by themselves."""
_of_process: AttemptContext | None = None


def move(**changes: Any) -> None:
    """From now on, the code of this context belongs elsewhere."""
    HERE.set(replace(HERE.get(), **changes))


def current_attempt() -> AttemptContext | None:
    """The attempt that this context, or else the whole process, or else an adapter runs; None outside any rollout."""
    own = HERE.get().attempt
    return own or _of_process or next((scope.attempt for scope in open_scopes() if scope.attempt), None)


@contextmanager
def holding(variable: ContextVar[V], value: V) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def running(active: AttemptContext) -> Iterator[None]:
    """Everything inside, and every task or thread it starts, belongs to this attempt."""
    with holding(HERE, replace(HERE.get(), attempt=active, variables={})):
        yield


def start_running(active: AttemptContext | None) -> None:
    """The whole process belongs to this attempt from now on, in every thread and task; None: to none."""
    global _of_process
    _of_process = active


def state(**values: Any) -> None:
    """Set semantic variables of the agent, which calls in this context carry from now on, as `Transition.state`.

    They are at most 16 KiB of JSON; values that do not fit are cut, with a note. Other names keep their values.
    Outside any rollout it does nothing.

    >>> state(plan=["search", "answer"], budget=3)
    """
    if current_attempt() is not None:
        kept = {name: jsonable(value, _MAX_STATE) for name, value in values.items()}
        move(variables={**HERE.get().variables, **kept})


def packed_variables() -> str | None:
    """The variables of this context as a header's value, the longest cut first; None if there are none."""
    scope, limit = current_scope(), _MAX_STATE
    # The agent's own values win over its framework's.
    variables = {**((scope and scope.variables) or {}), **HERE.get().variables}
    if not variables:
        return None
    while limit:
        text = orjson.dumps({name: jsonable(value, limit) for name, value in variables.items()})
        packed = _packed(text)
        if len(text) <= _MAX_STATE and len(packed) <= _MAX_HEADER:
            return packed
        limit //= 2
    return _packed(orjson.dumps({"…": f"{len(variables)} variables, too many to keep"}))


def _packed(text: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(text)).decode()


def unpack_variables(header: str | None) -> Mapping[str, Json] | None:
    """The variables that `packed_variables` packed; None for any other text."""
    if header is None:
        return None
    try:
        unpacked = zlib.decompressobj().decompress(base64.urlsafe_b64decode(header), _MAX_STATE)
        variables = orjson.loads(unpacked)
    except (binascii.Error, ValueError, zlib.error):
        return None
    return variables if isinstance(variables, dict) else None


def current_identity() -> Identity | None:
    """Who makes a call that is sent now; None if it is not known."""
    scope = current_scope()
    return scope.identity if scope else None


def current_scope() -> IdentityScope | None:
    return next(open_scopes(), None)


def open_scopes() -> Iterator[IdentityScope]:
    """Open scopes of this context, innermost first."""
    scope = HERE.get().scope
    while scope is not None:
        if scope.is_open:
            yield scope
        scope = scope.outer


def enter_identity(
    identity: Identity,
    steps: Steps | None = None,
    variables: Mapping[str, Json] | None = None,
    attempt: AttemptContext | None = None,
    run: Any = None,
) -> IdentityScope:
    """Until the scope is closed, `identity` makes calls of this context and its copies; it can inherit its agent."""
    outer = current_scope()
    if identity.agent is None and outer:
        identity = replace(identity, agent=outer.identity.agent)
    entered = IdentityScope(identity, outer, steps, variables, attempt, run)
    move(scope=entered)
    return entered


@contextmanager
def identify(agent: str | None = None, *, span: str | None = None, parent_span: str | None = None) -> Iterator[None]:
    """Calls made inside are this agent's.

    >>> with identify("critic"):
    ...     current_identity().agent
    'critic'
    """
    scope = enter_identity(Identity(agent, span, parent_span))
    try:
        yield
    finally:
        scope.close()
