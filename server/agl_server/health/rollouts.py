"""The health of a rollout: a verdict from what was recorded of it, and the numbers of many.

A symptom is no verdict on the policy: a rollout with a low reward is healthy, and one that loops may be right. It says
what a person would want to look at.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl_core.capture.status import message_text
from agl_core.learning.batch import BatchPlan, staleness
from agl_core.learning.tool_results import has_failed, tool_calls_of
from agl_core.types import (
    DropReason,
    Ending,
    Episode,
    Evidence,
    FinishReason,
    PrefixBreak,
    Symptom,
    ToolStatus,
    TrainingRecord,
    Transition,
    Verdict,
    scored_return,
)
from agl_server.health.certificate import Proof, certify

LOOP_REPEATS, LOOP_CHARACTERS = 5, 60
"""A response loops if it ends with a piece of text so many times, over so many characters."""
LOOKED_AT = 2_000
"""Characters at the end of a response in which a loop is looked for."""
NO_TEXT_SHARE = 0.05
"""Above this share of characters that are no text, a response is gibberish."""
CHANCE_LOGPROB, CHANCE_TOKENS = -4.0, 8
"""Below this mean log-probability of so many sampled tokens, a response is gibberish: each was one of about 55."""

LONGEST_TOKEN = 128
"""Characters; and no token holds two words."""

_REFUSAL = re.compile(
    r"(I['’]?m |I am )?(very |really )?(sorry|afraid)\b.{0,40}\b(can['’]?t|cannot|can not|unable|won['’]?t|not able)\b"
    r"|(sorry, )?(but )?I (can['’]?t|cannot|can not|won['’]?t|am unable to|am not able to) "
    r"(help|assist|do that|do this|comply|answer|fulfil|provide|support)\b"
    r"|as an? (AI|artificial intelligence|language model)\b.{0,60}\b(can['’]?t|cannot|unable|not able)\b",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class RolloutHealth:
    symptoms: tuple[Symptom, ...] = ()
    missing: tuple[Evidence, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """A symptom that was recorded counts, whatever else is missing."""
        return Verdict.UNHEALTHY if self.symptoms else Verdict.UNOBSERVED if self.missing else Verdict.HEALTHY

    @property
    def text(self) -> str:
        """The verdict with its reasons, in words.

        >>> RolloutHealth(missing=(Evidence.TOKEN_IDS,)).text
        'unobserved (token ids)'
        """
        reasons = ", ".join(reason.value.replace("_", " ") for reason in self.symptoms or self.missing)
        return self.verdict.value + (f" ({reasons})" if reasons else "")


def health_of(episode: Episode) -> RolloutHealth:
    return RolloutHealth(tuple(dict.fromkeys(_symptoms(episode))), tuple(dict.fromkeys(_missing(episode))))


def is_repetitive(text: str) -> bool:
    """True if a text ends in a loop.

    >>> is_repetitive("Well, " + "I think so. " * 6), is_repetitive("I think so. I think so.")
    (True, False)
    """
    end = text[-LOOKED_AT:].rstrip()
    for length in range(1, len(end) // LOOP_REPEATS + 1):
        if end[-1 - length] != end[-1]:  # It cannot be a repeated piece, and looking costs less than comparing.
            continue
        repeats = max(LOOP_REPEATS, -(-LOOP_CHARACTERS // length))
        piece = end[-length:]
        if not piece.strip() or repeats * length > len(end) or end[-2 * length : -length] != piece:
            continue
        if end.endswith(piece * repeats):
            return True
    return False


def response_text(transition: Transition) -> str:
    """The text of a response, without the tool calls that it asks for."""
    return message_text(transition.response.get("content"))


def is_gibberish(transition: Transition) -> bool:
    """True if a response holds much that is no text, or was sampled nearly by chance."""
    text = response_text(transition)
    solid = "".join(text.split())
    no_text = solid.count("\ufffd") + (0 if solid.isprintable() else sum(not letter.isprintable() for letter in solid))
    if no_text > NO_TEXT_SHARE * len(text):
        return True
    logprobs = transition.logprobs
    if logprobs is not None and transition.mask is not None and len(transition.mask) == len(logprobs):
        logprobs = logprobs[transition.mask]
    return logprobs is not None and len(logprobs) >= CHANCE_TOKENS and float(logprobs.mean()) < CHANCE_LOGPROB


def has_cut_prompt(transition: Transition) -> bool:
    """True if the model server cut the prompt: it has fewer tokens than its text needs by any tokenizer."""
    if transition.prompt_ids is None:
        return False
    # Templates leave out the thinking of assistant messages.
    texts = [message_text(m.get("content")) for m in transition.messages if m.get("role") != "assistant"]
    needed = sum(max(len(text.split()), len(text) // LONGEST_TOKEN) for text in texts)
    return needed > len(transition.prompt_ids)


def answer(episode: Episode) -> str | None:
    """The text of the last response; None if it asks for tools, or there is none."""
    own = episode.transitions
    return None if not own or own[-1].response.get("tool_calls") else response_text(own[-1])


def is_refusal(text: str) -> bool:
    """True if an English text begins by declining, as far as its words show it.

    >>> is_refusal("I'm sorry, but I can't help with that."), is_refusal("I cannot find a flight before 9.")
    (True, False)
    """
    return _REFUSAL.match(text.strip()) is not None


def _symptoms(episode: Episode) -> Iterator[Symptom]:
    if episode.ending is not Ending.FINISHED:
        yield Symptom.ENDING
    if episode.dropped is DropReason.REWARD_FAILED:
        yield Symptom.REWARD_FAILED
    for transition in episode.transitions:
        if transition.finish_reason.is_cut:
            yield Symptom.TRUNCATED
        if transition.parse_error is not None:
            yield Symptom.PARSE_ERROR
        if is_repetitive(response_text(transition)):
            yield Symptom.REPETITION
        if is_gibberish(transition):
            yield Symptom.GIBBERISH
        if transition.prefix_broken not in (None, PrefixBreak.REQUEST):
            yield Symptom.PREFIX_BROKEN
        if has_cut_prompt(transition):
            yield Symptom.PROMPT_CUT
    text = answer(episode)
    if text is not None and not text.strip():
        yield Symptom.EMPTY_ANSWER
    results = [result for transition in episode.transitions for result in transition.tool_results]
    if results and all(map(has_failed, results)):
        yield Symptom.TOOLS_FAILED


def _missing(episode: Episode) -> Iterator[Evidence]:
    transitions = episode.transitions
    if episode.bypassed:
        yield Evidence.CALLS
    if not all(transition.has_ids and transition.logprobs is not None for transition in transitions):
        yield Evidence.TOKEN_IDS
    known = {result.tool_call_id for transition in transitions for result in transition.tool_results}
    unknown = [transition for transition in transitions if not _call_ids(transition.response) <= known]
    if unknown and episode.ending is Ending.FINISHED:
        # A tool call that had to be made, and that no later request repeats, is an answer (structured output).
        repeated = {id for transition in transitions for message in transition.messages for id in _call_ids(message)}
        unknown = [t for t in unknown if not t.had_to_call or _call_ids(t.response) & repeated]
    if unknown:
        yield Evidence.TOOL_RESULTS
    prompts = {_system_prompt(transition) for transition in transitions if transition.agent is None}
    if prompts and (len(prompts) > 1 or {transition.agent for transition in transitions} - {None}):
        yield Evidence.AGENT_NAMES


def _call_ids(message: Mapping[str, Any]) -> set[str]:
    return {call["id"] for call in tool_calls_of(message)}


def _system_prompt(transition: Transition) -> str:
    """The instructions that an agent begins with, which tell it from another if it has no name."""
    first = transition.messages[0] if transition.messages else {}
    return message_text(first.get("content")) if first.get("role") in ("system", "developer") else ""


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Rewards with their components, endings, lengths, turns, calls and health of one set of rollouts.

    `reward/mean` is of returns, as single calls may have rewards; an episode that was dropped unscored counts as 0.
    """
    rewards = [scored_return(episode) or 0.0 for episode in episodes]
    transitions = [t for e in episodes for t in e.transitions]
    metrics = {
        "reward/mean": mean(rewards),
        "reward/std": math.sqrt(mean([(r - mean(rewards)) ** 2 for r in rewards])) if rewards else math.nan,
        "rollouts": float(len(episodes)),
        "rollout/turns": mean(len(e.transitions) for e in episodes),
        "rollout/calls": mean(len({t.key.call for t in e.transitions}) for e in episodes),
        "rollout/tool_results": mean(sum(len(t.tool_results) for t in e.transitions) for e in episodes),
        "length/prompt": mean(len(t.prompt_ids) for t in transitions if t.prompt_ids is not None),
        "length/response": mean(len(t.response_ids) for t in transitions if t.response_ids is not None),
        "length/truncated": mean(t.finish_reason is FinishReason.LENGTH for t in transitions),
        "calls/prefix_broken": float(sum(t.prefix_broken not in (None, PrefixBreak.REQUEST) for t in transitions)),
        "calls/parse_errors": float(sum(t.parse_error is not None for t in transitions)),
        "calls/housekeeping": float(sum(len({t.key.call for t in e.housekeeping}) for e in episodes)),
        "calls/undelivered": float(sum(len({t.key.call for t in e.undelivered}) for e in episodes)),
        "calls/passed_through": float(sum(sum((e.passed_through or {}).values()) for e in episodes)),
        "calls/unattributed": float(sum(e.unattributed for e in episodes)),
        "tool_results/unjoined": float(sum(len(e.unjoined) for e in episodes)),
    }
    components, by_part = defaultdict[str, float](float), defaultdict[str, list[float]](list)
    for episode, reward in zip(episodes, rewards, strict=True):
        for component in () if episode.dropped is DropReason.REWARD_FAILED else episode.rewards:
            components[component.name] += component.value
        part = episode.task.metadata.get("part")
        if episode.task.id.startswith(f"{part}/"):  # It is of a mixture.
            by_part[str(part)].append(reward)
    metrics |= {f"reward/{name}": total / len(episodes) for name, total in components.items()}
    metrics |= {f"reward/part/{part}": mean(of_part) for part, of_part in by_part.items()}
    metrics |= count_metrics("calls/prefix_broken", (t.prefix_broken for t in transitions))
    metrics |= count_metrics("ending", (e.ending for e in episodes))
    metrics |= health_metrics(episodes)
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def health_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """The verdicts on these rollouts with their reasons, and what their responses and tool calls are like."""
    healths = [health_of(episode) for episode in episodes]
    transitions = [t for e in episodes for t in e.transitions]
    answers = [text.strip() for e in episodes if e.ending is Ending.FINISHED and (text := answer(e)) is not None]
    return {
        **count_metrics("health", (health.verdict for health in healths)),
        **count_metrics("unhealthy", (symptom for health in healths for symptom in health.symptoms)),
        **count_metrics("unobserved", (evidence for health in healths for evidence in health.missing)),
        "responses/repetitive": mean(is_repetitive(response_text(t)) for t in transitions),
        "responses/gibberish": mean(map(is_gibberish, transitions)),
        "answers/empty": mean(not text for text in answers),
        "answers/question": mean(text.endswith(("?", "？")) for text in answers),
        "answers/refused": mean(map(is_refusal, answers)),
        "tool_results/failed": mean(has_failed(result) for t in transitions for result in t.tool_results),
        "tool_results/ok": mean(result.status is ToolStatus.OK for t in transitions for result in t.tool_results),
    }


def contrast_metrics(groups: Iterable[Sequence[Episode]], plan: BatchPlan) -> dict[str, float]:
    """The share of groups in which a comparison has nothing to learn from."""
    compared = [group for group in groups if len(group) > 1]
    return {"groups/no_contrast": mean(not plan.has_contrast(group) for group in compared)} if compared else {}


def staleness_metrics(episodes: Sequence[Episode], versions: Mapping[str, int]) -> dict[str, float]:
    """How old the episodes are, in updates: the oldest transition of each; `versions` are the trainer's."""
    ages = [staleness(episode, versions) for episode in episodes if episode.transitions]
    return {"staleness/mean": mean(ages), "staleness/max": float(max(ages))} if ages else {}


def count_metrics(name: str, kinds: Iterable[str | None]) -> dict[str, float]:
    """How often there is each kind, by `NAME/KIND`; None is not counted.

    >>> count_metrics("dropped", ["stale", None, "stale"])
    {'dropped/stale': 2.0}
    """
    return {f"{name}/{kind}": float(count) for kind, count in Counter(filter(None, kinds)).items()}


def record_metrics(episodes: Iterable[Episode], records: Sequence[TrainingRecord]) -> dict[str, float]:
    """Metrics of a step's training records, and of its tokens by what is proved of them (`proved/exact`)."""
    transitions = {transition.key: transition for episode in episodes for transition in episode.transitions}
    kept = [record for record in records if record.dropped is None]
    proofs: Counter[Proof] = Counter()
    for record in kept:
        if (certificate := certify(transitions[record.key], record)) is not None:
            proofs += certificate.counts
    return {
        "transitions/kept": float(len(kept)),
        "transitions/dropped": float(len(records) - len(kept)),
        "transitions/without_advantage": float(sum(record.advantage == 0 for record in kept)),
        **count_metrics("dropped", (record.dropped for record in records)),
        **{f"proved/{proof}": float(count) for proof, count in proofs.items()},
    }


def mean(values: Iterable[float]) -> float:
    """The mean; NaN without values."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else math.nan


def show_message(message: Mapping[str, Any]) -> str:
    """A chat message as it is shown: its text, and then its tool calls, like calls in code.

    >>> show_message({"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]})
    'add({})'
    """
    content = message.get("content")
    calls = [_tool_call_text(tool_call) for tool_call in message.get("tool_calls") or ()]
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    return " ".join([text, *calls]).strip()


def _tool_call_text(tool_call: Any) -> str:
    known = tool_call if isinstance(tool_call, Mapping) else {}
    function = known.get("function", known.get("custom"))
    if not isinstance(function, Mapping):
        return json.dumps(tool_call, ensure_ascii=False)
    return f"{function.get('name')}({function.get('arguments', function.get('input', ''))})"
