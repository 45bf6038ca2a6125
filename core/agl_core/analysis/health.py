"""The health of a run: the alarms that it raised, its verdicts on rollouts, and what it waits for now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agl_core.analysis.curves.metrics import MetricsLine, read_metrics
from agl_core.client import LightningClient, ServerAddress
from agl_core.store.interface import Store
from agl_core.training.alarms.stall import asked_tools, who_waits
from agl_core.training.metrics import METRICS_FILE
from agl_core.types import Verdict
from agl_core.wire.body import Empty
from agl_core.wire.trainers import ACTIVITY, Activity


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """An alarm as `metrics.jsonl` has it."""

    step: int
    name: str
    seen: str
    why: str
    remedy: str
    details: str = ""
    holds: bool = False
    """Whether it still held after the latest step, as alarms on numbers can."""


@dataclass(frozen=True, slots=True)
class RunHealth:
    """What a run's folder says of its health."""

    alarms: Sequence[RaisedAlarm]
    """In the order in which they were raised."""
    verdicts: Sequence[tuple[int, Mapping[Verdict, int]]]
    """The number of training rollouts with each verdict, by step."""
    reasons: Mapping[str, int]
    """How often each symptom (`unhealthy/NAME`) and missing evidence (`unobserved/NAME`) was found."""
    damaged: Sequence[int] = ()
    """The numbers of the lines of the metrics file that cannot be read, from 1 on."""
    steps: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What the rollouts of a run wait for."""

    activity: Activity
    seen: str
    remedy: str


_PARTS = ("name", "seen", "why", "remedy", "details")


def read_health(folder: Path) -> RunHealth:
    """The health of the run in this folder. A run without steps has none of anything; nothing is changed."""
    lines = [line for line in read_metrics(folder) if line.kind == "train"]
    latest = lines[-1].values if lines else {}
    raised, damaged = _raised(folder / METRICS_FILE)
    newest = {each.get("name"): number for number, (_, each) in enumerate(raised)}
    alarms = [
        RaisedAlarm(
            step,
            **{part: str(each.get(part, "")) for part in _PARTS},
            holds=f"alarm/{each.get('name')}" in latest and newest[each.get("name")] == number,
        )
        for number, (step, each) in enumerate(raised)
    ]
    reasons: dict[str, int] = {}
    for line in lines:
        for key, value in line.values.items():
            if key.startswith(("unhealthy/", "unobserved/")):
                reasons[key] = reasons.get(key, 0) + int(value)
    return RunHealth(alarms, [(line.step, _verdicts(line)) for line in lines], reasons, damaged, len(lines))


async def read_waiting(server: ServerAddress, store: Store) -> Waiting:
    """What the rollouts of a run wait for, as its server says. ServerError if that does not answer."""
    client = LightningClient(server.base_url, server.key)
    try:
        activity = await client.ask(ACTIVITY, Empty())
    finally:
        await client.close()
    return Waiting(activity, *who_waits(activity, await asked_tools(store, activity)))


def _verdicts(line: MetricsLine) -> dict[Verdict, int]:
    return {each: int(line.values.get(f"health/{each}", 0)) for each in Verdict}


def _raised(file: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[int]]:
    """The alarms of all lines, each with its step, and the numbers of the lines that cannot be read."""
    found: list[tuple[int, dict[str, Any]]] = []
    damaged: list[int] = []
    content = file.read_bytes() if file.exists() else b""
    for number, text in enumerate(content.splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):  # It is being written, or a kill cut it off.
            continue
        try:
            line = orjson.loads(text)
            step, alarms = int(line["step"]), line.get("alarms", [])
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError):
            damaged.append(number)
            continue
        if isinstance(alarms, list):
            found += [(step, each) for each in alarms if isinstance(each, dict)]
    return found, damaged
