"""What this package registers."""

from agl_rewards.evaluators import exact_match, numeric_match, regex_format

__all__ = ["exact_match", "numeric_match", "regex_format"]
