"""Recorded calls and outcomes become the episode of a rollout (Agent Lightning, section 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import numpy as np

from agl_core.learning.outcomes import messages_of, outcomes_from_messages, told_once, tool_calls_of
from agl_core.types import (
    Attempt,
    Call,
    Choice,
    Ending,
    Episode,
    Outcome,
    Reward,
    Rollout,
    TokenMask,
    Transition,
    TransitionKey,
)


def build_episode(
    rollout: Rollout,
    attempt: Attempt,
    calls: Iterable[Call],
    outcomes: Iterable[Outcome] = (),
    rewards: Iterable[Reward] = (),
) -> Episode:
    """The episode of one attempt, from what was recorded of it; the order of the records does not matter.

    Calls are ordered by their start sequence; a call recorded twice or retried by the client counts once, late
    calls do not count. Each choice of a call is a transition (the first of an index). Outcomes are joined by
    `tool_call_id`, or, without one, by parent span where exactly one call has it; never by time. Where no outcome was
    reported for a tool call, it is read from the conversation (`agl_core.learning.outcomes`). `rewards` are those the
    agent reported.
    """
    every = list(calls)
    ordered = counted_calls(attempt, every)
    late = {call.parent_span for call in every if call.key == attempt.key and call.late}
    reported = list(outcomes)
    read = outcomes_from_messages(ordered, join_outcomes(ordered, reported, late)[0])
    joined, unjoined = join_outcomes(ordered, [*reported, *read], late)
    turns: Counter[str | None] = Counter()
    transitions = []
    for turn, call in enumerate(ordered):
        for key, choice in _choices(call).items():
            transitions.append(_transition(key, call, choice, turn, turns[call.agent], tuple(joined.get(key, ()))))
        turns[call.agent] += 1
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
        step=rollout.step,
    )


def counted_calls(attempt: Attempt, calls: Iterable[Call]) -> list[Call]:
    """The calls of an attempt that count, each once, in the order they started."""
    mine = sorted((call for call in calls if call.key == attempt.key and not call.late), key=lambda c: c.sequence)
    counted: dict[str, Call] = {}
    for call in mine:
        counted.setdefault(call.id, call)
    seen: set[str] = set()
    kept = []
    for call in counted.values():
        if call.retry_of is not None:
            if call.retry_of in seen:
                continue
            seen.add(call.retry_of)
        kept.append(call)
    return kept


def join_outcomes(
    calls: list[Call], outcomes: Iterable[Outcome], late: Collection[str | None] = ()
) -> tuple[dict[TransitionKey, list[Outcome]], list[Outcome]]:
    """What the tools did, by the transition that asked for it; and the outcomes that belong to none.

    What several sources tell of one tool call counts once (see `agl_core.learning.outcomes.told_once`). `late` are
    the parent spans of calls that do not count: what was done under one may have been theirs.
    """
    asked: dict[str, tuple[TransitionKey, int]] = {}
    spans: dict[str, list[TransitionKey]] = {}
    for call in calls:
        for choice in call.choices:
            key = TransitionKey(call.rollout, call.attempt, call.id, choice.index)
            for place, tool_call in enumerate(tool_calls_of(choice)):
                asked.setdefault(tool_call["id"], (key, place))
            if call.parent_span is not None:
                spans.setdefault(call.parent_span, []).append(key)
    placed: dict[TransitionKey, list[tuple[int, Outcome]]] = {}
    unjoined = []
    for outcome in told_once(outcomes):
        under = [] if outcome.parent_span in late else spans.get(outcome.parent_span or "", [])
        if outcome.tool_call_id is not None and outcome.tool_call_id in asked:
            key, place = asked[outcome.tool_call_id]
            placed.setdefault(key, []).append((place, outcome))
        elif outcome.tool_call_id is None and len(under) == 1:
            placed.setdefault(under[0], []).append((len(placed.get(under[0], ())), outcome))
        else:
            unjoined.append(outcome)
    return {key: [o for _, o in sorted(found, key=lambda f: f[0])] for key, found in placed.items()}, unjoined


def _choices(call: Call) -> dict[TransitionKey, Choice]:
    found: dict[TransitionKey, Choice] = {}
    for choice in call.choices:
        found.setdefault(TransitionKey(call.rollout, call.attempt, call.id, choice.index), choice)
    return found


def _mask(choice: Choice) -> TokenMask | None:
    """The response's mask. One of another length says of no token that the policy sampled it."""
    mask, ids = choice.mask, choice.response_ids
    if mask is None or ids is None or len(mask) == len(ids):
        return mask
    return np.zeros(len(ids), np.bool_)


def _transition(
    key: TransitionKey, call: Call, choice: Choice, turn: int, agent_turn: int, outcomes: tuple[Outcome, ...]
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
        outcomes=outcomes,
        parent_span=call.parent_span,
        state=call.state,
    )
