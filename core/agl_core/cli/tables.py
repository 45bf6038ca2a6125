"""The tables that commands end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from agl_core.cli.screen import Screen
from agl_core.training.report import Summary


def print_summary(console: Screen, summary: Summary) -> None:
    """Reward before and after, what it cost, where everything is, and what to do next."""
    state = summary.state
    stopped = " (stopped early)" if summary.stopped_by else ""
    rewards = Table(title=f"reward{stopped}", title_justify="left")
    for column in ("held-out set", "sampling", "before", "after"):
        rewards.add_column(column, justify="right" if column in ("before", "after") else "left")
    for name in summary.sets:
        found = summary.rewards(name)
        for mode in ("greedy", "sampled"):
            rewards.add_row(name, mode, _number(found["before"][mode]), _number(found["after"][mode]))
    if summary.sets:
        console.print(rewards)
    facts = Table(show_header=False, box=None)
    dropped = ", ".join(f"{count} {reason}" for reason, count in sorted(state.dropped.items())) or "none"
    for name, value in {
        "steps": str(state.step),
        "time": f"{state.seconds:.0f} s",
        "memory": f"{state.peak_rss_bytes / 2**20:.0f} MiB at most",
        "rollouts": ", ".join(f"{count} {ending}" for ending, count in sorted(state.endings.items())) or "none",
        "LLM calls": f"{state.llm_calls}",
        "transitions": f"{state.kept} trained on; dropped: {dropped}",
        "checkpoint": str(summary.checkpoint or "none"),
        "model": ", ".join(map(str, summary.models)) or "none",
        "store": f"that of {summary.server}" if summary.server else str(summary.run_dir / "store.sqlite"),
        "summary": str(summary.run_dir / "summary.json"),
    }.items():
        facts.add_row(name, value)
    if summary.abandoned:
        facts.add_row("abandoned", f"{summary.abandoned} agents did not end when their time was up")
    for problem, count in summary.problems.items():
        facts.add_row("adapter", f"{problem} ({count} times)")
    console.print(facts, soft_wrap=True)
    following = f"agl rollouts {summary.run_dir} --limit 5"
    if summary.stopped_by:
        following = f"agl train --resume {summary.run_dir}" + (f" --server {summary.server}" if summary.server else "")
    elif summary.server:
        following = f"agl rollouts {summary.run_dir.name} --limit 5, on the machine of the server"
    console.print(f"next: {following}")


def print_evaluation(console: Screen, entries: Sequence[Mapping[str, Any]]) -> None:
    """The rewards of one evaluation."""
    table = Table("held-out set", "sampling", "reward", "rollouts", "seconds")
    for entry in entries:
        table.add_row(
            entry["set"], entry["mode"], _number(entry["reward"]), str(entry["rollouts"]), f"{entry['seconds']:.1f}"
        )
    console.print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
