"""The table of what can be wrong with a run: each alarm with its signal and threshold, why it matters, what to do.

Messages, docs/health.md, the browser and the commands take their words from here; `agl_server.health.alarms` looks at a
run. A signal on numbers says nothing as long as steps lack one of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TypeAlias

from agl_core.learning.rewards import AGENT_SOURCE, was_rewarded
from agl_core.learning.tool_results import CONTRADICTED, has_failed, tool_calls_of
from agl_core.types import AlarmName, DropReason, Ending, Episode, Source, ToolResult

Numbers: TypeAlias = Mapping[str, float]
"""The metrics of one training step (docs/health.md)."""

FIRST = 5
"""The steps at the start of a run that later ones are compared with."""
SHORTEST_STALL = 60.0
"""Seconds that may always pass without the end of a rollout."""


@dataclass(frozen=True)
class Signal:
    """The observation of an alarm in the numbers of the steps."""

    limit: float
    """The threshold; a run may set its own."""
    check: Callable[[Sequence[Numbers], float], str | None]
    """The observation after these steps with this threshold; None if there is nothing to see."""
    when: str
    """The same in words; `{}` is the threshold."""
    of_update: bool = False
    """True if it looks at updates, of which each policy has its own."""


def average(
    limit: float,
    words: str,
    key: str,
    *,
    per: Callable[[Numbers], float | None] | None = None,
    steps: int = 3,
    rise: float = 0.0,
    by: Callable[[Sequence[float]], float] = fmean,
) -> Signal:
    """A signal on a metric, as a share of what `per` counts: its average over the last steps reaches the threshold.

    It is also `rise` above that of the first steps, if `rise` is given. `{}` in `words` is the average.
    """

    def number(step: Numbers) -> float | None:
        if per is None:
            return step.get(key)
        total = per(step)
        return step.get(key, 0.0) / total if total else None

    def check(history: Sequence[Numbers], limit: float) -> str | None:
        recent = _last([number(step) for step in history[-steps:]], steps)
        if recent is None or (value := by(recent)) < limit:
            return None
        seen = f"{words.format(f'{value:.3g}')} over the last {steps} steps"
        if not rise:
            return seen
        first = _first([number(step) for step in history])
        return None if first is None or value < first + rise else f"{seen}, and {first:.3g} in the first {FIRST}"

    risen = f", and {rise:g} more than in the first {FIRST} steps" if rise else ""
    when = f"{words.format('at least {}')}{risen}: {'median' if by is median else 'mean'} of {steps} steps."
    return Signal(limit, check, f"{when[0].upper()}{when[1:]}", key.startswith("update/"))


def _responses(step: Numbers) -> float | None:
    return step["rollouts"] * step["rollout/turns"] if step.keys() >= {"rollouts", "rollout/turns"} else None


def _transitions(step: Numbers) -> float | None:
    return step["transitions/kept"] + step.get("transitions/dropped", 0.0) if "transitions/kept" in step else None


def _reward_collapse(steps: Sequence[Numbers], limit: float) -> str | None:
    known = [step for step in steps if "reward/mean" in step]
    if len(known) < 6:
        return None
    rewards = [step["reward/mean"] for step in known]
    variances = [step.get("reward/std", 0.0) ** 2 / max(step.get("rollouts", 1.0), 1.0) for step in known]
    windows = [fmean(rewards[i : i + 3]) for i in range(len(rewards) - 2)]
    best, last = max(windows), windows[-1]
    start = windows.index(best)
    noise = 4 * math.sqrt(fmean(variances[start : start + 3]) / 3)
    if best - last < max(limit * (best - min(0.0, *rewards)), noise) or best == last:
        return None
    return f"the mean reward fell from {best:.3g} to {last:.3g}, each over 3 steps"


def _entropy_collapse(steps: Sequence[Numbers], limit: float) -> str | None:
    entropies, rewards = ([step.get(key) for step in steps] for key in ("update/entropy", "reward/mean"))
    before, now, first, last = _first(entropies), _last(entropies, 5), _first(rewards), _last(rewards, 5)
    if before is None or now is None or fmean(now) >= limit * before:
        return None
    if first is None or last is None or fmean(last) > first:
        return None
    return f"the entropy fell from {before:.3g} to {fmean(now):.3g} nats per token, and the reward did not rise"


def _entropy_explosion(steps: Sequence[Numbers], limit: float) -> str | None:
    entropies = [step.get("update/entropy") for step in steps]
    before, now = _first(entropies), _last(entropies, 3)
    if before is None or now is None or fmean(now) < max(limit * before, 1.0):
        return None
    return f"the entropy rose from {before:.3g} to {fmean(now):.3g} nats per token"


def _gradient_spike(steps: Sequence[Numbers], limit: float) -> str | None:
    *earlier, now = [step.get("update/grad_norm") for step in steps] or [None]
    before = [norm for norm in earlier if norm is not None][-10:]
    if now is None or len(before) < FIRST or now < max(limit * median(before), 10.0):
        return None
    return f"the gradient norm is {now:.3g}; the median of the steps before is {median(before):.3g}"


def _tools_farmed(steps: Sequence[Numbers], limit: float) -> str | None:
    seen = [*steps[:2], *steps[2:][-3:]]
    worked, rewards = ([step[key] for step in seen if key in step] for key in ("tool_results/ok", "reward/mean"))
    if len(worked) < 5 or len(rewards) < 5:
        return None
    start, before, after = fmean(worked[:2]), fmean(rewards[:2]), fmean(rewards[2:])
    chance = 3 * math.sqrt(start * (1 - start) / min(filter(None, map(_responses, seen)), default=math.inf))
    if min(worked[2:]) - start < max(limit, chance) or after - before > 0.01 * max(map(abs, rewards)):
        return None
    return f"{fmean(worked[2:]):.0%} of the tool calls work, {start:.0%} at first, for a reward of {after:.3g}"


def _last(values: Sequence[float | None], count: int) -> list[float] | None:
    """The values of the last `count` steps; None unless all of them have one."""
    known = [value for value in values[-count:] if value is not None]
    return known if len(known) == count else None


def _first(values: Sequence[float | None]) -> float | None:
    """The mean over the first steps that have a value; None if there are no later ones."""
    known = [value for value in values if value is not None]
    return fmean(known[:FIRST]) if len(known) > FIRST else None


def _no_reward(episodes: Sequence[Episode]) -> str | None:
    scored = [episode for episode in episodes if episode.dropped is None]
    if not scored or any(map(was_rewarded, scored)):
        return None
    return f"no rule in [rewards] had anything to say of {len(scored)} rollouts, and no agent reported a reward"


def _no_result(episodes: Sequence[Episode]) -> str | None:
    finished = [episode for episode in episodes if episode.ending is Ending.FINISHED]
    reported = any(reward.source == AGENT_SOURCE for episode in finished for reward in episode.rewards)
    if not finished or reported or any((e.result, e.terminal) != (None, finished[0].terminal) for e in finished):
        return None
    return f"the result was null in all {len(finished)} rollouts"


def _cached_replies(episodes: Sequence[Episode]) -> str | None:
    groups, cached = defaultdict[str, list[Episode]](list), list[str]()
    for episode in episodes:
        groups[episode.group].append(episode)
    for group in groups.values():
        got = {e.rollout: {call["id"] for t in e.transitions for call in tool_calls_of(t.response)} for e in group}
        for episode in group:
            others = set().union(*(ids for rollout, ids in got.items() if rollout != episode.rollout))
            last = episode.transitions[-1].messages if episode.transitions else ()
            copied = {call["id"] for message in last for call in tool_calls_of(message)} - got[episode.rollout]
            is_silent = episode.ending is Ending.NO_CALL and any(other.transitions for other in group)
            if is_silent or copied & others:
                cached.append(episode.rollout)
    return f"{len(cached)} of {len(episodes)} rollouts seem to have got replies from a cache" if cached else None


def _asserted_tool_results(episodes: Sequence[Episode]) -> str | None:
    tool_results = _tool_results(episodes)
    asserted = Counter(r.source.value for r in tool_results if r.source is not Source.CONVERSATION).most_common()
    if not asserted:
        return None
    sources = ", ".join(f"{source} {count}" for source, count in asserted)
    return (
        f"tool results count in the reward, and only the agent's side says what some of the {len(tool_results)} of "
        f"this step were ({sources})"
    )


def _contradicted_tool_results(episodes: Sequence[Episode]) -> str | None:
    tool_results = _tool_results(episodes)
    denied = [result for result in tool_results if result.status_rule == CONTRADICTED and has_failed(result)]
    if not denied:
        return None
    return (
        f"{len(denied)} of {len(tool_results)} tool results were reported as a success, and the model was shown a "
        f"failure, which counts (the first: {denied[0].tool} in {denied[0].rollout})"
    )


def _asserted_rewards(episodes: Sequence[Episode]) -> str | None:
    if all(reward.source != AGENT_SOURCE for episode in episodes for reward in episode.rewards):
        return None
    return "the reward is what the agent reports: no rule in [rewards] has a weight"


def _tool_results(episodes: Sequence[Episode]) -> list[ToolResult]:
    return [result for episode in episodes for t in episode.transitions for result in t.tool_results]


@dataclass(frozen=True)
class AlarmFacts:
    """One row: why an alarm matters, what to do, and its signal; the run itself sees those without one."""

    why: str
    remedy: str
    signal: Signal | None = None
    """In numbers, with a threshold."""
    in_rollouts: Callable[[Sequence[Episode]], str | None] | None = None
    """The observation in the new rollouts of a step, if there is one; without a threshold."""

    @property
    def about(self) -> str:
        """When it is raised, and why that matters."""
        return f"{self.signal.when.format(f'{self.signal.limit:g}')} {self.why}" if self.signal else self.why


ALARMS: Mapping[AlarmName, AlarmFacts] = {
    AlarmName.REWARD_COLLAPSE: AlarmFacts(
        "The policy forgets what it had learned, and rarely recovers by itself.",
        "Go on from the best checkpoint (agl train --resume RUN/checkpoints/STEP) with a smaller learning rate, or "
        "with a KL term (algorithm.grpo.beta).",
        Signal(
            0.5,
            _reward_collapse,
            "The mean reward of 3 steps is below that of the best 3, of the first 100 and the last 1,000 steps, by {} "
            "of what the best are above the worst step (or above 0), and by 4 standard errors.",
        ),
    ),
    AlarmName.ENTROPY_COLLAPSE: AlarmFacts(
        "The policy became certain without becoming better: it explores no more, and groups have no contrast.",
        "Lower the learning rate, set a bonus for entropy (algorithm.grpo.entropy) or raise the sampling temperature, "
        "or go on from an earlier checkpoint.",
        Signal(
            0.1,
            _entropy_collapse,
            "The entropy of 5 steps is below {} of that of the first 5, and the mean reward is no higher.",
            of_update=True,
        ),
    ),
    AlarmName.ENTROPY_EXPLOSION: AlarmFacts(
        "The policy drifts towards chance; its responses soon are gibberish.",
        "Lower the learning rate, train fewer epochs on each batch, or go on from an earlier checkpoint.",
        Signal(
            3.0,
            _entropy_explosion,
            "The entropy of 3 steps is {} times that of the first 5, and above 1.",
            of_update=True,
        ),
    ),
    AlarmName.KL_RUNAWAY: AlarmFacts(
        "One update moves the policy far from the one that sampled the data, so that the data no longer fit it.",
        "Lower the learning rate or the epochs of the algorithm; in asynchronous runs lower async.max_staleness.",
        average(0.5, "KL(behaviour ‖ current) is {}", "update/kl_behaviour", by=median),
    ),
    AlarmName.KL_REFERENCE_RUNAWAY: AlarmFacts(
        "The policy is far from the initial weights: it loses what these could do, and may exploit the reward.",
        "Read some rollouts with high rewards. Raise the KL term (algorithm.grpo.beta), or lower the learning rate.",
        average(3.0, "KL(current ‖ initial weights) is {}", "update/kl_reference", by=median),
    ),
    AlarmName.NO_CONTRAST: AlarmFacts(
        "A group whose rewards are all equal has advantages of 0: these rollouts teach nothing.",
        "If the reward is at its best, the run is done. Otherwise choose tasks of medium difficulty, make groups "
        "larger (train.group_size), or give rewards for parts of the way.",
        average(0.95, "{} of the groups have equal rewards", "groups/no_contrast", steps=5),
    ),
    AlarmName.TRUNCATED: AlarmFacts(
        "A truncated response has no end: its answer or its tool call is missing, and it is trained on all the same.",
        "Raise sampling.max_tokens, or reward shorter responses.",
        average(0.2, "{} of the responses reach the token limit", "length/truncated"),
    ),
    AlarmName.PARSE_ERRORS: AlarmFacts(
        "A tool call that does not parse is not run, and the agent goes on without its result.",
        "Look at some (agl rollouts --verdict unhealthy). Check that the chat template and the model's tool format go "
        "together; a reward for well-formed calls helps.",
        average(0.2, "{} of the responses have tool calls that do not parse", "calls/parse_errors", per=_responses),
    ),
    AlarmName.REPETITION: AlarmFacts(
        "Responses that loop are a sign of a policy that is trained too hard, or of a reward for length.",
        "Lower the learning rate, or go on from an earlier checkpoint; check what the reward says of long responses.",
        average(0.1, "{} of the responses end in a loop", "responses/repetitive"),
    ),
    AlarmName.GIBBERISH: AlarmFacts(
        "Responses that are no text show weights that broke, or a server that samples with other weights.",
        "Check the learning rate and update/logprob_gap_max, and go on from an earlier checkpoint.",
        average(0.1, "{} of the responses are gibberish", "responses/gibberish"),
    ),
    AlarmName.TOOL_ERRORS: AlarmFacts(
        "The agent learns from what failing tools say, and a service behind them may be down.",
        "Read the errors (agl show ROLLOUT). If a service fails, fix it and go on from the checkpoint before; if the "
        "policy makes worse calls, reward calls that work.",
        average(0.3, "{} of the tool calls fail", "tool_results/failed", rise=0.2),
    ),
    AlarmName.TOOLS_FARMED: AlarmFacts(
        "The policy learns to call tools that work, not to do the task: a reward for tool results pays for that.",
        "Give tool results less weight, use credit.air.form 'two-level'; see agl doctor RUN: do they go with success?",
        Signal(
            0.05,
            _tools_farmed,
            "Tool results count, and in each of 3 steps {} more calls work than in the first 2, for no higher reward.",
        ),
    ),
    AlarmName.EMPTY_ANSWERS: AlarmFacts(
        "The policy says nothing: a reward that punishes wrong answers more than none teaches that.",
        "Compare the reward of empty answers with that of wrong ones, and check the chat template's end token.",
        average(0.2, "{} of the answers are empty", "answers/empty", rise=0.1),
    ),
    AlarmName.BROKEN_PREFIXES: AlarmFacts(
        "The policy sees its earlier replies with other tokens than it sampled, and prefixes are computed again.",
        "Have the agent send its replies back as it got them, without rewriting or trimming; see docs/faults.md.",
        average(0.1, "{} of the responses have a broken prefix before them", "calls/prefix_broken", per=_responses),
    ),
    AlarmName.STALE: AlarmFacts(
        "Rollouts are run and then thrown away, because the policy has moved on meanwhile.",
        "Lower async.in_flight, raise async.max_staleness, or add workers.",
        average(0.2, "{} of the transitions are too old to be trained on", "dropped/stale", per=_transitions),
    ),
    AlarmName.GRADIENT_SPIKE: AlarmFacts(
        "One batch pulls the weights much harder than others; clipping hides its size, not its direction.",
        "Look at the rollouts of this step. If spikes come again, lower the learning rate or the gradient's limit.",
        Signal(
            10.0,
            _gradient_spike,
            "The gradient norm is at least {} times the median of the 10 steps before, and above 10.",
            of_update=True,
        ),
    ),
    AlarmName.LOGPROB_GAP: AlarmFacts(
        "The server that samples and the trainer disagree about the same tokens, so that ratios are wrong.",
        "Check that both have the same weights, dtype and temperature, and switch on truncated importance weights.",
        average(1.0, "the largest difference of log-probabilities is {} nats", "update/logprob_gap_max", by=median),
    ),
    AlarmName.NO_REWARD: AlarmFacts(
        "No rule had anything to say of any rollout of a step, and no agent reported a reward. All rollouts count as "
        "0, and nothing can be learned.",
        "Name a rule in [rewards], or have the agent call agl_core.reward(value); what it returns is its result.",
        in_rollouts=_no_reward,
    ),
    AlarmName.NO_RESULT: AlarmFacts(
        "The result was null in all rollouts of a step, and their rewards are equal. A rule that compares the result "
        "with the task's answer gives all of them the same.",
        "Let the agent's function return its answer, unless its rewards rest on other things.",
        in_rollouts=_no_result,
    ),
    AlarmName.CACHED_REPLIES: AlarmFacts(
        "Rollouts made no LLM call where others of their group made some, or went on from a reply that another one "
        "got. A cache in the agent's client answers them: they are copies, and teach nothing.",
        "Switch the cache off (LangChain's set_llm_cache, DSPy's and LiteLLM's cache); if there is none, see what the "
        "attempts say (agl show ROLLOUT).",
        in_rollouts=_cached_replies,
    ),
    AlarmName.FAILURES: AlarmFacts(
        "All rollouts of a step, or of an evaluation, failed in one way; or some of the first evaluation. Rollouts "
        "that fail teach little or nothing.",
        "Fix what the first error says.",
    ),
    AlarmName.REWARD_FAILED: AlarmFacts(
        "A tenth of the rollouts of a step, or more, were dropped because reward rules failed.",
        "Fix what the error says, or raise the rule's time_limit.",
    ),
    AlarmName.ASSERTED_TOOL_RESULTS: AlarmFacts(
        "Tool results count in reward or credit, and only the agent's side says what some were. Whatever the agent "
        "starts can say the same, and so earn rewards that it does not deserve.",
        "See docs/security.md.",
        in_rollouts=_asserted_tool_results,
    ),
    AlarmName.CONTRADICTED_TOOL_RESULTS: AlarmFacts(
        "Tool results of a step were reported as a success, and the model was shown a failure, which counts. Something "
        "that the agent starts may be forging reports, or a tool's report is wrong.",
        "Read these rollouts (agl show ROLLOUT) and see docs/security.md.",
        in_rollouts=_contradicted_tool_results,
    ),
    AlarmName.ASSERTED_REWARDS: AlarmFacts(
        "No rule in [rewards] has a weight, and the reward is what the agent reports. Whatever the agent starts can "
        "say the same, and so earn rewards that it does not deserve.",
        "See docs/security.md.",
        in_rollouts=_asserted_rewards,
    ),
    AlarmName.STALL: AlarmFacts(
        "Training waits, and nothing is learned meanwhile.",
        "It depends on who waits for whom: ask agl doctor RUN.",
        Signal(
            SHORTEST_STALL,
            lambda steps, limit: None,
            "Nothing finished for three times the longest wait for a rollout so far, at least {} seconds; or for as "
            "many seconds as you set.",
        ),
    ),
}


@dataclass(frozen=True)
class Alarm:
    """An alarm that was raised; `metrics.jsonl` has it in the line of its step."""

    name: AlarmName
    seen: str
    """The observation, with its numbers."""
    remedy: str
    details: str = ""
    """More of what was seen, in lines of its own: the first error, for example."""

    @property
    def text(self) -> str:
        return " ".join(part for part in (f"alarm {self.name}: {self.seen}.", self.remedy, self.details) if part)

    @classmethod
    def of(cls, name: AlarmName, seen: str, *, remedy: str = "", details: str = "") -> Alarm:
        """This alarm on what was seen; `remedy` is for a cause that is known more exactly."""
        return cls(name, seen, remedy or ALARMS[name].remedy, details)


REMEDIES: Mapping[str, str] = {
    Ending.CRASHED: "Fix what the agent raises. If a reply of the model makes it raise (it calls a tool that does not "
    "exist, say), the agent is not broken: let it catch that error and return.",
    Ending.TIMED_OUT: "Raise workers.timeout, or have the agent stop earlier.",
    Ending.CONTEXT_OVERFLOW: "Shorten what the agent asks, or train a model with a longer context.",
    Ending.NO_CALL: "Send the calls of the agent's LLM client through agl: let it read OPENAI_BASE_URL or "
    "ANTHROPIC_BASE_URL.",
    Ending.LOST: "See what the workers say, and their memory (workers.memory_mib).",
    DropReason.NO_TOKEN_IDS: "Serve the policy with agl's own engine, or with one that returns token ids; to train on "
    "recorded texts, set without_logprobs = true in [tasks.train].",
    DropReason.NO_LOGPROBS: "Serve the policy with agl's own engine, or with one that returns log-probabilities; to "
    "train on recorded replies without them, set without_logprobs = true in [tasks.train].",
    DropReason.INCOMPLETE_IDS: "Upgrade the model server, or serve the policy with agl's own engine.",
    DropReason.UNTRAINED_AGENT: "Name agents in train.agents that make calls.",
    DropReason.ABORTED: "See the model server's log: it breaks off what it is asked.",
    DropReason.UNDELIVERED: "Let the agent wait for its replies, or give its client a longer timeout.",
    DropReason.PLUGIN: "See which `episode_built` hook takes them out.",
    DropReason.NON_FINITE: "Look for NaN in the algorithm's advantages and loss, and in recorded log-probabilities.",
    DropReason.TRUNCATED: "Raise sampling.max_tokens, or set train.truncated to 'keep'.",
    DropReason.CONSTRAINED: "Let the agent ask in its prompt for the form of replies, or train by the torch engine.",
    DropReason.TOO_LONG: "Train a model with a longer context, or have the agent ask less.",
}
"""Advice for each reason that keeps rollouts from being trained on."""
