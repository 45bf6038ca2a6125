"""`agl show`: one rollout turn by turn, down to the advantage of each call and where that comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.analysis.text.words import message_text, number, one_line, said_by, status_text
from agl_core.cli.shared.options import AsJson, RunOption
from agl_core.cli.shared.text import print_json
from agl_core.learning.health import has_cut_prompt
from agl_core.types import Reward, TrainingRecord

if TYPE_CHECKING:
    from agl_core.analysis.rollouts import AttemptReport, RolloutReport, TerminalReward, Turn
    from agl_core.cli.shared.screen import Screen

Id = Annotated[str, typer.Argument(help="The rollout's id, or its beginning.")]
Width = Annotated[int, typer.Option(min=40, help="Characters of each text that are shown.")]

PRUNED = "Its calls were pruned (agl runs prune): their texts and tokens are gone, all else is as it was recorded."


def show(rollout: Id, run: RunOption = None, width: Width = 300, as_json: AsJson = False) -> None:
    """Show a rollout turn by turn: who spoke, what was asked, what the tools did, and what training made of it.

    Each call has its rewards with the rule that gave them, its credit, its advantage, and its weight in the loss. Below
    the turns is the credit of the whole group, which the rollout was compared with.
    """
    from agl_core.analysis.rollouts import read_rollout
    from agl_core.analysis.runs import read_run
    from agl_core.cli.shared.screen import Screen

    report = read_run(run, lambda store: read_rollout(store, rollout))
    if as_json:
        print_json(report)
        return
    screen, found = Screen(), report.rollout
    screen.print(f"rollout {found.id}  {found.mode.value}  {found.state.value}", style="bold")
    if report.superseded:
        screen.print("superseded: a later restart went on from an earlier checkpoint", style="yellow")
    screen.print(f"task {found.task.id}: {one_line(json.dumps(found.task.input, ensure_ascii=False), width)}")
    for each in report.attempts:
        attempt = each.attempt
        counts = attempt.attempt == found.counted_attempt
        ending = attempt.ending.value if attempt.ending else "running"
        screen.print(
            f"\nattempt {attempt.attempt}: {ending} ({'counts' if counts else 'does not count'})", style="bold"
        )
        if attempt.error:
            screen.print(f"  {one_line(attempt.error, width)}", style="red")
        if attempt.ending is not None:
            screen.print(f"  {each.health.text}", style="green" if not each.health.symptoms else "yellow")
        if each.pruned:
            screen.print(f"  {PRUNED}", style="yellow")
        _print_attempt(screen, each, report.weights, width)
        if counts:
            _print_groups(screen, report)


def _print_groups(screen: Screen, report: RolloutReport) -> None:
    several = len({group.policy for group in report.groups}) > 1
    for group in report.groups:
        if report.rollout.id not in group.credit:
            continue
        values = "  ".join("/".join(dict.fromkeys(number(v, 4) for v in each)) for each in group.credit.values())
        of = f" of policy {group.policy}" if several else ""
        screen.print(
            f"  group {one_line(report.rollout.group, 80)}, step {group.step}: mean credit{of} "
            f"{number(group.mean, 4)}, standard deviation {number(group.std, 4)}, over {len(group.credit)} rollouts: "
            f"{one_line(values, 300)}",
            style="magenta",
        )


def _print_attempt(screen: Screen, attempt: AttemptReport, weights: Mapping[str, float], width: int) -> None:
    episode = attempt.episode
    for turn in attempt.turns:
        _print_turn(screen, turn, width)
    for undelivered in episode.undelivered:
        said = one_line(message_text(undelivered.response), width)
        agent = one_line(undelivered.agent or "unnamed agent", 60)
        screen.print(f"  undelivered, before turn {undelivered.turn}: {agent} did not get {said!r}", style="yellow")
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
    for tool_result in episode.unjoined:
        tool = f"{one_line(tool_result.tool, 60)} {status_text(tool_result)} ({said_by(tool_result)})"
        screen.print(f"  tool result of no recorded call: {tool}", style="yellow")
    screen.print(f"  result: {one_line(json.dumps(episode.result, ensure_ascii=False), width)}")
    for reward in attempt.uncounted_rewards:
        screen.print(f"  reward {_describe_reward(reward)[:-1]}, which does not count)", style="yellow")
    screen.print(f"  terminal reward: {_describe_terminal(attempt.terminal(weights))}", style="bold")


def _print_turn(screen: Screen, turn: Turn, width: int) -> None:
    transition = turn.transition
    version = "" if transition.version is None else f" v{transition.version}"
    agent = one_line(transition.agent or "unnamed agent", 60)
    screen.print(f"\n  turn {transition.turn}  {agent}  ({one_line(transition.policy, 60)}{version})", style="cyan")
    for message in transition.messages[-1:]:
        text = one_line(message_text(message), width, tail=True)
        screen.print(f"    {one_line(str(message.get('role')), 40)}: {text}", style="dim")
    screen.print(f"    → {one_line(message_text(transition.response), width)}  [{transition.finish_reason.value}]")
    if transition.state is not None:
        state = one_line(json.dumps(transition.state, ensure_ascii=False), width)
        screen.print(f"    state {state}", style="dim")
    prompt, response = transition.prompt_ids, transition.response_ids
    ids = "no token ids" if prompt is None or response is None else f"{len(prompt)} + {len(response)} tokens"
    logprob = ", no log-probabilities" if transition.has_ids else ""
    if transition.logprobs is not None:
        logprob = f", log-probability {float(transition.logprobs.sum()):.3f}"
    broken = ", prefix broken" if transition.prefix_broken else ""
    broken += ", prompt cut by the model server" if has_cut_prompt(transition) else ""
    screen.print(f"    {ids}{logprob}{broken}", style="dim")
    if transition.parse_error:
        screen.print(f"    tool call did not parse: {one_line(transition.parse_error, width)}", style="yellow")
    for tool_result in transition.tool_results:
        said = tool_result.error or json.dumps(tool_result.result, ensure_ascii=False)
        arguments = json.dumps(tool_result.arguments, ensure_ascii=False)
        screen.print(
            f"    tool {one_line(tool_result.tool, 60)}({one_line(arguments, 80)}): {status_text(tool_result)}  "
            f"{one_line(said, width)}  ({said_by(tool_result)})",
            style="green" if tool_result.status.value == "ok" else "red",
        )
    for reward in turn.rewards:
        screen.print(f"    reward {_describe_reward(reward)}")
    for record in turn.training_records:
        screen.print(f"    {_describe_use(record)}", style="magenta")


def _describe_terminal(terminal: TerminalReward) -> str:
    """The sum, and what it is made of; also what the agent reported.

    >>> from agl_core.analysis.rollouts import terminal_reward
    >>> given = [Reward("r", 0, "right", 1.0, "right"), Reward("r", 0, "brief", 0.5, "brief")]
    >>> _describe_terminal(terminal_reward(given, {"brief": 0}))
    '1 = right 1 (by right) + 0 · brief 0.5 (by brief)'
    """
    terms = " + ".join(
        (f"{number(weight)} · " if weight != 1 else "") + _describe_reward(reward) for weight, reward in terminal.parts
    )
    total = "none" if terminal.value is None else f"{number(terminal.value)} = {terms}"
    return "; ".join([total, *(f"the agent reported {_describe_reward(reward)}" for reward in terminal.reported)])


def _describe_reward(reward: Reward) -> str:
    """Its name, value and provenance."""
    of = "" if reward.call is None else f", for call {one_line(reward.call, 80)}"
    return f"{one_line(reward.name, 80)} {number(reward.value)} (by {one_line(reward.source, 40)}{of})"


def _describe_use(record: TrainingRecord) -> str:
    credit = "" if record.credit is None else f"credit {number(record.credit, 4)}  "
    if record.dropped is not None:
        return f"step {record.step}: {credit}dropped: {record.dropped}"
    advantage = math.nan if record.advantage is None else record.advantage
    return (
        f"step {record.step}: {credit}advantage {number(advantage, 4)}  weight in the loss {number(record.weight, 4)}"
    )
