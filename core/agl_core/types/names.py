"""The closed vocabularies of agl, as enums instead of strings."""

from enum import StrEnum


class Mode(StrEnum):
    """What a rollout is for; it fixes the sampling at the gateway, over what the agent asks for."""

    TRAIN = "train"
    EVAL_GREEDY = "eval-greedy"
    EVAL_SAMPLED = "eval-sampled"

    @property
    def trains(self) -> bool:
        return self is Mode.TRAIN


class RolloutState(StrEnum):
    """Where a rollout is in its life: queued, then running, then done."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class Ending(StrEnum):
    """How an attempt ended. Everything an agent can do ends as one of these."""

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


class ToolStatus(StrEnum):
    """How a tool call ended."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    EMPTY = "empty"
    """It returned None, an empty string or an empty container."""


class Source(StrEnum):
    """Where a tool result comes from."""

    CONVERSATION = "conversation"
    """A later request of the agent, as the gateway recorded it: the model itself was given this result."""
    ADAPTER = "adapter"
    """Code in the agent's own process: a framework's adapter, or `agl_core.tool`."""
    SPAN = "span"
    """A span that was exported over OTLP."""
    COMMAND = "command"
    """A report of a process of the agent's command."""

    @property
    def is_asserted(self) -> bool:
        """Whether only the agent's side asserts it, and nothing that the gateway recorded shows it."""
        return self is not Source.CONVERSATION


class CreditKind(StrEnum):
    """Whether a credited value is what one step earned, or already contains what came after."""

    REWARD = "reward"
    RETURN = "return"


class DropReason(StrEnum):
    """Why a transition or an episode was not trained on. Each is counted and shown."""

    NO_TOKEN_IDS = "no_token_ids"
    NO_LOGPROBS = "no_logprobs"
    EMPTY_RESPONSE = "empty_response"
    NON_FINITE = "non_finite"
    UNTRAINED_AGENT = "untrained_agent"
    FULLY_MASKED = "fully_masked"
    """No token of the response was sampled by the policy (all were forced)."""
    PLUGIN = "plugin"
    """An `episode_built` hook dropped it."""
    ENDING = "ending"
    """The run's table of endings drops rollouts that ended like this."""
    NO_TRANSITION = "no_transition"
    """The episode has no transition that can be trained on."""
    GROUP_TOO_SMALL = "group_too_small"
    """Its group lost so many members that nothing is left to compare with."""
    NO_ADVANTAGE = "no_advantage"
    """The algorithm gave it an advantage of exactly zero (for GRPO: the group's rewards are equal)."""
    REWARD_FAILED = "reward_failed"
    """A reward rule raised."""
    TOO_LONG = "too_long"
    """Longer than the engine can train on."""
    STALE = "stale"
    """A call of its episode was answered by weights that are too many updates old (`async.max_staleness`)."""
