"""What training takes from another run instead of running the agent, and replies that are known as texts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agl_core.types.records import Attempt, Call, Json, Reward, Rollout, Tokens, ToolResult


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRollout:
    """A rollout of another run, with what was recorded of its counted attempt."""

    rollout: Rollout
    attempt: Attempt
    calls: Sequence[Call]
    tool_results: Sequence[ToolResult]
    rewards: Sequence[Reward]
    terminal: float | None
    """Its terminal reward in that run; None without one."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedReply:
    """A reply that was recorded as text, and what it was a reply to."""

    messages: Sequence[Mapping[str, Json]]
    tools: Sequence[Mapping[str, Json]]
    response: Mapping[str, Json]
    is_complete: bool = True
    """Whether it ended by itself, so that an end token belongs to it."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedReply:
    """The token ids that a policy's tokenizer and chat template make of a reply."""

    prompt_ids: Tokens
    response_ids: Tokens
