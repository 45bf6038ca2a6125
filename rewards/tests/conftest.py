"""Makers of episodes for the tests of reward and credit rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agl_core.plugins import Kind, Plugins
from agl_core.types import (
    Ending,
    Episode,
    FinishReason,
    Mode,
    Outcome,
    OutcomeStatus,
    Task,
    Transition,
    TransitionKey,
)


class Episodes:
    """Makes episodes, and rules as a run would have them, with as little said as a test needs."""

    def __init__(self) -> None:
        self._plugins = Plugins.load()

    def rule(self, kind: Kind, name: str, **settings: Any) -> Any:
        """A registered rule, built from its settings."""
        component = self._plugins.component(kind, name, "[test]")
        return component.build(component.options.model_validate(settings))

    def outcome(self, status: str = "ok", tool: str = "search", **more: Any) -> Outcome:
        return Outcome(f"{tool} {status}", "r", 0, tool, OutcomeStatus(status), **more)

    def transition(self, turn: int, *outcomes: Outcome, choice: int = 0, parse_error: str | None = None) -> Transition:
        return Transition(
            key=TransitionKey("r", 0, f"c{turn}", choice),
            agent="solver",
            turn=turn,
            agent_turn=turn,
            policy="default",
            version=0,
            messages=(),
            response={"role": "assistant", "content": ""},
            finish_reason=FinishReason.STOP,
            temperature=1.0,
            outcomes=outcomes,
            parse_error=parse_error,
        )

    def episode(
        self,
        *transitions: Transition | Sequence[Outcome],
        result: Any = None,
        terminal: float | None = None,
        question: Any = "a question",
        metadata: Mapping[str, Any] | None = None,
    ) -> Episode:
        """An episode; a list of outcomes stands for the transition that asked for them."""
        made = [t if isinstance(t, Transition) else self.transition(i, *t) for i, t in enumerate(transitions)]
        task = Task("t1", question, metadata=metadata or {})
        return Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, tuple(made), result=result, terminal=terminal)


@pytest.fixture(scope="session")
def make() -> Episodes:
    return Episodes()
