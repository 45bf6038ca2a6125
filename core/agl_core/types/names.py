"""The closed vocabularies of agl, as enums instead of strings."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Mode(StrEnum):
    """The purpose of a rollout, which fixes the sampling at the gateway, whatever the agent asks for."""

    TRAIN = "train"
    EVAL_GREEDY = "eval-greedy"
    EVAL_SAMPLED = "eval-sampled"
    USE = "use"
    """Opened from outside the run: replies are sampled as the client asks."""

    @property
    def trains(self) -> bool:
        return self is Mode.TRAIN

    @property
    def evaluates(self) -> bool:
        return self in (Mode.EVAL_GREEDY, Mode.EVAL_SAMPLED)


class RolloutState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class Ending(StrEnum):
    """The end of an attempt."""

    FINISHED = "finished"
    CRASHED = "crashed"
    """The agent raised, or returned what is not JSON."""
    TIMED_OUT = "timed_out"
    NO_CALL = "no_call"
    """The agent returned without one LLM call through agl."""
    CONTEXT_OVERFLOW = "context_overflow"
    """A prompt was longer than the model's context and the agent did not recover."""
    CANCELLED = "cancelled"
    """The run stopped it."""
    LOST = "lost"
    """Its worker stopped sending heartbeats."""


class FinishReason(StrEnum):
    """Why a response ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    ABORTED = "aborted"
    """The model server broke it off: neither the policy nor a limit ended it."""

    @classmethod
    def read(cls, word: object, *, calls_tools: bool) -> FinishReason:
        """The reason for a model server's or framework's word, else by the response.

        >>> FinishReason.read("repetition", calls_tools=False), FinishReason.read(None, calls_tools=True)
        (<FinishReason.LENGTH: 'length'>, <FinishReason.TOOL_CALLS: 'tool_calls'>)
        """
        known = _FINISHED.get(word.lower()) if isinstance(word, str) else None
        return known or (cls.TOOL_CALLS if calls_tools else cls.STOP)

    @property
    def is_cut(self) -> bool:
        """True if the response has no end."""
        return self in (FinishReason.LENGTH, FinishReason.ABORTED)


_FINISHED: Mapping[str, FinishReason] = {
    **{reason.value: reason for reason in FinishReason},
    **dict.fromkeys(("tool_call", "tool_use", "function_call", "function_calls"), FinishReason.TOOL_CALLS),
    **dict.fromkeys(("max_tokens", "max_output_tokens", "model_length", "repetition"), FinishReason.LENGTH),
    **dict.fromkeys(("abort", "error", "cancelled", "insufficient_system_resource"), FinishReason.ABORTED),
}


HOUSEKEEPING = "housekeeping"
"""The name of the agent in calls that an agent's own code says are housekeeping (`Housekeeping.SETTING`)."""


class Housekeeping(StrEnum):
    """Why a call is one that a program makes for itself, for a session's title, say, and no work on the task."""

    PROGRAM = "program"
    """The program's own words or metadata say so."""
    SETTING = "setting"
    """Its agent is named `housekeeping`."""
    STRUCTURE = "structure"
    """A known program made it beside its work: without tools, with other instructions, and nothing came of it."""


class LineageKind(StrEnum):
    """How a conversation began."""

    MAIN = "main"
    """By itself."""
    SUB_AGENT = "sub_agent"
    """As a tool call of another conversation, which waits for it or goes on."""
    COMPACTION = "compaction"
    """In place of another one that had grown long: its summary, or what follows that."""
    BRANCH = "branch"
    """As another continuation of a call that was continued already, or with other instructions."""


class ToolStatus(StrEnum):
    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    EMPTY = "empty"
    """It returned None, an empty string or an empty container."""


class Source(StrEnum):
    """The origin of a tool result."""

    CONVERSATION = "conversation"
    """A later request of the agent, recorded by the gateway: the model itself got this result."""
    ADAPTER = "adapter"
    """Code in the agent's own process: a framework's adapter, or `agl_core.tool`."""
    SPAN = "span"
    """A span exported over OTLP."""
    COMMAND = "command"
    """A process of the agent's command."""


class CreditKind(StrEnum):
    """The meaning of a credited value: one step's reward, a sum with later ones, or what training multiplies by."""

    REWARD = "reward"
    RETURN = "return"
    ADVANTAGE = "advantage"
    """Compared with the group already: the algorithm neither subtracts a mean nor divides by a deviation."""


class DropReason(StrEnum):
    """Why a transition or an episode was not trained on (docs/faults.md). Each is counted and shown."""

    NO_TOKEN_IDS = "no_token_ids"
    INCOMPLETE_IDS = "incomplete_ids"
    NO_LOGPROBS = "no_logprobs"
    EMPTY_RESPONSE = "empty_response"
    NON_FINITE = "non_finite"
    UNTRAINED_AGENT = "untrained_agent"
    HOUSEKEEPING = "housekeeping"
    FULLY_MASKED = "fully_masked"
    PLUGIN = "plugin"
    ENDING = "ending"
    NO_TRANSITION = "no_transition"
    GROUP_TOO_SMALL = "group_too_small"
    NO_ADVANTAGE = "no_advantage"
    NO_CONTRAST = "no_contrast"
    REWARD_FAILED = "reward_failed"
    TOO_LONG = "too_long"
    DISTORTED = "distorted"
    CONSTRAINED = "constrained"
    NO_REWARD = "no_reward"
    ABORTED = "aborted"
    UNDELIVERED = "undelivered"
    STALLED = "stalled"
    TRUNCATED = "truncated"
    """The token limit cut a response of it off (`train.truncated`)."""
    STALE = "stale"


class PrefixBreak(StrEnum):
    """Why recorded token ids of an earlier reply were not spliced into a prompt that has it (docs/exactness.md)."""

    EDITED = "edited"
    MOVED = "moved"
    TEMPLATE = "template"
    REQUEST = "request"
    CUT = "cut"
    SERVER = "server"
    OTHER = "other"
    """The model server does not say."""


class Verdict(StrEnum):
    """A judgement on a rollout, by what was recorded of it: did it go as it should? (`agl_server.health.rollouts`)"""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNOBSERVED = "unobserved"
    """It has no symptom, but evidence is missing: it may have one that was not recorded."""


class Symptom(StrEnum):
    """Why a rollout is unhealthy (docs/health.md)."""

    ENDING = "ending"
    REWARD_FAILED = "reward_failed"
    TRUNCATED = "truncated"
    PARSE_ERROR = "parse_error"
    REPETITION = "repetition"
    GIBBERISH = "gibberish"
    EMPTY_ANSWER = "empty_answer"
    TOOLS_FAILED = "tools_failed"
    PREFIX_BROKEN = "prefix_broken"
    PROMPT_CUT = "prompt_cut"


class Evidence(StrEnum):
    """A part of a rollout that was not recorded, though it happened (docs/health.md)."""

    CALLS = "calls"
    TOKEN_IDS = "token_ids"
    TOOL_RESULTS = "tool_results"
    AGENT_NAMES = "agent_names"


class AlarmName(StrEnum):
    """An alarm of a run, which a configuration may switch off or give a threshold (docs/health.md)."""

    REWARD_COLLAPSE = "reward_collapse"
    ENTROPY_COLLAPSE = "entropy_collapse"
    ENTROPY_EXPLOSION = "entropy_explosion"
    KL_RUNAWAY = "kl_runaway"
    KL_REFERENCE_RUNAWAY = "kl_reference_runaway"
    NO_CONTRAST = "no_contrast"
    TRUNCATED = "truncated"
    PARSE_ERRORS = "parse_errors"
    REPETITION = "repetition"
    GIBBERISH = "gibberish"
    TOOL_ERRORS = "tool_errors"
    TOOLS_FARMED = "tools_farmed"
    EMPTY_ANSWERS = "empty_answers"
    BROKEN_PREFIXES = "broken_prefixes"
    STALE = "stale"
    GRADIENT_SPIKE = "gradient_spike"
    LOGPROB_GAP = "logprob_gap"
    NO_REWARD = "no_reward"
    NO_RESULT = "no_result"
    CACHED_REPLIES = "cached_replies"
    FAILURES = "failures"
    REWARD_FAILED = "reward_failed"
    ASSERTED_TOOL_RESULTS = "asserted_tool_results"
    CONTRADICTED_TOOL_RESULTS = "contradicted_tool_results"
    ASSERTED_REWARDS = "asserted_rewards"
    STALL = "stall"

    @property
    def has_threshold(self) -> bool:
        """False for those that look at rollouts, and can only be switched off."""
        return self not in _ON_ROLLOUTS


_ON_ROLLOUTS = {
    *(AlarmName.NO_REWARD, AlarmName.NO_RESULT, AlarmName.CACHED_REPLIES, AlarmName.FAILURES, AlarmName.REWARD_FAILED),
    *(AlarmName.ASSERTED_TOOL_RESULTS, AlarmName.CONTRADICTED_TOOL_RESULTS, AlarmName.ASSERTED_REWARDS),
}
