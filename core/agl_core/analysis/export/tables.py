"""The tables of a run: their columns, and the rows that a rollout has in each (docs/data.md describes them)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any, TypeAlias

from agl_core.analysis.curves.metrics import MetricsLine
from agl_core.analysis.export.selecting import Exported, Selection
from agl_core.types import Episode, Reward, TrainingRecord, Transition
from agl_core.types.forms import to_json

Row: TypeAlias = Mapping[str, Any]


class Column(Enum):
    """What a column holds. Each value may be missing."""

    TEXT = auto()
    INTEGER = auto()
    NUMBER = auto()
    TRUTH = auto()
    JSON = auto()
    """Any JSON value: in a format without such, its text."""
    INTEGERS = auto()
    NUMBERS = auto()
    TRUTHS = auto()


_NAMED = {"run": Column.TEXT, "restart": Column.INTEGER, "rollout": Column.TEXT, "attempt": Column.INTEGER}
_TASK = {
    "group": Column.TEXT,
    "member": Column.INTEGER,
    "step": Column.INTEGER,
    "mode": Column.TEXT,
    "split": Column.TEXT,
    "task": Column.TEXT,
}
_USE = {"credit": Column.NUMBER, "advantage": Column.NUMBER, "weight": Column.NUMBER, "dropped": Column.TEXT}

TABLES: Mapping[str, Mapping[str, Column]] = {
    "transitions": {
        **_NAMED,
        "call": Column.TEXT,
        "choice": Column.INTEGER,
        **_TASK,
        "ending": Column.TEXT,
        "agent": Column.TEXT,
        "turn": Column.INTEGER,
        "agent_turn": Column.INTEGER,
        "policy": Column.TEXT,
        "version": Column.INTEGER,
        "messages": Column.JSON,
        "tools": Column.JSON,
        "response": Column.JSON,
        "finish_reason": Column.TEXT,
        "temperature": Column.NUMBER,
        "prompt_ids": Column.INTEGERS,
        "response_ids": Column.INTEGERS,
        "logprobs": Column.NUMBERS,
        "mask": Column.TRUTHS,
        "parse_error": Column.TEXT,
        "prefix_broken": Column.TRUTH,
        "tool_results": Column.JSON,
        "state": Column.JSON,
        "reward": Column.NUMBER,
        "terminal_reward": Column.NUMBER,
        **_USE,
        "pruned": Column.TRUTH,
    },
    "episodes": {
        **_NAMED,
        **_TASK,
        "input": Column.JSON,
        "metadata": Column.JSON,
        "ending": Column.TEXT,
        "result": Column.JSON,
        "error": Column.TEXT,
        "terminal_reward": Column.NUMBER,
        "transitions": Column.INTEGER,
        "tool_results": Column.INTEGER,
        "worker": Column.TEXT,
        "started": Column.NUMBER,
        "ended": Column.NUMBER,
    },
    "rewards": {
        **_NAMED,
        "step": Column.INTEGER,
        "name": Column.TEXT,
        "value": Column.NUMBER,
        "source": Column.TEXT,
        "call": Column.TEXT,
        "choice": Column.INTEGER,
    },
    "credits": {**_NAMED, "call": Column.TEXT, "choice": Column.INTEGER, "step": Column.INTEGER, **_USE},
    "metrics": {
        "step": Column.INTEGER,
        "kind": Column.TEXT,
        "restart": Column.INTEGER,
        "key": Column.TEXT,
        "value": Column.NUMBER,
    },
}


def rows_of(exported: Exported, selection: Selection) -> dict[str, list[Row]]:
    """The rows of one rollout, by table; `metrics` has none."""
    rollout, report = exported.rollout, exported.report
    named = {"run": rollout.run, "restart": rollout.restart, "rollout": rollout.id, "attempt": report.attempt.attempt}
    chosen = [transition for transition in report.episode.transitions if selection.has(transition)]
    known = {(transition.key.call, transition.key.choice) for transition in chosen}

    def is_chosen(each: Reward | TrainingRecord) -> bool:
        return selection.agent is None or each.call is None or (each.call, each.choice) in known

    return {
        "transitions": [{**named, **_transition(exported, each)} for each in chosen],
        "episodes": [{**named, **_episode(exported)}],
        "rewards": [
            {**named, "step": rollout.step, **_own(each, "name", "value", "source", "call", "choice")}
            for each in report.episode.rewards
            if is_chosen(each)
        ],
        "credits": [
            {**named, **_own(each, "call", "choice", "step", *_USE)}
            for each in report.training_records
            if is_chosen(each)
        ],
    }


def metrics_rows(lines: Sequence[MetricsLine], steps: tuple[int, int] | None) -> Iterator[Row]:
    """The rows of `metrics`: one for each number of each line."""
    for line in lines:
        if steps is None or steps[0] <= line.step <= steps[1]:
            restart = int(line.values.get("restart", 0))
            for key, value in line.values.items():
                if key not in ("step", "restart"):
                    yield {"step": line.step, "kind": line.kind, "restart": restart, "key": key, "value": value}


def episode_of(exported: Exported) -> Episode:
    """The rollout as an episode with its rewards, as `agl_core.load_episodes` gives it back."""
    episode, rewards = exported.report.episode, exported.report.episode.rewards
    return replace(
        episode,
        rewards=tuple(reward for reward in rewards if reward.call is None),
        terminal=exported.entry.reward,
        transitions=tuple(
            replace(each, rewards=tuple(r for r in rewards if (r.call, r.choice) == (each.key.call, each.key.choice)))
            for each in episode.transitions
        ),
    )


def _transition(exported: Exported, transition: Transition) -> Row:
    key, records = transition.key, exported.report.training_records
    uses = [record for record in records if record.key == key]
    rewards = [r for r in exported.report.episode.rewards if (r.call, r.choice) == (key.call, key.choice)]
    last = max(uses, key=lambda record: record.step, default=None)
    return {
        "call": key.call,
        "choice": key.choice,
        **_task(exported),
        "ending": exported.report.episode.ending.value,
        **_own(transition, "agent", "turn", "agent_turn", "policy", "version"),
        "messages": list(transition.messages),
        "tools": list(transition.tools) or None,
        "response": transition.response,
        "finish_reason": transition.finish_reason.value,
        **_own(transition, "temperature", "prompt_ids", "response_ids", "logprobs", "mask"),
        **_own(transition, "parse_error", "prefix_broken", "state"),
        "tool_results": [to_json(each) for each in transition.tool_results],
        "reward": sum(reward.value for reward in rewards),
        "terminal_reward": exported.entry.reward,
        **({} if last is None else _own(last, *_USE)),
        "pruned": exported.report.pruned,
    }


def _episode(exported: Exported) -> Row:
    attempt, episode = exported.report.attempt, exported.report.episode
    return {
        **_task(exported),
        "input": episode.task.input,
        "metadata": episode.task.metadata,
        "ending": episode.ending.value,
        **_own(attempt, "result", "error", "worker", "started", "ended"),
        "terminal_reward": exported.entry.reward,
        "transitions": len(episode.transitions),
        "tool_results": sum(len(each.tool_results) for each in episode.transitions) + len(episode.unjoined),
    }


def _task(exported: Exported) -> Row:
    rollout = exported.rollout
    return {
        **_own(rollout, "group", "member", "step"),
        "mode": rollout.mode.value,
        "split": rollout.task.split,
        "task": rollout.task.id,
    }


def _own(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}
