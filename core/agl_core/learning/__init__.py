"""Calls and tool results → transitions → rewards → credit → batch: pure functions, no I/O."""

from agl_core.learning.batch import BatchPlan, PolicyCredit, StepBatches, make_batches, staleness, without_stale
from agl_core.learning.health import RolloutHealth, health_of
from agl_core.learning.rewards import ScoringRule, score, score_all, score_groups, was_rewarded
from agl_core.learning.transitions import build_episode

__all__ = [
    "BatchPlan",
    "PolicyCredit",
    "RolloutHealth",
    "ScoringRule",
    "StepBatches",
    "build_episode",
    "health_of",
    "make_batches",
    "score",
    "score_all",
    "score_groups",
    "staleness",
    "was_rewarded",
    "without_stale",
]
