"""The keys of `[online]` and `[learn]`, and whether what learns from sessions goes together."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from agl_core.config.check import corrects_staleness, needing
from agl_core.config.load import LoadedConfig
from agl_core.config.sections import FOLDER_NAME, Section
from agl_core.errors import CapabilityError, ConfigError
from agl_core.kinds import Capability
from agl_core.types import Mode

ApplicationName: TypeAlias = Annotated[str, Field(pattern=f"^{FOLDER_NAME.pattern}$")]


class OnlineSection(Section):
    """Sessions of real use, which `agl serve` records and takes feedback on (docs/deploy-and-learn.md)."""

    upstream: str | None = Field(None, pattern=r"^https?://[^\s?#]+$")
    """The model server that answers: an OpenAI-compatible base URL, ending in /v1. With [learn] it is absent: the run's
    own versions answer."""
    upstream_key_env: str | None = Field(None, min_length=1)
    """The environment variable with that server's key."""
    model: str | None = Field(None, min_length=1)
    """The model there that answers, whatever the application asks for; absent: its only one, or the one that the
    application asks for."""
    applications: dict[ApplicationName, Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """The applications by name, each with the number of its keys. Another number makes other keys, and the old ones
    invalid."""
    idle_minutes: float = Field(30.0, gt=0)
    """Minutes without a call after which a session has ended."""
    redact: tuple[str, ...] = ()
    """The patterns that are replaced in texts before they are stored: names of patterns ('email', 'card', 'phone',
    'ip', 'secret') and regular expressions of your own."""
    keep_days: float | None = Field(None, gt=0)
    """A session is removed for good this many days after its end; absent: it is kept."""

    @field_validator("redact")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                compiled = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
            if compiled.match(""):
                raise ValueError(f"{pattern!r} matches an empty text, and so would change every text")
        return value


class GateSection(Section):
    """The conditions on held-out tasks that a new version meets before it answers any session.

    Each compares it with the served version on the same tasks; docs/deploy-and-learn.md has the fixed ones.
    """

    tolerance: float = Field(0.05, ge=0)
    """How much lower its mean reward may be: the lower end of the 95% interval of the difference has to be above
    -tolerance, in each held-out set and mode."""


class CanarySection(Section):
    """How a version that passed the gate is tried on a share of the sessions."""

    share: float = Field(0.1, ge=0, le=0.5)
    """The share of new sessions that it answers; 0: there is no canary, and what passes the gate answers all new
    sessions."""
    reward: tuple[float, float] = (0.0, 1.0)
    """The smallest and the largest reward of a session; others count as these."""
    tolerance: float = Field(0.1, gt=0)
    """How much lower its live reward may be. It is promoted once the difference is above -tolerance with confidence,
    and rolled back once it is below 0 with confidence."""

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        low, high = self.reward
        if low >= high:
            raise ValueError(f"reward = [{low:g}, {high:g}] is no range: the first has to be below the second")
        return self


class LearnSection(Section):
    """Learning from sessions of real use, whose versions are served through a gate and a canary (`agl learn`)."""

    sessions_per_step: int = Field(16, ge=1)
    """Rewarded sessions that a step waits for."""
    offline_share: float = Field(0.25, ge=0, lt=1)
    """The share of a step's groups that are rollouts of [tasks.train], so that the policy does not forget them; 0:
    none."""
    max_staleness: int = Field(60, ge=0)
    """How many updates old the weights that answered a session may be. Older sessions are dropped."""
    propose_every: int = Field(20, ge=1)
    """Steps after which the weights are proposed as a new version."""
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


def online_section(loaded: LoadedConfig) -> OnlineSection:
    """The table `[online]`. ConfigError if the configuration has none, or does not say who answers."""
    online = loaded.sections.get("online")
    if online is None:
        raise ConfigError(
            "There is no [online] in the configuration, so there are no sessions to record. Add it "
            "(docs/deploy-and-learn.md). `agl train` has a server of its own."
        )
    section, learns = online.options, "learn" in loaded.sections
    assert isinstance(section, OnlineSection)
    if learns and section.upstream is not None:
        raise ConfigError(
            "With [learn], the run's own versions answer its sessions: leave out online.upstream, or [learn]."
        )
    if not learns and section.upstream is None:
        raise ConfigError(
            "[online] needs `upstream`, the model server that answers, or [learn]: the run's versions answer."
        )
    return section


def learn_section(loaded: LoadedConfig) -> LearnSection:
    """The table `[learn]`. ConfigError if the configuration has none.

    CapabilityError with everything that learning from sessions needs and the run does not have.
    """
    learn = loaded.sections.get("learn")
    if learn is None:
        raise ConfigError(
            "There is no [learn] in the configuration, so nothing is learned from sessions. Add it and [online] "
            "(docs/deploy-and-learn.md), or train on tasks: agl train."
        )
    if problems := list(_problems(loaded)):
        raise CapabilityError("\n  ".join(["The parts of this run do not go together:", *problems]))
    assert isinstance(learn.options, LearnSection)
    return learn.options


def _problems(loaded: LoadedConfig) -> Iterator[str]:
    config = loaded.config
    if len(config.policies) > 1:
        yield f"[learn] serves and tests the versions of one policy, and there are {len(config.policies)}. Keep one."
    if config.asynchronous.max_staleness:
        yield (
            "[async] has no place beside [learn]: a step waits for sessions, whose age [learn] max_staleness bounds. "
            "Leave [async] out."
        )
    if len(config.tasks) == 1:
        yield "[learn] has a gate, which tests versions on held-out tasks. Add a set of them: [tasks.eval]."
    if Mode.EVAL_SAMPLED not in config.eval.modes:
        yield "[learn] has a gate, which needs sampled replies to held-out tasks. Add 'eval-sampled' to eval.modes."
    if not any(Mode.USE in table.modes and table.weight for table in config.rewards.values()):
        yield (
            "[learn] learns from the rewards of sessions, and no rule scores any. Add one of what users say: "
            '[rewards.users] rule = "feedback", modes = ["use"].'
        )
    if Capability.RECORDED_TEXTS not in loaded.engine.component.provides:
        yield (
            f"[learn] limits how far a version may be from the served one, which {loaded.engine.label} cannot "
            f"measure. Use the engine torch."
        )
    for plan in loaded.policies.values():
        for chosen in needing(loaded, plan, Capability.GROUPS):
            yield (
                f"{chosen.label} compares several rollouts of each task, but a session of real use is the only one of "
                f"its kind ([learn]). Use an algorithm and rules that need no groups: reinforce++ or ppo, and credit "
                f"identical."
            )
        if not corrects_staleness(plan):
            yield (
                f"[learn] trains on sessions that earlier versions answered, but {plan.algorithm.label} does not "
                f"correct that. Set its importance_cap (2 is usual)."
            )
