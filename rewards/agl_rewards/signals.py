"""Rules over rollouts that users open: signs of trouble that no user has to report.

Each gives 1 to the call that led to the sign, and says nothing where there is none: silence is no evidence. So the
weight of its table is negative: `[rewards.asked_again] modes = ["use"], weight = -0.5`.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import agl_core
from agl_core.capture.status import message_text
from agl_core.learning.tool_results import has_failed
from agl_core.types import Episode, Transition, TransitionKey

_REPEATED = 0.8
"""The least likeness of a request with the one before it that it repeats."""
_SHORT = 500
_PIECE = 8
"""Characters: long enough that two texts about different things share few."""
_CORRECTION = re.compile(
    r"^\W*(?:no\b[,.!]?(?! (?:problem|worries|thanks|thank))|wrong\b|that'?s (?:not|wrong)|that is (?:not|wrong)"
    r"|not what i|i (?:said|meant|asked)\b|you (?:misunderstood|forgot|ignored))",
    re.IGNORECASE,
)


@agl_core.reward_rule
def asked_again(episode: Episode) -> Mapping[TransitionKey, float] | None:
    """1 for a reply after which the user repeats or corrects the request, seen in the messages of the next call.

    The next call has one user message more than the call of the reply. It repeats if it is nearly the same text as the
    user message before it, and corrects if it begins like an English correction.
    """
    repeated: dict[TransitionKey, float] = {}
    last = {transition.turn: transition for transition in episode.transitions}
    ordered = [last[turn] for turn in sorted(last)]
    for before, after in itertools.pairwise(ordered):
        earlier, later = _requests(before), _requests(after)
        if not earlier or len(later) <= len(earlier):
            continue
        new = later[len(earlier)]
        if _likeness(_plain(earlier[-1]), _plain(new)) >= _REPEATED or _CORRECTION.search(new):
            repeated[before.key] = 1.0
    return repeated or None


@agl_core.reward_rule
def tool_failed(episode: Episode) -> Mapping[TransitionKey, float] | None:
    """1 for a call with a tool that raised or timed out, by the recorded tool results."""
    failed = {t.key: 1.0 for t in episode.transitions if any(map(has_failed, t.tool_results))}
    return failed or None


@agl_core.reward_rule
def abandoned(episode: Episode) -> Mapping[TransitionKey, float] | None:
    """1 for the last reply of a session that the user did not continue, although it asked for something.

    The session ended because it was idle, as the result of its attempt says, and its last reply asks for a tool whose
    result never came, or ends in a question.
    """
    if not isinstance(episode.result, Mapping) or episode.result.get("ended_by") != "idle" or not episode.transitions:
        return None
    last = episode.transitions[-1]
    waits = bool(last.response.get("tool_calls")) and not last.tool_results
    asks = message_text(last.response.get("content")).rstrip().endswith(("?", "？"))
    return {last.key: 1.0} if waits or asks else None


def _likeness(before: str, new: str) -> float:
    """How much of two texts stands in both: character by character in short ones, else by pieces.

    The exact comparison takes up to the cube of the length: 0.1 seconds at 500 characters and a minute at 4,000.
    """
    if max(len(before), len(new)) <= _SHORT:
        return difflib.SequenceMatcher(None, before, new, autojunk=False).ratio()
    ours, theirs = _pieces(before), _pieces(new)
    return 2 * (ours & theirs).total() / (ours.total() + theirs.total())


def _pieces(text: str) -> Counter[str]:
    return Counter(text[start : start + _PIECE] for start in range(len(text) - _PIECE + 1))


def _requests(transition: Transition) -> list[str]:
    """The user's messages before a reply, in order."""
    messages: tuple[Mapping[str, Any], ...] = transition.messages
    return [message_text(message.get("content")) for message in messages if message.get("role") == "user"]


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
