"""The keys of `[learn]`: learning from sessions of real use."""

from __future__ import annotations

from pydantic import Field

from agl_core.config.deployment import CanarySection, GateSection
from agl_core.config.sections import Section


class LearnSection(Section):
    """Learning from sessions of real use, whose versions are served through a gate and a canary (`agl learn`)."""

    sessions_per_step: int = Field(16, ge=1, description="Rewarded sessions that a step waits for.")
    offline_share: float = Field(
        0.25,
        ge=0,
        lt=1,
        description="The share of a step's groups that are rollouts of [tasks.train], so that the policy does not "
        "forget them; 0: none.",
    )
    max_staleness: int = Field(
        60,
        ge=0,
        description="How many updates old the weights that answered a session may be. Older sessions are dropped.",
    )
    max_age_hours: float = Field(
        168.0,
        gt=0,
        description="A session, rewarded or not, is too old to be trained on this many hours after its end.",
    )
    wait_minutes: float = Field(
        0.0, ge=0, description="Minutes after its end that a session waits for more feedback before it is trained on."
    )
    key_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="The largest share of a step that sessions of one application weigh together: if there are more of "
        "them, each weighs less.",
    )
    name_share: float = Field(
        0.25, gt=0, le=1, description="The same for sessions of one name, so that no user outweighs the others."
    )
    propose_every: int = Field(20, ge=1, description="Steps after which the weights are proposed as a new version.")
    gate: GateSection = GateSection()
    canary: CanarySection = CanarySection()

    @property
    def groups_of_tasks(self) -> int:
        """How many groups of a step are rollouts of tasks.

        >>> LearnSection(sessions_per_step=12, offline_share=0.25).groups_of_tasks
        4
        """
        exactly = self.sessions_per_step * self.offline_share / (1 - self.offline_share)
        return max(1, round(exactly)) if self.offline_share else 0

    def is_due(self, step: int) -> bool:
        """Whether the weights after this step are proposed as a version."""
        return step % self.propose_every == 0
