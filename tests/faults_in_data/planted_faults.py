"""For every field of every record: values that are wrong, and what becomes of the transition that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from agl_core.types import (
    Attempt,
    Call,
    Choice,
    DropReason,
    Ending,
    FinishReason,
    Housekeeping,
    Mode,
    PrefixBreak,
    Reward,
    Rollout,
    RolloutState,
    Sampling,
    Source,
    Task,
    ToolResult,
    ToolStatus,
)

from .learning_line import CONTEXT, VOCABULARY

NAN, INF = float("nan"), float("inf")
TRAINED = "trained"
GONE = "gone"
"""The call is no part of the episode."""
REFUSED = "refused"
"""The store does not take the record, and says why."""


@dataclass(frozen=True)
class WholeEpisode:
    """All its transitions are dropped."""

    reason: DropReason


Fate: TypeAlias = str | DropReason | WholeEpisode
Faults: TypeAlias = Sequence[tuple[Any, Fate]]

NON_FINITE = WholeEpisode(DropReason.NON_FINITE)
NOT_RUN = WholeEpisode(DropReason.ENDING)
HUGE = 2**70
"""More than 64 bits."""


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def logprobs(*values: float) -> Any:
    return np.array(values, np.float32)


def mask(*values: bool) -> Any:
    return np.array(values, np.bool_)


def calls_tools(*tool_calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(tool_calls)}


harmless: Faults = ((None, TRAINED), ("", TRAINED))

CALL: Mapping[str, Faults] = {
    "id": (("", TRAINED), ("r0-c0", GONE)),
    "rollout": (("nobody", GONE),),
    "attempt": ((7, GONE), (-1, GONE), (HUGE, REFUSED)),
    "sequence": ((-5, TRAINED), (0, TRAINED), (10**12, TRAINED), (HUGE, TRAINED)),
    "policy": (("other", TRAINED),),
    "version": ((None, TRAINED), (-1, TRAINED), (2**40, TRAINED)),
    "request": (({}, TRAINED), *(({"messages": m}, TRAINED) for m in (None, 7, "text", [None, 7], [{"role": 7}]))),
    "choices": (((), GONE),),
    "started": ((-1.0, TRAINED), (NAN, TRAINED)),
    "ended": ((-1.0, TRAINED), (-INF, TRAINED)),
    "api": (("", TRAINED),),
    "agent": harmless,
    "parent_span": harmless,
    "prompt_ids": (
        (None, DropReason.NO_TOKEN_IDS),
        (ids(), DropReason.EMPTY_RESPONSE),
        (ids(-1), DropReason.NON_FINITE),
        (ids(1, VOCABULARY), DropReason.NON_FINITE),
        (ids(2**31 - 1), DropReason.NON_FINITE),
        (np.ones(CONTEXT, np.int32), DropReason.TOO_LONG),
        (np.ones((2, 2), np.int32), REFUSED),
        (np.array([1.5]), REFUSED),
    ),
    "requested": ((Sampling(-1.0, -1.0, -1, -1), TRAINED), (Sampling(NAN, seed=HUGE), TRAINED)),
    "effective": (
        (Sampling(), TRAINED),
        (Sampling(temperature=0.0), DropReason.NON_FINITE),
        (Sampling(temperature=-1.0), DropReason.NON_FINITE),
        (Sampling(temperature=INF), DropReason.NON_FINITE),
        (Sampling(temperature=NAN), DropReason.NON_FINITE),
        (Sampling(temperature=1e-40), DropReason.NON_FINITE),
        (Sampling(temperature=1e38), TRAINED),
        (Sampling(temperature=1.0, top_p=-1.0, max_tokens=-1, seed=-1), TRAINED),
    ),
    "prefix_broken": ((PrefixBreak.EDITED, TRAINED),),
    "prefilled": ((-1, TRAINED), (HUGE, TRAINED)),
    "reused": ((-1, TRAINED),),
    "late": ((True, GONE),),
    "undelivered": ((True, DropReason.UNDELIVERED),),
    "stamped": ((False, TRAINED),),
    "ignored": harmless,
    "program": harmless,
    "housekeeping": tuple((origin, DropReason.HOUSEKEEPING) for origin in Housekeeping),
    "state": (({}, TRAINED), ({"plan": "x" * 100_000}, TRAINED), ({"": [None, {"a": {}}]}, TRAINED)),
}
CHOICE: Mapping[str, Faults] = {
    "index": ((-1, TRAINED), (99, TRAINED)),
    "message": (
        ({}, TRAINED),
        *((calls_tools(fault), TRAINED) for fault in (7, None, {"id": []}, {"id": "x", "function": 7}, {"id": "r0-t"})),
        ({"tool_calls": 7}, TRAINED),
    ),
    "finish_reason": (
        (FinishReason.LENGTH, TRAINED),
        (FinishReason.CONTENT_FILTER, TRAINED),
        (FinishReason.ABORTED, DropReason.ABORTED),
    ),
    "response_ids": (
        (None, DropReason.NO_TOKEN_IDS),
        (ids(), DropReason.EMPTY_RESPONSE),
        (ids(1, 2), DropReason.NO_LOGPROBS),
        (ids(1, 2, 3, -1), DropReason.NON_FINITE),
        (ids(1, 2, 3, VOCABULARY), DropReason.NON_FINITE),
        (ids(1, 1, 1, 1), TRAINED),
    ),
    "logprobs": (
        (None, DropReason.NO_LOGPROBS),
        (logprobs(), DropReason.NO_LOGPROBS),
        (logprobs(-1, -1), DropReason.NO_LOGPROBS),
        *((logprobs(-1, -1, -1, value), DropReason.NON_FINITE) for value in (NAN, INF, -INF)),
        *((logprobs(-1, -1, -1, value), TRAINED) for value in (-1e30, 1e30, -3e38, 3e38, 5.0)),
        (np.array([-1.0]), REFUSED),
    ),
    "mask": (
        (mask(False, False, False, False), DropReason.FULLY_MASKED),
        (mask(True, True), DropReason.FULLY_MASKED),
        (mask(*[True] * 9), DropReason.FULLY_MASKED),
        (mask(), DropReason.FULLY_MASKED),
        (mask(False, True, False, False), TRAINED),
        (np.ones(4, np.int32), REFUSED),
    ),
    "parse_error": harmless,
    "lacks_ids": ((True, DropReason.INCOMPLETE_IDS),),
}
TOOL_RESULT: Mapping[str, Faults] = {
    "id": (("", TRAINED), ("r1-o", TRAINED)),
    "rollout": (("nobody", TRAINED),),
    "attempt": ((7, TRAINED),),
    "tool": (("", TRAINED),),
    "status": tuple((status, TRAINED) for status in ToolStatus),
    "tool_call_id": ((None, TRAINED), ("", TRAINED), ("nothing", TRAINED)),
    "arguments": ((None, TRAINED), ([NAN, INF], TRAINED), (object(), REFUSED)),
    "result": ((None, TRAINED), (NAN, TRAINED), ({"a": [None]}, TRAINED)),
    "error": harmless,
    "agent": harmless,
    "span": harmless,
    "parent_span": ((None, TRAINED), ("r0-s0", TRAINED), ("nothing", TRAINED)),
    "started": ((None, TRAINED), (NAN, TRAINED), (INF, TRAINED)),
    "ended": ((None, TRAINED), (NAN, TRAINED), (-INF, TRAINED)),
    "source": tuple((source, TRAINED) for source in Source),
    "adapter": harmless,
    "status_rule": harmless,
}
REWARD: Mapping[str, Faults] = {
    "rollout": (("nobody", TRAINED),),
    "attempt": ((9, TRAINED),),
    "name": (("", TRAINED),),
    "value": (
        *((value, NON_FINITE) for value in (NAN, INF, -INF, 1e308, -1e308, 1e39)),
        *((value, TRAINED) for value in (0.0, -1.0, 1e-300, 1e6)),
    ),
    "source": (("", TRAINED), ("answer", TRAINED)),
    "call": (("nothing", TRAINED), ("", TRAINED), ("r0-c0", TRAINED)),
    "choice": ((99, TRAINED), (-1, TRAINED)),
    "evidence": harmless,
}
ATTEMPT: Mapping[str, Faults] = {
    "rollout": (("nobody", NOT_RUN),),
    "attempt": ((7, NOT_RUN), (-1, NOT_RUN)),
    "worker": (("", TRAINED),),
    "started": ((INF, TRAINED), (NAN, TRAINED)),
    "ended": ((None, TRAINED), (NAN, TRAINED)),
    "ending": tuple((ending, TRAINED) for ending in (None, *Ending)),
    "result": tuple((result, TRAINED) for result in (None, NAN, INF, "", {"a": []}, HUGE)),
    "error": harmless,
    "passed_through": ((None, TRAINED), ({}, TRAINED), ({"embeddings": -1}, TRAINED), ({"": "many"}, TRAINED)),
    "bypassed": (
        (None, TRAINED),
        ({}, TRAINED),
        ({"https://elsewhere/v1/messages": -1}, TRAINED),
        ({"": "many"}, TRAINED),
    ),
}
ROLLOUT: Mapping[str, Faults] = {
    "id": (("nobody", NOT_RUN), ("nul\0", REFUSED)),
    "run": (("", TRAINED),),
    "restart": ((-1, TRAINED), (HUGE, TRAINED)),
    "group": (("", WholeEpisode(DropReason.GROUP_TOO_SMALL)), ("rg1", TRAINED)),
    "task": ((Task("", None, "", {}), TRAINED), (Task("t", object()), REFUSED)),
    "mode": tuple((mode, TRAINED) for mode in Mode),
    "step": ((-1, TRAINED),),
    "member": ((-1, TRAINED), (1, TRAINED)),
    "position": ((-1, TRAINED), (HUGE, TRAINED)),
    "state": tuple((state, TRAINED) for state in RolloutState),
    "counted_attempt": ((None, NOT_RUN), (7, NOT_RUN), (-1, NOT_RUN)),
    "ending": tuple((ending, TRAINED) for ending in (None, *Ending)),
    "prompts": (({"system": "x" * 100_000}, TRAINED),),
}
PLANTED: Mapping[type, Mapping[str, Faults]] = {
    Call: CALL,
    Choice: CHOICE,
    ToolResult: TOOL_RESULT,
    Reward: REWARD,
    Attempt: ATTEMPT,
    Rollout: ROLLOUT,
}
