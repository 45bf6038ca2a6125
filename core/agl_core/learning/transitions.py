"""Episodes: built of recorded calls and tool results (Agent Lightning, section 3.1), written to files, and read."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from agl_core.errors import EpisodesError
from agl_core.learning.tool_results import choices_of, join_tool_results, messages_of, tools_of
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
    TokenMask,
    ToolResult,
    Transition,
    TransitionKey,
    derived,
)
from agl_core.types.forms import dump_json, from_json, load_json, to_json


def build_episode(
    rollout: Rollout,
    attempt: Attempt,
    calls: Iterable[Call],
    tool_results: Iterable[ToolResult] = (),
    rewards: Iterable[Reward] = (),
    annotations: Iterable[Annotation] = (),
) -> Episode:
    """The episode of one attempt, from what was recorded of it; the order of the calls does not matter.

    Calls are ordered by their start sequence. A call recorded twice or retried by the client counts once; late calls
    and undelivered replies do not count. Each choice of a call is a transition (the first of an index). Tool results
    are joined by `join_tool_results`. `rewards` are the agent's own, `annotations` what others said.
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
    return derived(
        Episode,
        rollout,
        attempt,
        rollout=rollout.id,
        ending=attempt.ending or Ending.LOST,
        transitions=tuple(transitions),
        rewards=tuple(rewards),
        unjoined=tuple(unjoined),
        undelivered=tuple(undelivered),
        unattributed=sum(call.is_unattributed for call in ordered),
        annotations=tuple(annotations),
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
    return derived(
        Transition,
        call,
        choice,
        key=key,
        turn=turn,
        agent_turn=agent_turn,
        messages=messages_of(call),
        response=choice.message,
        temperature=1.0 if temperature is None else temperature,
        mask=_mask(choice),
        tool_results=tool_results,
        distorted=is_distorted(call, mode),
        grammar=grammar_of(call.request),
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
    """True if its responses were drawn from another distribution than the policy's own, as at temperature 0."""
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
    calls of these tools instead, with arguments of these schemas. A reply that has to be a tool call has no other form.
    Whether a model server can enforce it is not checked.

    >>> grammar_of({"response_format": {"type": "json_object"}, "tools": [{"function": {"name": "add"}}]})
    '{"json_object": true, "or_call": {"add": {}}}'
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
    tools = request.get("tools") if request.get("tool_choice") != "none" else None
    functions = [tool["function"] for tool in tools or () if isinstance(tool.get("function"), Mapping)]
    if functions:
        form["or_call"] = {str(function.get("name")): function.get("parameters") or {} for function in functions}
    return json.dumps(form, ensure_ascii=False)


def save_episodes(path: str | os.PathLike[str], episodes: Iterable[Episode]) -> None:
    """Write episodes to a file, one JSON object a line; after an error there is no file, or the earlier one.

        agl_core.save_episodes("episodes.jsonl", callback.episodes())

    `agl reward try CONFIG --run episodes.jsonl` computes their rewards, and `load_episodes` gives them back exactly.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for episode in episodes:
            file.write(json.dumps(load_json(dump_json(to_json(episode)))) + "\n")
    os.replace(part, target)


def load_episodes(path: str | os.PathLike[str]) -> list[Episode]:
    """The episodes that `save_episodes` wrote. EpisodesError names a line that is not an episode."""
    episodes = []
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise EpisodesError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                episodes.append(from_json(Episode, json.loads(line)))
        except ValueError as error:
            raise EpisodesError(
                f"{path}, line {number}, is no episode: {error}. Write it with agl_core.save_episodes, one a line."
            ) from error
    return episodes
