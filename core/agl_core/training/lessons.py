"""Why a step taught nothing, if that is for the user to mend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from agl_core.learning import was_rewarded
from agl_core.types import DropReason, Episode, Use


def missing_lessons(episodes: Sequence[Episode], uses: Sequence[Use], agents: Sequence[str]) -> Iterator[str]:
    """What to say of a step in which nobody rewarded anything, or none of the chosen agents made a call."""
    judged = [episode for episode in episodes if episode.dropped is None]
    if judged and not any(map(was_rewarded, judged)):
        yield (
            f"no reward: no rule in [rewards] had anything to say of {len(judged)} rollouts, and no agent reported a "
            f"reward, so that all count as 0. Name a rule in [rewards], or have the agent return a number or call "
            f"agl_core.reward."
        )
    if uses and all(use.dropped == DropReason.UNTRAINED_AGENT for use in uses):
        calls = Counter(transition.agent for episode in episodes for transition in episode.transitions)
        seen = ", ".join(f"{agent or 'unnamed'} ({count} calls)" for agent, count in calls.most_common(5))
        yield (
            f"nothing to train: train.agents = {list(agents)} names none of the agents that made calls: {seen}. Agents "
            f"get their names from an adapter, or from agl_core.agent."
        )
