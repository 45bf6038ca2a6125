"""The package's components."""

from agl_core import Capability, hookimpl, kinds
from agl_core.kinds import Register
from agl_rewards.air import ToolResultsOptions, air, tool_results
from agl_rewards.evaluators import exact_match, numeric_match, regex_format, token_f1
from agl_rewards.judge import Judge, JudgeOptions
from agl_rewards.reasoning import ReasoningGymOptions, ReasoningGymTasks, Verified
from agl_rewards.signals import abandoned, asked_again, tool_failed
from agl_rewards.sql import sql_match

__all__ = [
    "abandoned",
    "air",
    "asked_again",
    "exact_match",
    "numeric_match",
    "regex_format",
    "register_components",
    "sql_match",
    "token_f1",
    "tool_failed",
]


@hookimpl
def register_components(register: Register) -> None:
    """The rules that are made once for a run, from their settings, and tasks that come with a verifier of their own."""
    register(kinds.REWARD, "judge", Judge, options=JudgeOptions)
    register(
        kinds.REWARD,
        "tool_results",
        tool_results,
        options=ToolResultsOptions,
        provides={Capability.TOOL_RESULTS},
    )
    register(
        kinds.REWARD,
        "reasoning_gym",
        lambda options: Verified(),
        doc="The score that the dataset's own verifier gives the agent's result; for tasks of reasoning_gym.",
    )
    register(
        kinds.TASK_SOURCE,
        "reasoning_gym",
        ReasoningGymTasks,
        options=ReasoningGymOptions,
        doc="A hundred kinds of tasks with verifiers, made anew for each seed (needs `agl-rewards[reasoning-gym]`).",
    )
