"""`agl runs`, `agl rollouts`, `agl show`: looking at runs, at the rollouts of one, and at one turn by turn."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core import kinds
from agl_core.cli.screen import AsJson, Screen, print_json, table
from agl_core.cli.words import number, one_line, plain, said_by, score, size, status_text
from agl_core.config.resolve import settings_of
from agl_core.plugins import Plugins
from agl_core.types import Reward, TrainingRecord
from agl_server.commands.screen import NewestRun, Runs, filtered
from agl_server.health.rollouts import has_cut_prompt, show_message
from agl_server.reading import runs as reading
from agl_server.reading.explained import AttemptReport, GroupReport, RolloutReport, TerminalReward, Turn, read_group
from agl_server.reading.rollouts import Query, list_rollouts

Folder = Annotated[Path, typer.Argument(help="The folder with the runs.")]
KeepSteps = Annotated[int, typer.Option(min=0, help="The number of last steps whose rollouts are kept.")]
KeepCheckpoints = Annotated[
    int | None,
    typer.Option(min=1, help="The number of last checkpoints to keep; by default the run's train.keep_checkpoints."),
]

runs = typer.Typer(help="List runs, make them smaller, and remove them.", no_args_is_help=True)


@runs.command("list")
def list_(folder: Folder = reading.RUNS, as_json: AsJson = False) -> None:
    """List the runs: their state, their verdict, steps, size, and evaluation before and after training."""
    entries = [reading.read_entry(run) for run in reading.run_folders(folder)]
    if as_json:
        print_json(entries)
        return
    listed = table("run", "state", "verdict", numbers=("steps", "size", "before", "after"))
    for run in entries:
        steps = f"{run.steps}" if run.of_steps is None else f"{run.steps}/{run.of_steps}"
        rewards = score(run.reward_before), score(run.reward_after)
        verdict = run.verdict.word if run.verdict else "–"
        listed.add_row(str(run.folder), run.state, verdict, steps, size(run.size), *rewards)
    Screen().print(listed)


@runs.command()
def prune(run: Runs, steps: KeepSteps = 10, checkpoints: KeepCheckpoints = None, as_json: AsJson = False) -> None:
    """Remove old checkpoints, and the rollouts of old steps.

    The last checkpoints are kept, and the best one. Metrics stay, and so do rollouts that were opened from outside; the
    run can be resumed as before. Meanwhile the store needs as much free disk space again. A run that is being trained
    or served is refused.
    """
    pruned = [asyncio.run(reading.prune(folder, steps, checkpoints)) for folder in map(reading.find_run, run)]
    if as_json:
        print_json(pruned)
        return
    for done in pruned:
        Screen().print(
            f"{done.folder}: {done.rollouts} rollouts of the steps up to {done.up_to_step} and "
            f"{len(done.checkpoints)} checkpoints removed, {size(done.before)} → {size(done.after)}"
        )


@runs.command()
def rm(run: Runs, yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False) -> None:
    """Remove runs with all their files: recorded rollouts, metrics and checkpoints.

    Asks first. A run that is being trained, served or evaluated is refused.
    """
    for folder in dict.fromkeys(map(reading.find_run, run)):
        entry = reading.read_entry(folder)
        if not yes:
            typer.confirm(f"Remove {folder} ({entry.state}, {entry.steps} steps, {size(entry.size)})?", abort=True)
        reading.remove(folder)
        typer.echo(f"removed {folder}")


Limit = Annotated[int, typer.Option(min=1, help="The number of rollouts, the newest ones.")]


@filtered()
def rollouts(run: NewestRun = None, *, query: Query, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the rollouts of a run, the newest last."""
    reports = asyncio.run(list_rollouts(reading.find_run(run), query, limit))
    if as_json:
        rows = []
        for report in reports:
            entry, health = report.entry, report.health
            verdict_of = health and {"verdict": health.verdict, "reasons": health.symptoms or health.missing}
            rows.append({"superseded": entry.superseded, "rewards": entry.rewards, "health": verdict_of})
            rows[-1] |= plain(entry.rollout)
        print_json(rows)
        return
    screen = Screen()
    for line in _lines(reports):  # Cropped on a terminal: ids are there to be copied, rewards to be compared.
        screen.print(one_line(line, screen.width))


def _lines(reports: Sequence[RolloutReport]) -> list[str]:
    rows = [("rollout", "reward", "mode", "ended", "try", "health", "task")]
    for report in reports:
        entry, rollout, health = report.entry, report.entry.rollout, report.health
        rewards = ", ".join(f"{one_line(r.name, 40)} {number(r.value)}" for r in entry.rewards if r.call is None)
        rows.append(
            (
                rollout.id + (" (superseded)" if entry.superseded else ""),
                rewards or "-",
                rollout.mode.value,
                rollout.ending.value if rollout.ending else rollout.state.value,
                "-" if rollout.counted_attempt is None else str(rollout.counted_attempt + 1),
                "-" if health is None else health.text,
                json.dumps(rollout.task.input, ensure_ascii=False),
            )
        )
    *widths, _ = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]


Names = Annotated[
    list[str],
    typer.Argument(
        metavar="[RUN] ID", help="The run, by default the newest below ./runs; and the rollout's id, or its beginning."
    ),
]
Width = Annotated[int, typer.Option(min=40, help="Characters of each text that are shown.")]
TokensOption = Annotated[
    bool, typer.Option("--tokens", help="Show each trained token, and whether it is proved to be what was sampled.")
]


def show(names: Names, width: Width = 300, tokens: TokensOption = False, as_json: AsJson = False) -> None:
    """Show a rollout turn by turn: who spoke, what was asked, what the tools did, and what training made of it.

    Each call has its rewards with the rule that gave them, its credit, its advantage, and its weight in the loss. Below
    the turns is the credit of the whole group, which the rollout was compared with. With --tokens each token has the
    version that sampled it, its log-probability when it was sampled and as training computed it, and what that proves.

    For instance: agl show calc s3-g1-m0
    """
    *runs, id = names
    if len(runs) > 1:
        raise typer.BadParameter(f"Name a run and a rollout, not {len(names)} things: agl show RUN ID.")
    group = asyncio.run(read_group(reading.find_run(Path(runs[0]) if runs else None), id))
    entry = group.chosen.entry
    rollout = entry.rollout
    if as_json:
        report = {"rollout": rollout, "superseded": entry.superseded, "attempts": group.chosen.attempts}
        algorithms = {credit.policy: _algorithm(group.config, credit.policy) for credit in group.credit}
        print_json({**report, "groups": group.credit, "weights": entry.weights, "algorithms": algorithms})
        return
    screen = Screen()
    screen.print(f"rollout {rollout.id}  {rollout.mode.value}  {rollout.state.value}", style="bold")
    if entry.superseded:
        screen.print("superseded: a later restart went on from an earlier checkpoint", style="yellow")
    screen.print(f"task {rollout.task.id}: {_json(rollout.task.input, width)}")
    for name, text in rollout.prompts.items():
        screen.print(f"prompt {one_line(name, 60)}: {one_line(text, width)}")
    for attempt in group.chosen.attempts:
        _print_attempt(screen, attempt, group, width, tokens)


def _print_attempt(screen: Screen, report: AttemptReport, group: GroupReport, width: int, tokens: bool) -> None:
    attempt, episode = report.attempt, report.episode
    counts = attempt.attempt == group.chosen.entry.rollout.counted_attempt
    ending = attempt.ending.value if attempt.ending else "running"
    screen.print(f"\nattempt {attempt.attempt}: {ending} ({'counts' if counts else 'does not count'})", style="bold")
    for line in (attempt.error or "").splitlines():
        screen.print(f"  {one_line(line, width)}", style="red")
    if attempt.ending is not None:
        screen.print(f"  {report.health.text}", style="green" if not report.health.symptoms else "yellow")
    if report.conversations:
        screen.print(f"  conversations: {report.conversations}")
    for turn in report.turns:
        _print_turn(screen, turn, width)
        if tokens:
            _print_tokens(screen, turn)
    for lost in episode.undelivered:
        reply, agent = one_line(show_message(lost.response), width), one_line(lost.agent or "unnamed agent", 60)
        screen.print(f"  undelivered, before turn {lost.turn}: {agent} did not get {reply!r}", style="yellow")
    for route, count in (episode.passed_through or {}).items():
        screen.print(f"  passed through and not recorded: {count} {one_line(route, 80)}")
    for address, count in (episode.bypassed or {}).items():
        screen.print(f"  past agl, and not recorded: {count} calls to {one_line(address, 200)}", style="yellow")
    if episode.unattributed:
        screen.print(
            f"  {episode.unattributed} calls came from a client that agl does not know: who made them is unknown, and "
            "tool results without an id that may be theirs are not joined.",
            style="yellow",
        )
    for result in episode.unjoined:
        tool = f"{one_line(result.tool, 60)} {status_text(result)} ({said_by(result)})"
        screen.print(f"  tool result of no recorded call: {tool}", style="yellow")
    screen.print(f"  result: {_json(episode.result, width)}")
    for reward in report.uncounted_rewards:
        screen.print(f"  reward {_reward(reward)[:-1]}, which does not count)", style="yellow")
    terminal = report.terminal(group.chosen.entry.weights)
    screen.print(f"  terminal reward: {_terminal(terminal)}", style="bold")
    for _, reward in terminal.parts:
        for line in (reward.evidence or "").splitlines():
            screen.print(f"    {one_line(line, width)}")
    if counts:
        _print_credit(screen, group)


def _print_credit(screen: Screen, group: GroupReport) -> None:
    rollout = group.chosen.entry.rollout
    several = len({credit.policy for credit in group.credit}) > 1
    for credit in group.credit:
        if rollout.id in credit.credit:
            credits = credit.credit.values()
            values = "  ".join("/".join(dict.fromkeys(number(v, 4) for v in of_one)) for of_one in credits)
            by = one_line(f"by {_algorithm(group.config, credit.policy)}", 200)
            policy = f" of policy {credit.policy}" if several else ""
            screen.print(
                f"  group {one_line(rollout.group, 80)}, step {credit.step}, {by}: mean credit{policy} "
                f"{number(credit.mean, 4)}, standard deviation {number(credit.std, 4)}, over {len(credits)} rollouts: "
                f"{one_line(values, 300)}",
                style="magenta",
            )


def _algorithm(config: Mapping[str, Any], policy: str) -> str:
    """A policy's algorithm, with its settings that are no defaults. No plugin file of the run is imported for it."""
    chosen = config["policies"].get(policy, {}).get("algorithm") or config["algorithm"]
    name, settings = chosen["name"], chosen.get(chosen["name"], {})
    installed = Plugins.load().components(kinds.ALGORITHM).get(name)
    if installed is None:
        return str(name)
    usual = settings_of(installed.options.model_construct())
    own = [f"{key} = {value}" for key, value in settings.items() if usual.get(key) != value]
    return f"{name} ({', '.join(own)})" if own else str(name)


def _print_turn(screen: Screen, turn: Turn, width: int) -> None:
    transition, indent = turn.transition, "  " * turn.depth

    def line(text: str, style: str | None = None) -> None:
        screen.print(f"    {indent}{text}", style=style)

    version = "" if transition.version is None else f" v{transition.version}"
    agent = one_line(transition.agent or "unnamed agent", 60)
    origin = f"  {turn.origin}" if turn.origin else ""
    policy = f"({one_line(transition.policy, 60)}{version})"
    screen.print(f"\n  {indent}turn {transition.turn}  {agent}  {policy}{origin}", style="cyan")
    for message in transition.messages[-1:]:
        text = one_line(show_message(message), width, tail=True)
        line(f"{one_line(str(message.get('role')), 40)}: {text}", style="dim")
    line(f"→ {one_line(show_message(transition.response), width)}  [{transition.finish_reason.value}]")
    if transition.state is not None:
        line(f"state {_json(transition.state, width)}", style="dim")
    prompt, response = transition.prompt_ids, transition.response_ids
    ids = "no token ids" if prompt is None or response is None else f"{len(prompt)} + {len(response)} tokens"
    logprob = ", no log-probabilities" if transition.has_ids else ""
    if transition.logprobs is not None:
        logprob = f", log-probability {float(transition.logprobs.sum()):.3f}"
    broken = f", prefix broken ({transition.prefix_broken})" if transition.prefix_broken else ""
    broken += ", prompt cut by the model server" if has_cut_prompt(transition) else ""
    line(f"{ids}{logprob}{broken}", style="dim")
    if transition.parse_error:
        line(f"tool call did not parse: {one_line(transition.parse_error, width)}", style="yellow")
    for result in transition.tool_results:
        outcome = one_line(result.error, width) if result.error else _json(result.result, width)
        line(
            f"tool {one_line(result.tool, 60)}({_json(result.arguments, 80)}): {status_text(result)}  {outcome}  "
            f"({said_by(result)})",
            style="green" if result.status.value == "ok" else "red",
        )
    for reward in turn.rewards:
        line(f"reward {_reward(reward)}")
    for reward in turn.reported:
        line(f"the agent reported {_reward(reward)}")
    if turn.record is not None:
        line(f"{_use(turn.record)}", style="magenta")


def _print_tokens(screen: Screen, turn: Turn) -> None:
    """A line for each token of the response, in the certificate of the step that trained on it."""
    transition, record, certificate = turn.transition, turn.record, turn.certificate
    if record is None or certificate is None:
        return
    screen.print(f"    step {record.step}, {certificate.text}", style="magenta")
    assert transition.response_ids is not None, "others have no certificate"
    sampled = [math.nan] * len(certificate.proofs_T) if transition.logprobs is None else transition.logprobs
    version = "-" if transition.version is None else f"v{transition.version}"
    screen.print("       token       id  version    sampled  recomputed  proof", style="dim")
    for i, (id, one, other, proof) in enumerate(
        zip(transition.response_ids, sampled, certificate.recomputed_T, certificate.proofs_T, strict=True)
    ):
        screen.print(f"      {i:>6} {id:>8} {version:>8} {one:>10.5f}  {other:>10.5f}  {proof or 'not trained on'}")


def _json(value: Any, width: int) -> str:
    return one_line(json.dumps(value, ensure_ascii=False), width)


def _terminal(terminal: TerminalReward) -> str:
    """The sum, its parts, and the agent's reports.

    >>> given = [Reward("r", 0, "right", 1.0, "right"), Reward("r", 0, "brief", 0.5, "brief")]
    >>> _terminal(TerminalReward.of(given, {"brief": 0}))
    '1 = right 1 (by right) + 0 · brief 0.5 (by brief)'
    """
    terms = " + ".join(
        (f"{number(weight)} · " if weight != 1 else "") + _reward(reward) for weight, reward in terminal.parts
    )
    total = "none" if terminal.value is None else f"{number(terminal.value)} = {terms}"
    return "; ".join([total, *(f"the agent reported {_reward(reward)}" for reward in terminal.reported)])


def _reward(reward: Reward) -> str:
    of = "" if reward.call is None else f", for call {one_line(reward.call, 80)}"
    return f"{one_line(reward.name, 80)} {number(reward.value)} (by {one_line(reward.source, 40)}{of})"


def _use(record: TrainingRecord) -> str:
    credit = "" if record.credit is None else f"credit {number(record.credit, 4)}  "
    if record.dropped is not None:
        return f"step {record.step}: {credit}dropped: {record.dropped}"
    advantage = math.nan if record.advantage is None else record.advantage
    return (
        f"step {record.step}: {credit}advantage {number(advantage, 4)}  weight in the loss {number(record.weight, 4)}"
    )
