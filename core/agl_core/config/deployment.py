"""The keys of `[learn.gate]` and `[learn.canary]`: what a version has to show before it is served."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from agl_core.config.sections import OpenSection, Section

Rise = Annotated[float, Field(ge=0, le=1)]
"""By how much a share may rise, from 0 to 1."""


class ReleaseCheckSection(OpenSection):
    """A check of your own; its settings are beside this key."""

    check: str | None = Field(None, description="The release check plugin; by default the table's own name.")


class GateSection(Section):
    """What a new version has to show on held-out tasks before it answers any session.

    Each limit compares it with the version that is served, on the same tasks.
    """

    tolerance: float = Field(
        0.05,
        ge=0,
        description="How much lower its mean reward may be: the lower end of the 95% interval of the difference has to "
        "be above -tolerance, in each held-out set and mode.",
    )
    min_tasks: int = Field(20, ge=2, description="Tasks of a set that both versions need, for the interval to hold.")
    max_kl: float = Field(
        0.5,
        gt=0,
        description="How far it may be from the served version: the KL divergence in nats per token, by the served "
        "version's sampled replies to the held-out tasks of each set.",
    )
    max_length: float = Field(2.0, gt=1, description="How many times as long its responses may be, in tokens.")
    max_tool_errors: Rise = Field(0.1, description="By how much the share of tool calls that fail may rise.")
    max_empty: Rise = Field(0.05, description="By how much the share of empty answers may rise.")
    max_refusals: Rise = Field(0.05, description="By how much the share of answers that refuse may rise.")
    max_questions: Rise = Field(0.2, description="By how much the share of answers that end with a question may rise.")
    checks: dict[str, ReleaseCheckSection] = Field(
        {}, description="Checks of your own, by plugin name, each with its settings (docs/plugins.md)."
    )


class CanarySection(Section):
    """How a version that passed the gate is tried on a share of the sessions."""

    share: float = Field(
        0.1,
        ge=0,
        le=0.5,
        description="The share of new sessions that it answers; 0: there is no canary, and what passes the gate "
        "answers all new sessions.",
    )
    reward: tuple[float, float] = Field(
        (0.0, 1.0), description="The smallest and the largest reward of a session; others count as these."
    )
    tolerance: float = Field(
        0.1,
        gt=0,
        description="How much lower its live reward may be. It is promoted once the difference is above -tolerance "
        "with confidence, and rolled back once it is below 0 with confidence.",
    )
    error: float = Field(
        0.05, gt=0, le=0.5, description="The probability of a false promotion, and that of a false rollback, at most."
    )
    min_sessions: int = Field(10, ge=1, description="Rewarded sessions of each version before a promotion.")
    max_sessions: int = Field(
        2000, ge=1, description="Rewarded sessions of it without a decision, after which it is rolled back."
    )
    per_name: int = Field(
        1, ge=1, description="Sessions of one name that count for each version, so that no user outweighs others."
    )
    max_tool_errors: Rise = Field(0.1, description="By how much the share of tool calls that fail may rise.")
    max_empty: Rise = Field(0.05, description="By how much the share of empty answers may rise.")
    max_lost: Rise = Field(0.05, description="By how much the share of sessions that fail may rise.")

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        low, high = self.reward
        if low >= high:
            raise ValueError(f"reward = [{low:g}, {high:g}] is no range: the first has to be below the second")
        if self.max_sessions < self.min_sessions:
            raise ValueError("max_sessions is below min_sessions, so that no version could be promoted")
        return self
