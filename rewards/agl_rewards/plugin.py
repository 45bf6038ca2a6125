"""What this package registers."""

from agl_core import Need, hookimpl
from agl_core.plugins import Register
from agl_rewards.air import ToolOutcomesOptions, air, functions_needed, tool_outcomes
from agl_rewards.evaluators import exact_match, numeric_match, regex_format
from agl_rewards.f1 import token_f1
from agl_rewards.judge import Judge, JudgeOptions
from agl_rewards.sql import sql_match

__all__ = ["air", "exact_match", "numeric_match", "regex_format", "register_rewards", "sql_match", "token_f1"]


@hookimpl
def register_rewards(register: Register) -> None:
    """The rules that are made once for a run, from their settings."""
    register("judge", Judge, options=JudgeOptions)
    register(
        "tool_outcomes",
        tool_outcomes,
        options=ToolOutcomesOptions,
        needs=functions_needed,
        provides={Need.OUTCOMES},
    )
