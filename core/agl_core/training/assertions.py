"""Cautions about rewards and tool results that only the agent's side asserts (docs/security.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agl_core.config import LoadedConfig
from agl_core.learning.rewards import AGENT_SOURCE
from agl_core.registering import Capability
from agl_core.types import Episode

_WHY = "Whatever the agent starts can say the same: see docs/security.md."


@dataclass
class Assertions:
    """Cautions, once for tool results and once for rewards, that the run rests on what the agent's side alone
    asserts."""

    of_tool_results: bool = False
    """A rule of the run computes rewards or credit from tool results; false once the caution was given."""
    of_rewards: bool = False
    """No reward rule of the run has a weight, so the reward is what the agent reports; false once the caution was
    given."""

    @classmethod
    def in_run(cls, loaded: LoadedConfig) -> Assertions:
        """The cautions that a run with this configuration may need."""
        rules = [chosen for name, chosen in loaded.rewards.items() if loaded.config.rewards[name].weight]
        counting = [*rules, *(plan.credit for plan in loaded.policies.values())]
        return cls(any(Capability.TOOL_RESULTS in chosen.component.provides for chosen in counting), not rules)

    def noticed(self, episodes: Sequence[Episode]) -> Iterator[str]:
        """The cautions for the episodes of a step."""
        tool_results = [tool_result for e in episodes for t in e.transitions for tool_result in t.tool_results]
        if (
            self.of_tool_results
            and tool_results
            and all(tool_result.source.is_asserted for tool_result in tool_results)
        ):
            self.of_tool_results = False
            sources = Counter(tool_result.source.value for tool_result in tool_results).most_common()
            told = ", ".join(f"{source} {count}" for source, count in sources)
            yield (
                f"caution: tool results count in the reward, and only the agent's side says what they were ({told}). "
                f"{_WHY}"
            )
        if self.of_rewards and any(reward.source == AGENT_SOURCE for e in episodes for reward in e.rewards):
            self.of_rewards = False
            yield f"caution: the reward is what the agent reports: no rule in [rewards] has a weight. {_WHY}"
