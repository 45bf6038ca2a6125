"""A plugin file: an engine whose policy is well for some steps, and then falls ill in the way that is asked for."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

import agl_core
from agl_core import Capability, kinds
from agl_core.kinds import Register
from agl_core.protocols import Engine, EngineContext, Progress, UpdateResult, Upstream
from agl_core.testing.scripts import Raw, Received
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AlarmName, Batch, Episode

WELL = 8
"""Steps before it falls ill."""
NUMBERS = {
    "loss": 0.1,
    "entropy": 0.5,
    "kl_behaviour": 0.01,
    "kl_reference": 0.1,
    "clip_fraction": 0.02,
    "grad_norm": 0.5,
    "logprob_gap_max": 0.001,
}
"""What a sound update measures."""
ILL_NUMBERS: Mapping[str, Mapping[str, float]] = {
    AlarmName.ENTROPY_COLLAPSE: {"entropy": 0.01},
    AlarmName.ENTROPY_EXPLOSION: {"entropy": 4.0},
    AlarmName.KL_RUNAWAY: {"kl_behaviour": 2.0},
    AlarmName.KL_REFERENCE_RUNAWAY: {"kl_reference": 9.0},
    AlarmName.GRADIENT_SPIKE: {"grad_norm": 50.0},
    AlarmName.LOGPROB_GAP: {"logprob_gap_max": 3.0},
}
RIGHT, WRONG = "There are 5.", "There are 6."
ILL_ANSWERS: Mapping[str, str] = {
    AlarmName.REWARD_COLLAPSE: WRONG,
    AlarmName.NO_CONTRAST: RIGHT,
    AlarmName.REPETITION: "I think so. " * 9,
    AlarmName.GIBBERISH: "\ufffd" * 30,
    AlarmName.QUESTIONS: "Which apples do you mean?",
    AlarmName.EMPTY_ANSWERS: "",
    AlarmName.FAILURES: "crash",
    AlarmName.ASSERTED_REWARDS: "report",
}
_ILL_PLACES = {AlarmName.TOOL_ERRORS: "nowhere", AlarmName.CONTRADICTED_TOOL_RESULTS: "denied"}
"""Where it has the agent look."""
ILL_EXTRAS: Mapping[str, Mapping[str, Any]] = {
    AlarmName.PARSE_ERRORS: {"choices": [{"parse_error": "no JSON"}]},
    AlarmName.BROKEN_PREFIXES: {"prefix_broken": True},
}


class Options(BaseModel, extra="forbid"):
    """`[engine.ailing]`"""

    ailment: AlarmName
    """The alarm that it should raise."""


class AilingEngine(Engine):
    """Serves a scripted policy; an update measures what the ailment wants."""

    def __init__(self, options: Options, context: EngineContext) -> None:
        self._ailment, self._key = options.ailment, context.api_key
        self._upstream = ScriptedUpstream()
        self._upstream.answer = self._answered
        self._versions = dict.fromkeys(context.policies, 0)
        self._updated = asyncio.Condition()

    async def start(self) -> Upstream:
        await self._upstream.__aenter__()
        return Upstream((self._upstream.url,), {name: name for name in self._versions}, self._key)

    async def _answered(self, received: Received) -> Raw:
        found = re.match(r"s(\d+)-g(\d+)-m(\d+)", received.rollout or "")
        assert found is not None
        step, group, member = map(int, found.groups())
        ill, version = step > WELL, self._versions["default"]
        if ill and self._ailment is AlarmName.STALE and group == 0 and step <= WELL + 3:  # A late one would never end.
            async with self._updated:  # Until its step and the next one are over.
                await self._updated.wait_for(lambda: self._versions["default"] > step)
        message: dict[str, Any] = {"role": "assistant", "content": RIGHT if member % 2 else WRONG}
        if ill:
            message["content"] = ILL_ANSWERS.get(self._ailment, message["content"])
        if not received.turns:
            place = _ILL_PLACES.get(self._ailment, "table") if ill else "table"
            function = {"name": "look", "arguments": place}
            call = {"id": f"call-{received.rollout}", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "length" if ill and self._ailment is AlarmName.TRUNCATED else "stop"
        extras = {"version": version, **(ILL_EXTRAS.get(self._ailment, {}) if ill else {})}
        return Raw(json.dumps(_completion(message, reason, extras)).encode())

    async def update(
        self, policy: str, batch: Batch, algorithm: str, options: Mapping[str, Any], progress: Progress | None = None
    ) -> UpdateResult:
        self._versions[policy] += 1
        async with self._updated:
            self._updated.notify_all()
        numbers = dict(NUMBERS)
        if self._versions[policy] > WELL:
            numbers |= ILL_NUMBERS.get(self._ailment, {})
        zeros = np.zeros(len(batch))
        return UpdateResult(self._versions[policy], numbers, zeros, zeros, (None,) * len(batch))

    async def versions(self) -> Mapping[str, int]:
        return self._versions

    async def stats(self) -> Mapping[str, float]:
        return {}

    async def save(self, folder: Path) -> None:
        (folder / "weights.json").write_text(json.dumps(self._versions))

    async def load(self, folder: Path) -> None: ...

    async def stop(self) -> None:
        await self._upstream.__aexit__()


def _completion(message: Mapping[str, Any], reason: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    ids = list(range(4))
    logprobs = [{"token": str(id), "logprob": -0.1, "bytes": None, "top_logprobs": []} for id in ids]
    choice = {"index": 0, "message": message, "finish_reason": reason, "token_ids": ids}
    return {
        "id": "scripted",
        "object": "chat.completion",
        "choices": [{**choice, "logprobs": {"content": logprobs}}],
        "prompt_token_ids": ids,
        "agl": extras,
    }


@agl_core.hookimpl
def register_components(register: Register) -> None:
    register(
        kinds.ENGINE, "ailing", AilingEngine, options=Options, provides={Capability.TOKEN_IDS, Capability.REFERENCE}
    )


@agl_core.reward_rule
def right(episode: Episode) -> float:
    """Whether there are five."""
    return float(episode.result == RIGHT)


@agl_core.reward_rule
def silent(episode: Episode) -> None:
    """Has nothing to say."""
