"""Reward rules for agl: AIR and the stock evaluators."""

from agl_rewards.air import ToolResultsOptions, tool_results
from agl_rewards.evaluators import exact_match, last_number, numeric_match, regex_format, token_f1, word_f1
from agl_rewards.judge import Judge, JudgeError, JudgeOptions, score_in
from agl_rewards.sql import run_query, same_rows, sql_match

__all__ = [
    "Judge",
    "JudgeError",
    "JudgeOptions",
    "ToolResultsOptions",
    "exact_match",
    "last_number",
    "numeric_match",
    "regex_format",
    "run_query",
    "same_rows",
    "score_in",
    "sql_match",
    "token_f1",
    "tool_results",
    "word_f1",
]
