"""What opens rollouts on a server from outside."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from starlette.requests import Request
from starlette.routing import Route

from agl_core.server.attempt import ActiveAttempt
from agl_core.server.keys import Keys
from agl_core.store.interface import Store
from agl_core.wire.operation import AnyOperation

SpanOwner: TypeAlias = Callable[[str], Awaitable[ActiveAttempt | None]]
"""The attempt that the spans of a trace belong to; None: no open one."""


class RolloutSource(Protocol):
    """Opens rollouts of mode `use` beside those of the queue. All methods belong to the server's event loop.

    Each rollout has one attempt, whose `ActiveAttempt` says what answers its calls and how they are recorded.
    """

    @property
    def operations(self) -> Sequence[AnyOperation]:
        """What its routes answer, for the OpenAPI document and the limits of bodies."""

    @property
    def rights(self) -> Mapping[str, str]:
        """Where the keys of these operations come from, by the right that they grant."""

    @property
    def routes(self) -> Sequence[Route]:
        """Further routes of the server."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What the server's health shows of it."""

    async def start(self, base_url: str) -> None:
        """Called when the server has its port, before it listens."""

    async def stop(self) -> None:
        """Called when the server listens no more."""

    async def attempt_of(self, request: Request) -> ActiveAttempt | None:
        """The attempt that a model call belongs to, open or not; None: to none of its. ApiError if it is refused."""

    async def owner_of_spans(self, request: Request) -> SpanOwner | None:
        """Says whose the spans of a request are; None: nothing of its. ApiError if it is refused."""


SourceFactory: TypeAlias = Callable[[Store, Keys], Awaitable[RolloutSource]]
"""Makes the source of a run's server; ConfigError if its store does not do."""
