"""All alarms: when each is raised, why it matters and what to do. docs/health.md is made of this table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from agl_core.training.alarms.conditions import (
    Above,
    CertainWithoutLearning,
    Collapsed,
    Condition,
    Exploded,
    Measure,
    Spiked,
)
from agl_core.types import AlarmName

_RESPONSES = ("rollouts", "rollout/turns")
_ASSERTED = "Whatever the agent starts can say the same, and so earn rewards that it does not deserve."
_TRUST = "See docs/security.md."


@dataclass(frozen=True)
class Alarm:
    """An alarm that was raised."""

    name: AlarmName
    seen: str
    """What was seen, with its numbers."""
    why: str
    """Why it matters."""
    remedy: str
    """What to do."""
    details: str = ""
    """More of what was seen, in lines of its own: the first error, for example."""

    @property
    def text(self) -> str:
        said = " ".join(part for part in (f"{self.seen}.", self.why, self.remedy) if part)
        return f"alarm {self.name}: {said}" + (f" {self.details}" if self.details else "")


@dataclass(frozen=True)
class Kind:
    """What there is to say of one alarm."""

    why: str
    remedy: str
    condition: Condition | None = None
    """On the numbers of the steps; None: other code raises it, by `raised`."""
    when: str = ""
    """When other code raises it."""


def raised(name: AlarmName, seen: str, *, remedy: str | None = None, details: str = "") -> Alarm:
    """The alarm of this name, with what was seen; `remedy` is for a cause that is known more exactly."""
    kind = ALARMS[name]
    return Alarm(name, seen, kind.why, kind.remedy if remedy is None else remedy, details)


ALARMS: Mapping[AlarmName, Kind] = {
    AlarmName.REWARD_COLLAPSE: Kind(
        "The policy forgets what it had learned, and rarely recovers by itself.",
        "Go on from the best checkpoint (agl train --resume RUN/checkpoints/STEP) with a smaller learning rate, or "
        "with a KL term (algorithm.grpo.beta).",
        Collapsed(0.5),
    ),
    AlarmName.ENTROPY_COLLAPSE: Kind(
        "The policy became certain without becoming better: it explores no more, and groups have no contrast.",
        "Lower the learning rate, raise the sampling temperature, or go on from an earlier checkpoint.",
        CertainWithoutLearning(0.1),
    ),
    AlarmName.ENTROPY_EXPLOSION: Kind(
        "The policy drifts towards chance; its responses soon are gibberish.",
        "Lower the learning rate, train fewer epochs on each batch, or go on from an earlier checkpoint.",
        Exploded(3.0, least=1.0),
    ),
    AlarmName.KL_RUNAWAY: Kind(
        "One update moves the policy far from the one that sampled the data, so that the data no longer fit it.",
        "Lower the learning rate or the epochs of the algorithm; in asynchronous runs lower async.max_staleness.",
        Above(Measure("KL(behaviour ‖ current) is {}", "update/kl_behaviour"), 0.5, reduce=median),
    ),
    AlarmName.KL_REFERENCE_RUNAWAY: Kind(
        "The policy is far from the initial weights: it loses what these could do, and may exploit the reward.",
        "Read some rollouts with high rewards. Raise the KL term (algorithm.grpo.beta), or lower the learning rate.",
        Above(Measure("KL(current ‖ initial weights) is {}", "update/kl_reference"), 3.0, reduce=median),
    ),
    AlarmName.NO_CONTRAST: Kind(
        "Where all rewards of a group are equal, its advantages are 0: these rollouts teach nothing.",
        "If the reward is at its best, the run is done. Otherwise choose tasks of medium difficulty, make groups "
        "larger (train.group_size), or give rewards for parts of the way.",
        Above(Measure("{} of the groups have equal rewards", "groups/no_contrast"), 0.95, over=5),
    ),
    AlarmName.TRUNCATED: Kind(
        "A truncated response has no end: its answer or its tool call is missing, and it is trained on all the same.",
        "Raise sampling.max_tokens, or reward shorter responses.",
        Above(Measure("{} of the responses reach the token limit", "length/truncated"), 0.2),
    ),
    AlarmName.PARSE_ERRORS: Kind(
        "A tool call that does not parse is not run, and the agent goes on without its result.",
        "Look at some (agl rollouts --verdict unhealthy). Check that the chat template and the model's tool format go "
        "together; a reward for well-formed calls helps.",
        Above(Measure("{} of the responses have tool calls that do not parse", "calls/parse_errors", _RESPONSES), 0.2),
    ),
    AlarmName.REPETITION: Kind(
        "Responses that loop are a sign of a policy that is trained too hard, or of a reward for length.",
        "Lower the learning rate, or go on from an earlier checkpoint; check what the reward says of long responses.",
        Above(Measure("{} of the responses end in a loop", "responses/repetitive"), 0.1),
    ),
    AlarmName.GIBBERISH: Kind(
        "Responses that are no text show weights that broke, or a server that samples with other weights.",
        "Check the learning rate and update/logprob_gap_max, and go on from an earlier checkpoint.",
        Above(Measure("{} of the responses are gibberish", "responses/gibberish"), 0.1),
    ),
    AlarmName.TOOL_ERRORS: Kind(
        "The agent learns from what failing tools say, and a service behind them may be down.",
        "Read the errors (agl show ROLLOUT). If a service fails, mend it and go on from the checkpoint before; if the "
        "policy makes worse calls, reward calls that work.",
        Above(Measure("{} of the tool calls fail", "tool_results/failed"), 0.3, rise=0.2),
    ),
    AlarmName.QUESTIONS: Kind(
        "The policy asks instead of answering, perhaps because the reward likes it.",
        "Read some of these rollouts, and check what the reward says of them.",
        Above(Measure("{} of the answers are questions", "answers/question"), 0.3, rise=0.2),
    ),
    AlarmName.EMPTY_ANSWERS: Kind(
        "The policy says nothing: a reward that punishes wrong answers more than none teaches that.",
        "Compare the reward of empty answers with that of wrong ones, and check the chat template's end token.",
        Above(Measure("{} of the answers are empty", "answers/empty"), 0.2, rise=0.1),
    ),
    AlarmName.BROKEN_PREFIXES: Kind(
        "The policy sees its earlier replies with other tokens than it sampled, and prefixes are computed again.",
        "Have the agent send its replies back as it got them, without rewriting or trimming; see docs/bad-input.md.",
        Above(
            Measure("{} of the responses have a broken prefix before them", "calls/prefix_broken", _RESPONSES),
            0.1,
        ),
    ),
    AlarmName.STALE: Kind(
        "Rollouts are run and then thrown away, because the policy has moved on meanwhile.",
        "Lower async.in_flight, raise async.max_staleness, or add workers.",
        Above(
            Measure(
                "{} of the transitions are too old to be trained on",
                "dropped/stale",
                ("transitions/kept",),
                ("transitions/dropped",),
            ),
            0.2,
        ),
    ),
    AlarmName.CLIP_FRACTION: Kind(
        "Where the ratio is clipped the gradient is 0: much of the batch no longer teaches anything.",
        "Lower the learning rate, the epochs or the minibatches of the algorithm.",
        Above(Measure("{} of the tokens are clipped", "update/clip_fraction"), 0.3),
    ),
    AlarmName.GRADIENT_SPIKE: Kind(
        "One batch pulls the weights much harder than others; clipping hides its size, not its direction.",
        "Look at the rollouts of this step. If spikes come again, lower the learning rate or the gradient's limit.",
        Spiked(Measure("the gradient norm is {}", "update/grad_norm"), 10.0, least=10.0),
    ),
    AlarmName.LOGPROB_GAP: Kind(
        "The server that samples and the trainer disagree about the same tokens, so that ratios are wrong.",
        "Check that both have the same weights, dtype and temperature, and switch on truncated importance weights.",
        Above(
            Measure("the largest difference of log-probabilities is {} nats", "update/logprob_gap_max"),
            1.0,
            reduce=median,
        ),
    ),
    AlarmName.NO_REWARD: Kind(
        "All rollouts count as 0, and nothing can be learned.",
        "Name a rule in [rewards], or have the agent return a number or call agl_core.reward.",
        when="no rule had anything to say of any rollout of a step, and no agent reported a reward",
    ),
    AlarmName.NOTHING_TO_TRAIN: Kind(
        "Only the agents in train.agents are trained.",
        "Agents get their names from an adapter, or from agl_core.agent.",
        when="none of the agents that made calls in a step is named by train.agents",
    ),
    AlarmName.FAILURES: Kind(
        "Rollouts that fail teach little or nothing.",
        "Mend what the first error says.",
        when="all rollouts of a step, or of an evaluation, failed in one way; or some of the first evaluation",
    ),
    AlarmName.ASSERTED_TOOL_RESULTS: Kind(
        _ASSERTED,
        _TRUST,
        when="tool results count in reward or credit, and only the agent's side says what some were; raised once",
    ),
    AlarmName.CONTRADICTED_TOOL_RESULTS: Kind(
        "Something that the agent starts may be forging reports, or a tool's report is wrong.",
        "Read these rollouts (agl show ROLLOUT) and see docs/security.md.",
        when="tool results of a step were reported as a success, and the model was shown a failure, which counts",
    ),
    AlarmName.ASSERTED_REWARDS: Kind(
        _ASSERTED,
        _TRUST,
        when="no rule in [rewards] has a weight, and the reward is what the agent reports; raised once",
    ),
    AlarmName.STALL: Kind(
        "Training waits, and nothing is learned meanwhile.",
        "It depends on who waits for whom: see below, or ask agl doctor RUN.",
        when="nothing finished for three times the longest duration of a rollout so far, at least 30 seconds; or for "
        "as many seconds as you set",
    ),
}
"""Every alarm, by name."""
