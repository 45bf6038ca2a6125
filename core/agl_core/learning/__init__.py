"""Calls and outcomes → transitions → rewards → credit → batch: pure functions, no I/O."""

from agl_core.learning.batch import PolicyCredit, StepBatches, make_batches
from agl_core.learning.credit import credit_group, episode_return, identical
from agl_core.learning.rewards import ScoringRule, score, score_all, was_rewarded
from agl_core.learning.staleness import staleness, without_stale
from agl_core.learning.transitions import build_episode

__all__ = [
    "PolicyCredit",
    "ScoringRule",
    "StepBatches",
    "build_episode",
    "credit_group",
    "episode_return",
    "identical",
    "make_batches",
    "score",
    "score_all",
    "staleness",
    "was_rewarded",
    "without_stale",
]
