"""Reward rules for agl: the stock evaluators."""

from agl_rewards.evaluators import exact_match, last_number, numeric_match, regex_format

__all__ = ["exact_match", "last_number", "numeric_match", "regex_format"]
