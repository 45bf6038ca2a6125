"""What a driver is: it plays scenarios with one framework's real API."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from agl_core.capture import attach
from agl_core.protocols import Adapter
from agl_core.testing.adapters.scenario import Scenario

CHAT, RESPONSES, MESSAGES = "chat completions", "Responses", "Messages"
API_NAMES = {CHAT: "chat.completions", RESPONSES: "responses", MESSAGES: "messages"}
"""How records name the APIs."""

ATTACH = "attach"
"""The form in which the agent's code has no line of agl: everything installed is attached, as agl's workers do."""


EVERY = "every scenario"


class InexpressibleError(Exception):
    """The framework, or this driver, has no way to play the scenario."""


@dataclass(frozen=True)
class Setting:
    """How a driver is to play: a column of the matrix, and where the Lightning Server is."""

    api: str
    streaming: bool
    form: str
    root: str
    """The server's address without a path. A client made from it alone belongs to no rollout until it is stamped."""
    api_key: str
    """What such a client is made with; the stamp brings the attempt's own key."""
    retries: int = 2
    """How often clients are to send a failed request again."""

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"


@dataclass(frozen=True)
class Question:
    """What one rollout asks the agent."""

    text: str
    root: str
    """The attempt's own address, whose path names the rollout, for agents that nothing stamps."""
    api_key: str
    """The attempt's own key, for these."""


Program: TypeAlias = Callable[[Question], Awaitable[None]]
"""The agent, made once; concurrent rollouts may run it."""


@dataclass(frozen=True)
class Gap:
    """Cells that cannot pass, and why. An empty selection stands for all."""

    scenario: str
    """Its name, or EVERY."""
    reason: str
    """One sentence for the matrix."""
    apis: tuple[str, ...] = ()
    streaming: tuple[bool, ...] = ()
    forms: tuple[str, ...] = ()

    def covers(self, scenario: str, api: str, streaming: bool, form: str) -> bool:
        return (
            self.scenario in (EVERY, scenario)
            and (not self.apis or api in self.apis)
            and (not self.streaming or streaming in self.streaming)
            and (not self.forms or form in self.forms)
        )


class Driver(ABC):
    """Plays scenarios with one framework. Everything a subclass declares shows in the matrix.

    `build` makes the scenario's agents as a user would; the program it returns is run once for each rollout, inside
    it. Play only what the framework's real API does: a scenario that it cannot express raises InexpressibleError,
    and is declared in `gaps` with the reason.
    """

    name: str
    """The framework, and the adapter if there is one."""
    apis: Sequence[str]
    """Those of CHAT, RESPONSES and MESSAGES that it speaks."""
    without: Mapping[str, str] = MappingProxyType({})
    """The others of them, and why it does not."""
    streaming: Sequence[bool] = (False, True)
    forms: Sequence[str] = (ATTACH,)
    """The ways to bring agl in: ATTACH, and the adapter's one-line forms, named as the user writes them."""
    gaps: Sequence[Gap] = ()
    packages: Sequence[str] = ()
    """The framework's distributions, for reports that name their versions."""

    @abstractmethod
    def build(self, scenario: Scenario, setting: Setting) -> Program:
        """Make the agents, outside any rollout."""

    @contextlib.contextmanager
    def attached(self, form: str) -> Iterator[None]:
        """What is installed in the process while the scenario is played: everything for ATTACH, else `adapters`."""
        attachment = attach(None if form == ATTACH else self.adapters(form))
        try:
            assert attachment.failed == {}
            yield
        finally:
            attachment.detach()

    def adapters(self, form: str) -> Sequence[Adapter]:
        """What is attached besides a one-line form; requests are stamped in any case, as workers do."""
        return ()
