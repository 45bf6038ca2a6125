"""Reward rules for agl: AIR and the stock evaluators."""

from agl_rewards.air import ToolResultsOptions as ToolResultsOptions
from agl_rewards.air import tool_results as tool_results
from agl_rewards.evaluators import exact_match as exact_match
from agl_rewards.evaluators import last_number as last_number
from agl_rewards.evaluators import numeric_match as numeric_match
from agl_rewards.evaluators import regex_format as regex_format
from agl_rewards.evaluators import token_f1 as token_f1
from agl_rewards.evaluators import word_f1 as word_f1
from agl_rewards.judge import JudgeError as JudgeError
from agl_rewards.judge import JudgeOptions as JudgeOptions
from agl_rewards.relative import RelativeJudgeOptions as RelativeJudgeOptions
from agl_rewards.relative import relative_judge as relative_judge
from agl_rewards.sql import run_query as run_query
from agl_rewards.sql import same_rows as same_rows
from agl_rewards.sql import sql_match as sql_match
