"""`agl show`: one rollout turn by turn, down to the advantage of each call and where that comes from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agl_core.cli.as_json import AsJson, print_json
from agl_core.cli.reading import read_run, superseded
from agl_core.cli.text import number, printable, said_by
from agl_core.types import Attempt, Episode, Reward, Rollout, TrainingRecord, Transition

if TYPE_CHECKING:
    from agl_core.cli.screen import Screen
    from agl_core.store.interface import Store
    from agl_core.training.recorded import GroupCredit

RunOption = Annotated[
    Path | None, typer.Option("--run", help="The run's folder; the newest below ./runs by default.", show_default=False)
]
Id = Annotated[str, typer.Argument(help="The rollout's id, or its beginning.")]
Width = Annotated[int, typer.Option(min=40, help="Characters of each text that are shown.")]


PRUNED = "Its calls were pruned (agl runs prune): their texts and tokens are gone, all else is as it was recorded."


def show(rollout: Id, run: RunOption = None, width: Width = 300, as_json: AsJson = False) -> None:
    """Show a rollout turn by turn: who spoke, what was asked, what the tools did, and what training made of it.

    Of each call: its rewards with the rule that gave them, what the credit rule made of them, its advantage, and how
    much it weighed in the loss. Below the turns: what the rollouts of its group were credited with, which it was
    compared with.
    """
    from agl_core.cli.screen import Screen
    from agl_core.learning import build_episode
    from agl_core.training.recorded import group_credit, reward_weights

    async def read(
        store: Store,
    ) -> tuple[Rollout, list[tuple[Attempt, Episode, list[TrainingRecord], bool]], list[GroupCredit]]:
        found = await store.rollout(rollout)
        shown = []
        for attempt in await store.attempts(found.id):
            keys = [attempt.key]
            calls = await store.calls(keys)
            episode = build_episode(found, attempt, calls, await store.tool_results(keys), await store.rewards(keys))
            shown.append((attempt, episode, await store.training_records(keys), any(call.pruned for call in calls)))
        return found, shown, await group_credit(store, found)

    (found, attempts, groups), runs = read_run(run, read)
    if as_json:
        print_json(_described(found, attempts, groups, is_superseded=superseded(found, runs)))
        return
    weights = next((reward_weights(r) for r in runs if (r.id, r.restart) == (found.run, found.restart)), {})
    screen = Screen()
    _line(screen, f"rollout {found.id}  {found.mode.value}  {found.state.value}", "bold")
    if superseded(found, runs):
        _line(screen, "superseded: a later restart went on from an earlier checkpoint", "yellow")
    _line(screen, f"task {found.task.id}: {printable(json.dumps(found.task.input, ensure_ascii=False), width)}")
    for attempt, episode, training_records, pruned in attempts:
        counts = attempt.attempt == found.counted_attempt
        ending = attempt.ending.value if attempt.ending else "running"
        _line(screen, f"\nattempt {attempt.attempt}: {ending} ({'counts' if counts else 'does not count'})", "bold")
        if attempt.error:
            _line(screen, f"  {printable(attempt.error, width)}", "red")
        if pruned:
            _line(screen, f"  {PRUNED}", "yellow")
        _print_episode(screen, episode, training_records, weights, width)
        if counts:
            _print_group(screen, found, groups)


def _described(
    rollout: Rollout,
    attempts: Sequence[tuple[Attempt, Episode, list[TrainingRecord], bool]],
    groups: Sequence[GroupCredit],
    *,
    is_superseded: bool,
) -> dict[str, Any]:
    """The same for programs, whole."""
    return {
        "rollout": rollout,
        "superseded": is_superseded,
        "attempts": [
            {"attempt": attempt, "episode": episode, "training_records": training_records, "pruned": pruned}
            for attempt, episode, training_records, pruned in attempts
        ],
        "groups": [
            {
                "step": group.step,
                "policy": group.policy,
                "mean": group.mean,
                "std": group.std,
                "credit": group.by_rollout,
            }
            for group in groups
        ],
    }


def _line(screen: Screen, text: str, style: str | None = None) -> None:
    screen.print(text, style=style, soft_wrap=True)


def _print_group(screen: Screen, rollout: Rollout, groups: Sequence[GroupCredit]) -> None:
    several = len({group.policy for group in groups}) > 1
    for group in groups:
        if rollout.id not in group.by_rollout:
            continue
        values = "  ".join("/".join(dict.fromkeys(number(v, 4) for v in each)) for each in group.by_rollout.values())
        of = f" of policy {group.policy}" if several else ""
        mean, std = number(group.mean, 4), number(group.std, 4)
        _line(
            screen,
            f"  group {printable(rollout.group, 80)}, step {group.step}: mean credit{of} {mean}, standard deviation "
            f"{std}, over {len(group.by_rollout)} rollouts: {printable(values, 300)}",
            "magenta",
        )


def _print_episode(
    screen: Screen,
    episode: Episode,
    training_records: Sequence[TrainingRecord],
    weights: Mapping[str, float],
    width: int,
) -> None:
    by_call: dict[tuple[str | None, int], list[Reward]] = {}
    for reward in episode.rewards:
        by_call.setdefault((reward.call, reward.choice), []).append(reward)
    for transition in episode.transitions:
        key = (transition.key.call, transition.key.choice)
        its_uses = [record for record in training_records if record.key == transition.key]
        _print_transition(screen, transition, by_call.pop(key, ()), its_uses, width)
    for tool_result in episode.unjoined:
        tool = f"{printable(tool_result.tool, 60)} {tool_result.status.value} ({said_by(tool_result)})"
        _line(screen, f"  tool result of no recorded call: {tool}", "yellow")
    _line(screen, f"  result: {printable(json.dumps(episode.result, ensure_ascii=False), width)}")
    for reward in episode.rewards:
        if reward.call is not None and (reward.call, reward.choice) in by_call:
            _line(screen, f"  reward {_describe_reward(reward)[:-1]}, which does not count)", "yellow")
    terminal = [reward for reward in episode.rewards if reward.call is None]
    _line(screen, f"  terminal reward: {_describe_terminal(terminal, weights)}", "bold")


def _print_transition(
    screen: Screen,
    transition: Transition,
    rewards: Sequence[Reward],
    training_records: Sequence[TrainingRecord],
    width: int,
) -> None:
    version = "" if transition.version is None else f" v{transition.version}"
    agent = printable(transition.agent or "unnamed agent", 60)
    _line(screen, f"\n  turn {transition.turn}  {agent}  ({printable(transition.policy, 60)}{version})", "cyan")
    for message in transition.messages[-1:]:
        text = printable(_text(message), width, tail=True)
        _line(screen, f"    {printable(str(message.get('role')), 40)}: {text}", "dim")
    _line(screen, f"    → {printable(_text(transition.response), width)}  [{transition.finish_reason.value}]")
    if transition.state is not None:
        state = printable(json.dumps(transition.state, ensure_ascii=False), width)
        _line(screen, f"    state {state}", "dim")
    ids = (
        "no token ids"
        if not transition.has_ids
        else f"{_size(transition.prompt_ids)} + {_size(transition.response_ids)} tokens"
    )
    logprob = "" if transition.logprobs is None else f", log-probability {float(transition.logprobs.sum()):.3f}"
    broken = ", prefix broken" if transition.prefix_broken else ""
    _line(screen, f"    {ids}{logprob}{broken}", "dim")
    if transition.parse_error:
        _line(screen, f"    tool call did not parse: {printable(transition.parse_error, width)}", "yellow")
    for tool_result in transition.tool_results:
        said = tool_result.error or json.dumps(tool_result.result, ensure_ascii=False)
        arguments = json.dumps(tool_result.arguments, ensure_ascii=False)
        _line(
            screen,
            f"    tool {printable(tool_result.tool, 60)}({printable(arguments, 80)}): {tool_result.status.value}  "
            f"{printable(said, width)}  ({said_by(tool_result)})",
            "green" if tool_result.status.value == "ok" else "red",
        )
    for reward in rewards:
        _line(screen, f"    reward {_describe_reward(reward)}")
    for record in training_records:
        _line(screen, f"    {_describe_use(record)}", "magenta")


def _describe_terminal(rewards: Sequence[Reward], weights: Mapping[str, float]) -> str:
    """The sum, and what it is made of; what the agent reported is told, and counts by the rule that takes it up.

    >>> _describe_terminal([Reward("r", 0, "right", 1.0, "right"), Reward("r", 0, "brief", 0.5, "brief")], {"brief": 0})
    '1 = right 1 (by right) + 0 · brief 0.5 (by brief)'
    """
    from agl_core.learning.rewards import AGENT_SOURCE

    parts = [reward for reward in rewards if reward.source != AGENT_SOURCE]
    told = [f"the agent reported {_describe_reward(reward)}" for reward in rewards if reward.source == AGENT_SOURCE]
    weight = {reward.source: weights.get(reward.source, 1.0) for reward in parts}
    total = math.fsum(weight[reward.source] * reward.value for reward in parts)
    terms = " + ".join(
        (f"{number(weight[each.source])} · " if weight[each.source] != 1 else "") + _describe_reward(each)
        for each in parts
    )
    return "; ".join([f"{number(total)} = {terms}" if parts else "none", *told])


def _describe_reward(reward: Reward) -> str:
    """Its name, value and provenance."""
    of = "" if reward.call is None else f", for call {printable(reward.call, 80)}"
    return f"{printable(reward.name, 80)} {number(reward.value)} (by {printable(reward.source, 40)}{of})"


def _describe_use(record: TrainingRecord) -> str:
    credit = "" if record.credit is None else f"credit {number(record.credit, 4)}  "
    if record.dropped is not None:
        return f"step {record.step}: {credit}dropped: {record.dropped}"
    advantage = math.nan if record.advantage is None else record.advantage
    return (
        f"step {record.step}: {credit}advantage {number(advantage, 4)}  weight in the loss {number(record.weight, 4)}"
    )


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    calls = [_tool_call(each) for each in message.get("tool_calls") or ()]
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)
    return " ".join([text, *calls]).strip()


def _tool_call(tool_call: Any) -> str:
    function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
    if not isinstance(function, Mapping):
        return json.dumps(tool_call, ensure_ascii=False)
    return f"{function.get('name')}({function.get('arguments', '')})"


def _size(tokens: Any) -> int:
    return 0 if tokens is None else len(tokens)
