"""The package's components; importing those that a decorator made registers them."""

from agl_core import Capability, hookimpl, kinds
from agl_core.kinds import Register
from agl_rewards.air import AirOptions, ToolResultsOptions, air, tool_results
from agl_rewards.evaluators import exact_match as exact_match
from agl_rewards.evaluators import numeric_match as numeric_match
from agl_rewards.evaluators import overlong as overlong
from agl_rewards.evaluators import regex_format as regex_format
from agl_rewards.evaluators import token_f1 as token_f1
from agl_rewards.group_credit import gigpo as gigpo
from agl_rewards.judge import JudgeOptions, judge
from agl_rewards.reasoning import ReasoningGymRule
from agl_rewards.reasoning import reasoning_gym_tasks as reasoning_gym_tasks
from agl_rewards.relative import RelativeJudgeOptions, relative_judge
from agl_rewards.sql import sql_match as sql_match


@hookimpl
def register_components(register: Register) -> None:
    """Register the rules that are made once for a run, from their settings."""
    tools, groups = {Capability.TOOL_RESULTS}, {Capability.GROUPS}
    register(kinds.REWARD, "judge", judge, options=JudgeOptions)
    register(kinds.REWARD, "relative_judge", relative_judge, options=RelativeJudgeOptions, needs=groups)
    register(kinds.REWARD, "tool_results", tool_results, options=ToolResultsOptions, provides=tools, needs=groups)
    register(
        kinds.CREDIT, "air", air, options=AirOptions, yields=AirOptions.yields, needs=AirOptions.needs, provides=tools
    )
    register(
        kinds.REWARD,
        "reasoning_gym",
        lambda options, _: ReasoningGymRule(),
        doc="The score that the dataset's own verifier gives the agent's result; for tasks of reasoning_gym.",
    )
