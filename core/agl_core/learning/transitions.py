"""Builds the episode of a rollout from recorded calls and tool results (Agent Lightning, section 3.1)."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from agl_core.capture import CapturedRollout
from agl_core.capture.recording import SPANS
from agl_core.capture.status import UNCERTAIN
from agl_core.learning.tool_results import (
    CONTRADICTED,
    ToolCall,
    by_id,
    choices_of,
    has_failed,
    messages_of,
    read_from_messages,
    tool_calls_in,
    tools_of,
)
from agl_core.types import (
    Annotation,
    Attempt,
    Call,
    Choice,
    Ending,
    Episode,
    Json,
    Mode,
    Reward,
    Rollout,
    Source,
    TokenMask,
    ToolResult,
    Transition,
    TransitionKey,
)

_FROM_ANYWHERE = (Source.COMMAND, Source.SPAN)
"""Sources whose reports any process can make that the agent starts."""


def build_episode(
    rollout: Rollout,
    attempt: Attempt,
    calls: Iterable[Call],
    tool_results: Iterable[ToolResult] = (),
    rewards: Iterable[Reward] = (),
    annotations: Iterable[Annotation] = (),
) -> Episode:
    """The episode of one attempt, from what was recorded of it; the order of the calls does not matter.

    Calls are ordered by their start sequence. A call that is recorded twice or retried by the client counts once; late
    calls and calls with undelivered replies do not count. Each choice of a call is a transition (the first of an
    index). Tool results are joined by `join_tool_results`, or read from the conversation if none was reported.
    `rewards` are those that the agent reported, `annotations` are what others said.
    """
    mine = [call for call in calls if call.key == attempt.key]
    ordered = counted_calls(attempt, mine)
    late = {call.parent_span for call in mine if call.late or call.undelivered}
    joined, unjoined = join_tool_results(ordered, tool_results, late)
    turns: Counter[str | None] = Counter()
    transitions = []
    for turn, call in enumerate(ordered):
        for key, choice in choices_of(call).items():
            results = tuple(joined.get(key, ()))
            transitions.append(_transition(rollout.mode, key, call, choice, turn, turns[call.agent], results))
        turns[call.agent] += 1
    undelivered = [
        _transition(rollout.mode, key, call, choice, sum(e.sequence < call.sequence for e in ordered), 0, ())
        for call in sorted(mine, key=lambda call: call.sequence)
        if call.undelivered and not call.late
        for key, choice in choices_of(call).items()
    ]
    return Episode(
        rollout=rollout.id,
        attempt=attempt.attempt,
        group=rollout.group,
        member=rollout.member,
        task=rollout.task,
        mode=rollout.mode,
        ending=attempt.ending or Ending.LOST,
        transitions=tuple(transitions),
        result=attempt.result,
        rewards=tuple(rewards),
        unjoined=tuple(unjoined),
        undelivered=tuple(undelivered),
        passed_through=attempt.passed_through,
        bypassed=attempt.bypassed,
        unattributed=sum(call.is_unattributed for call in ordered),
        annotations=tuple(annotations),
        step=rollout.step,
    )


def counted_calls(attempt: Attempt, calls: Iterable[Call]) -> list[Call]:
    """The calls of an attempt that count, each once, in the order they started."""
    counts = (call for call in calls if call.key == attempt.key and not call.late and not call.undelivered)
    mine = sorted(counts, key=lambda call: call.sequence)
    counted: dict[str, Call] = {}
    for call in mine:
        counted.setdefault(call.id, call)
    return [*counted.values()]


def _mask(choice: Choice) -> TokenMask | None:
    """The response's mask. If its length is wrong, no token counts as sampled by the policy."""
    mask, ids = choice.mask, choice.response_ids
    if mask is None or ids is None or len(mask) == len(ids):
        return mask
    return np.zeros(len(ids), np.bool_)


def _transition(
    mode: Mode,
    key: TransitionKey,
    call: Call,
    choice: Choice,
    turn: int,
    agent_turn: int,
    tool_results: tuple[ToolResult, ...],
) -> Transition:
    temperature = call.effective.temperature
    return Transition(
        key=key,
        agent=call.agent,
        turn=turn,
        agent_turn=agent_turn,
        policy=call.policy,
        version=call.version,
        messages=messages_of(call),
        response=choice.message,
        finish_reason=choice.finish_reason,
        temperature=1.0 if temperature is None else temperature,
        prompt_ids=call.prompt_ids,
        response_ids=choice.response_ids,
        logprobs=choice.logprobs,
        mask=_mask(choice),
        parse_error=choice.parse_error,
        prefix_broken=call.prefix_broken,
        tool_results=tool_results,
        parent_span=call.parent_span,
        distorted=is_distorted(call, mode),
        grammar=grammar_of(call.request),
        state=call.state,
        tools=tools_of(call),
        had_to_call=call.request.get("tool_choice") not in (None, "auto", "none"),
    )


# The recorded log-probabilities are those of the policy at the sampling temperature. Nucleus sampling, penalties and
# the like draw from another distribution: importance weights of such tokens would be wrong.
_NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (0, -1),
    "use_beam_search": (False,),
}
"""The values of request fields that leave the distribution as it is; so does null."""

DISTORTING = frozenset(_NEUTRAL)
"""Request fields that change the distribution tokens are drawn from. In train mode the gateway drops them."""


def is_distorted(call: Call, mode: Mode) -> bool:
    """True if the responses of a call were drawn from another distribution than the policy's own.

    A temperature of 0 is one: it always takes the most probable token.
    """
    if mode.trains:
        return False
    sampling = call.effective
    if sampling.temperature == 0 or sampling.top_p not in (None, 1):
        return True
    return any(distorting(call.request))


def distorting(request: Mapping[str, Json]) -> Iterator[str]:
    """The fields of a request that change the distribution.

    >>> list(distorting({"top_k": 5, "min_p": 0, "logit_bias": None, "stop": "."}))
    ['top_k']
    """
    return (name for name, same in _NEUTRAL.items() if request.get(name) is not None and request[name] not in same)


GUIDED = ("json", "regex", "choice", "grammar")
FORMATS = ("response_format", "structured_outputs", *(f"guided_{kind}" for kind in GUIDED))
"""Request fields that say what form a reply must have: OpenAI's, and those of vLLM, new and old."""


def grammar_of(request: Mapping[str, Json]) -> str | None:
    """The form that replies to a request must have, as JSON; None if any will do.

    It is vLLM's `structured_outputs`: one of json_object, json, regex, choice, grammar; with "or_call", a reply may be
    a tool call instead. A reply that has to be a tool call has no other form. Whether a model server can enforce it is
    not checked.

    >>> grammar_of({"response_format": {"type": "json_object"}, "tools": [{"type": "function"}]})
    '{"json_object": true, "or_call": true}'
    """
    if request.get("tool_choice") not in (None, "auto", "none"):
        return None
    given = request.get("structured_outputs")
    form = dict(given) if isinstance(given, Mapping) else {}
    form |= {kind: request[f"guided_{kind}"] for kind in GUIDED if request.get(f"guided_{kind}")}
    given = request.get("response_format")
    wanted = given if isinstance(given, Mapping) else {}
    kind = wanted.get("type")
    if kind == "json_schema":
        described = wanted.get(kind)
        schema = described.get("schema") if isinstance(described, Mapping) else None
        form |= {"json_object": True} if schema is None else {"json": schema}
    elif kind not in (None, "text"):
        form[str(kind)] = True
    if not form:
        return None
    or_call = {"or_call": True} if request.get("tools") and request.get("tool_choice") != "none" else {}
    return json.dumps(form | or_call, ensure_ascii=False)


def join_tool_results(
    calls: Sequence[Call], reports: Iterable[ToolResult], late: Collection[str | None] = ()
) -> tuple[dict[TransitionKey, list[ToolResult]], list[ToolResult]]:
    """The tool results of each transition that asked for them, and those that belong to no transition; never by time.

    `calls` are in order, `reports` in the order in which they were made. `late` are the parent spans of calls that do
    not count: reports under them may belong to these calls. Three passes, of which each takes what the one before left
    over:

    1. `join_by_call_id`: a report that names a tool call answers it. One source counts for each.
    2. `join_by_span`: a report without an id answers the tool call that it alone fits, else it stands for the whole
       response of the only call under its span.
    3. `fill_from_conversation`: what later requests of the agent show fills what reports leave open, and tool calls
       without a report. Where it shows a failure that a report denies, the conversation wins, and the contradiction is
       marked.
    """
    tool_calls = tool_calls_in(calls)
    shown = read_from_messages(calls, tool_calls)
    answers, rest = join_by_call_id(tool_calls, reports, shown)
    open_calls = [tool_call for tool_call in tool_calls if tool_call not in answers]
    by_span, of_responses, unjoined = join_by_span(calls, open_calls, rest, late)
    answers |= by_span
    doubtful = [report for report in unjoined if _is_unnamed(report, late)]
    return fill_from_conversation(tool_calls, answers, of_responses, shown, doubtful), unjoined


def join_by_call_id(
    tool_calls: Sequence[ToolCall], reports: Iterable[ToolResult], shown: Collection[ToolCall]
) -> tuple[dict[ToolCall, list[ToolResult]], list[ToolResult]]:
    """The reports of each tool call whose id they have, and the reports that have none of these ids.

    An endpoint may use one id for several tool calls. Then the reports of one adapter, in its order, each answer a tool
    call under the same span, else of the same agent; among these, one that is `shown` to be answered, else the latest.
    Further reports are of a tool that ran twice.
    """
    known = by_id(tool_calls)
    answers: dict[ToolCall, list[ToolResult]] = {}
    waiting: dict[tuple[str, str | None], list[ToolResult]] = {}
    rest = []
    for report in _distinct(reports):
        if report.tool_call_id in known:
            waiting.setdefault((report.tool_call_id or "", report.adapter), []).append(report)
        else:
            rest.append(report)
    for (id, _), of_adapter in waiting.items():
        free = known[id]
        whose = [(report.parent_span, report.agent) for report in of_adapter]
        for number, report in enumerate(of_adapter):
            near = _near(report, free) or _near(report, known[id])
            candidates = [tool_call for tool_call in near if tool_call in shown] or near
            after = whose[number:].count(whose[number])
            answered = candidates[max(len(candidates) - after, 0)]
            free = [tool_call for tool_call in free if tool_call is not answered]
            answers.setdefault(answered, []).append(report)
    return {tool_call: of_one_adapter(of_call) for tool_call, of_call in answers.items()}, of_one_adapter(rest)


def join_by_span(
    calls: Sequence[Call], open_calls: Sequence[ToolCall], reports: Sequence[ToolResult], late: Collection[str | None]
) -> tuple[dict[ToolCall, list[ToolResult]], dict[TransitionKey, list[ToolResult]], list[ToolResult]]:
    """The reports without an id of each tool call and of each whole response, and those that are left over.

    A report fits an open tool call of the same tool and arguments, of the same agent if both are known, and under the
    same span if that encloses a call; then the report may lack arguments. It answers a tool call if it fits this one
    alone, and no other report fits it. A span after whose call an unknown agent made one encloses that too, perhaps:
    what is under it is joined by tool and arguments alone.
    """
    uncertain = _uncertain(calls)
    under: dict[str, list[TransitionKey]] = {}
    for call in calls:
        if call.parent_span is not None and call.parent_span not in uncertain:
            under.setdefault(call.parent_span, []).extend(choices_of(call))
    fitting: dict[str, ToolCall] = {}
    for report in reports:
        is_enclosed = report.parent_span in under
        if _is_unnamed(report, late):
            fits = [
                tool_call
                for tool_call in open_calls
                if report.tool == tool_call.tool
                and (None in (report.agent, tool_call.call.agent) or report.agent == tool_call.call.agent)
                and (report.parent_span == tool_call.call.parent_span or not is_enclosed)
                and (report.arguments == tool_call.arguments or (report.arguments is None and is_enclosed))
            ]
            if len(fits) == 1:
                fitting[report.id] = fits[0]
    claims = Counter(fitting.values())
    answers: dict[ToolCall, list[ToolResult]] = {}
    of_responses: dict[TransitionKey, list[ToolResult]] = {}
    unjoined = []
    for report in reports:
        keys = under.get(report.parent_span or "", ())
        if report.id in fitting and claims[fitting[report.id]] == 1:
            answers[fitting[report.id]] = [report]
        elif _is_unnamed(report, late) and len(keys) == 1:
            of_responses.setdefault(keys[0], []).append(report)
        else:
            unjoined.append(report)
    return answers, of_responses, unjoined


def fill_from_conversation(
    tool_calls: Sequence[ToolCall],
    answers: Mapping[ToolCall, Sequence[ToolResult]],
    of_responses: Mapping[TransitionKey, Sequence[ToolResult]],
    shown: Mapping[ToolCall, ToolResult],
    doubtful: Sequence[ToolResult],
) -> dict[TransitionKey, list[ToolResult]]:
    """The tool results of each transition: reports with what they leave open, and what is `shown` alone.

    What is shown alone, and looks right, is CONTRADICTED by failures of its tool among the `doubtful` reports, which
    join nothing and may be of any of them, unless as many failures of that tool are shown.
    """
    joined: dict[TransitionKey, list[ToolResult]] = {}
    open_calls: dict[TransitionKey, list[ToolCall]] = {key: [] for key in of_responses}
    for tool_call in tool_calls:
        message = shown.get(tool_call)
        if tool_call in answers:
            joined.setdefault(tool_call.key, []).extend(
                _completed(report, tool_call, message) for report in answers[tool_call]
            )
        elif tool_call.key in of_responses:
            open_calls[tool_call.key].append(tool_call)
        elif message is not None:
            joined.setdefault(tool_call.key, []).append(message)
    for key, reports in of_responses.items():
        messages = (shown[tool_call] for tool_call in open_calls[key] if tool_call in shown)
        failed = [message for message in messages if has_failed(message)]
        joined.setdefault(key, []).extend(_of_response(reports, failed, len(open_calls[key])))
    failures = Counter(report.tool for report in doubtful if has_failed(report))
    for results in joined.values():
        failures.subtract(r.tool for r in results if r.source is Source.CONVERSATION and has_failed(r))
    for results in joined.values():
        for place, result in enumerate(results):
            if result.source is Source.CONVERSATION and result.status_rule in UNCERTAIN and failures[result.tool] > 0:
                results[place] = replace(result, status_rule=CONTRADICTED)
    return joined


def _of_response(reports: Sequence[ToolResult], failed: Sequence[ToolResult], tool_calls: int) -> list[ToolResult]:
    """The reports that stand for the tool calls of a response, and of the failures shown there those that none tells.

    If these are more than tool calls, successes that anything may have reported give way, and the failures are
    CONTRADICTED.
    """
    untold = failed[sum(map(has_failed, reports)) :]
    forgeable = [report for report in reports if report.source in _FROM_ANYWHERE and not has_failed(report)]
    denials = forgeable[: max(0, len(reports) + len(untold) - tool_calls)] if untold else []
    if denials:
        untold = [replace(failure, status_rule=CONTRADICTED) for failure in untold]
    return [*untold, *(report for report in reports if report not in denials)]


def of_one_adapter(reports: Iterable[ToolResult]) -> list[ToolResult]:
    """The reports of one attempt, each id once, and those of each tool call by the one adapter that counts.

    That adapter counts with all its reports, because a tool may run twice; reports of the agent's own code count as of
    one adapter. Every adapter comes before spans. Among two, the one whose run began first counts: it ran the other.
    """
    reports = _distinct(reports)
    best: dict[str, tuple[bool, float, str]] = {}
    for report in reports:
        if report.tool_call_id is not None:
            started = math.inf if report.started is None else report.started
            rank = (report.adapter == SPANS, started, report.adapter or "")
            best[report.tool_call_id] = min(rank, best.get(report.tool_call_id, rank))
    return [r for r in reports if r.tool_call_id is None or (r.adapter or "") == best[r.tool_call_id][-1]]


def _distinct(reports: Iterable[ToolResult]) -> list[ToolResult]:
    """Each id once: the first counts, and reports of the agent's own process come before those over OTLP."""
    distinct: dict[str, ToolResult] = {}
    for report in reports:
        known = distinct.get(report.id)
        if known is None or (known.source is Source.SPAN and report.source is not Source.SPAN):
            distinct[report.id] = report
    return list(distinct.values())


def _is_unnamed(report: ToolResult, late: Collection[str | None]) -> bool:
    return report.tool_call_id is None and report.parent_span not in late


def _near(report: ToolResult, tool_calls: Sequence[ToolCall]) -> Sequence[ToolCall]:
    """Those of the same parent span; if there are none, those of the same agent; if there are none, all."""
    under = [t for t in tool_calls if report.parent_span and t.call.parent_span == report.parent_span]
    return under or [t for t in tool_calls if report.agent and t.call.agent == report.agent] or tool_calls


def _uncertain(calls: Iterable[Call]) -> set[str | None]:
    """The spans of calls that a call of an unknown agent followed: tools under them may be those of that call."""
    latest: dict[str | None, str] = {}
    uncertain: set[str | None] = set()
    for call in calls:
        if call.is_unattributed:
            uncertain.update(latest.values())
        elif call.parent_span is not None:
            latest[call.agent] = call.parent_span
    return uncertain


def _completed(report: ToolResult, tool_call: ToolCall, shown: ToolResult | None) -> ToolResult:
    """A report with what it leaves open, from the tool call that it answers and from what the conversation shows of it.

    What a rule found counts before what none did: a span without a result says less than the message with it. A failure
    that the model was shown counts before a report that anything may have made, and that looked and saw none.
    """
    report = replace(
        report,
        agent=tool_call.call.agent or report.agent,  # Another agent may have run the tool.
        tool_call_id=tool_call.id if report.tool_call_id is None else report.tool_call_id,
        arguments=tool_call.arguments if report.arguments is None else report.arguments,
    )
    if shown is None:
        return report
    has_looked = report.status_rule not in ("unknown", "looks-like-error")
    if report.source in _FROM_ANYWHERE and has_looked and not has_failed(report) and has_failed(shown):
        denied = replace(report, status=shown.status, status_rule=CONTRADICTED, source=shown.source)
        return replace(denied, result=None, error=shown.error)
    if report.status_rule not in UNCERTAIN or (report.status_rule != "unknown" and shown.status_rule in UNCERTAIN):
        return report
    result = None if shown.error is not None else shown.result if report.result is None else report.result
    return replace(report, status=shown.status, status_rule=shown.status_rule, error=shown.error, result=result)


class RolloutKeeper(Protocol):
    """Where an adapter keeps rollouts, for instance `agl_core.capture.Capture`."""

    def finished(self) -> Sequence[CapturedRollout]: ...

    def clear(self) -> None:
        """Forget them."""


class Alone:
    """The agent's runs as data, for an adapter that is used without a gateway: what its framework reports is all."""

    def __init__(self, keeper: RolloutKeeper) -> None:
        self._keeper = keeper

    def episodes(self) -> list[Episode]:
        """The agent's runs that have ended, as text; with token ids where the framework keeps the endpoint's."""
        return [build_episode(*rollout.records()) for rollout in self._keeper.finished()]

    def transitions(self) -> list[Transition]:
        return [transition for episode in self.episodes() for transition in episode.transitions]

    def clear(self) -> None:
        self._keeper.clear()
