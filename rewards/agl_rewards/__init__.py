"""Reward rules for agl: AIR and the stock evaluators."""

from agl_rewards.evaluators import exact_match as exact_match
from agl_rewards.evaluators import last_number as last_number
from agl_rewards.evaluators import numeric_match as numeric_match
from agl_rewards.evaluators import regex_format as regex_format
from agl_rewards.evaluators import token_f1 as token_f1
from agl_rewards.evaluators import word_f1 as word_f1
from agl_rewards.judge import JudgeError as JudgeError
from agl_rewards.sql import run_query as run_query
from agl_rewards.sql import sql_match as sql_match
