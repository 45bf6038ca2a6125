"""`agl rollouts` and `agl show`: what was recorded, readable while a run goes on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agl_core.cli.train import find_run
from agl_core.errors import ConfigError
from agl_core.types import Attempt, Ending, Episode, Mode, Reward, Rollout, Run, Transition, Use

if TYPE_CHECKING:
    from rich.console import Console

    from agl_core.store.interface import Store

RunArgument = Annotated[
    Path | None, typer.Argument(help="The run's folder; the newest below ./runs by default.", show_default=False)
]
RunOption = Annotated[
    Path | None, typer.Option("--run", help="The run's folder; the newest below ./runs by default.", show_default=False)
]
Step = Annotated[int | None, typer.Option(help="Only of this step.", show_default=False)]
ModeOption = Annotated[Mode | None, typer.Option(help="Only of this mode.", show_default=False)]
EndingOption = Annotated[Ending | None, typer.Option(help="Only those that ended like this.", show_default=False)]
Limit = Annotated[int, typer.Option(min=1, help="The newest so many.")]
Id = Annotated[str, typer.Argument(help="The rollout's id, or its beginning.")]
Width = Annotated[int, typer.Option(min=40, help="Characters of each text that are shown.")]


def rollouts(
    run: RunArgument = None, step: Step = None, mode: ModeOption = None, ending: EndingOption = None, limit: Limit = 20
) -> None:
    """List the rollouts of a run, the newest last."""
    from rich.console import Console
    from rich.table import Table

    async def read(store: Store) -> list[tuple[Rollout, list[Reward]]]:
        found = await store.rollouts(step=step, mode=mode)
        newest = [r for r in found if ending is None or r.ending is ending][-limit:]
        return [(r, await _rewards(store, r)) for r in newest]

    rows, runs = _read(run, read)
    table = Table(expand=True)
    for column in ("rollout", "mode", "ended", "try", "reward"):
        table.add_column(column, no_wrap=True)
    table.add_column("task", no_wrap=True, ratio=1, min_width=16)
    for rollout, rewards in rows:
        table.add_row(
            rollout.id + (" (superseded)" if superseded(rollout, runs) else ""),
            rollout.mode.value,
            rollout.ending.value if rollout.ending else rollout.state.value,
            "-" if rollout.counted_attempt is None else str(rollout.counted_attempt + 1),
            ", ".join(f"{r.name} {r.value:g}" for r in rewards if r.call is None) or "-",
            printable(json.dumps(rollout.task.input, ensure_ascii=False), 60),
        )
    Console().print(table)


def show(rollout: Id, run: RunOption = None, width: Width = 300) -> None:
    """Show a rollout turn by turn: who spoke, what was asked, what the tools did, and what training made of it."""
    from rich.console import Console

    from agl_core.learning import build_episode

    async def read(store: Store) -> tuple[Rollout, list[tuple[Attempt, Episode, list[Use]]]]:
        found = await store.rollout(rollout)
        shown = []
        for attempt in await store.attempts(found.id):
            keys = [attempt.key]
            episode = build_episode(
                found, attempt, await store.calls(keys), await store.outcomes(keys), await store.rewards(keys)
            )
            shown.append((attempt, episode, await store.uses(keys)))
        return found, shown

    (found, attempts), runs = _read(run, read)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"rollout {found.id}  {found.mode.value}  {found.state.value}", style="bold")
    if superseded(found, runs):
        console.print("superseded: a later incarnation went on from an earlier checkpoint", style="yellow")
    console.print(f"task {found.task.id}: {printable(json.dumps(found.task.input, ensure_ascii=False), width)}")
    for attempt, episode, uses in attempts:
        counts = "counts" if attempt.attempt == found.counted_attempt else "does not count"
        ending = attempt.ending.value if attempt.ending else "running"
        console.print(f"\nattempt {attempt.attempt}: {ending} ({counts})", style="bold")
        if attempt.error:
            console.print(f"  {printable(attempt.error, width)}", style="red")
        _print_episode(console, episode, uses, width)


def _print_episode(console: Console, episode: Episode, uses: Sequence[Use], width: int) -> None:
    by_call: dict[tuple[str | None, int], list[Reward]] = {}
    for reward in episode.rewards:
        by_call.setdefault((reward.call, reward.choice), []).append(reward)
    for transition in episode.transitions:
        key = (transition.key.call, transition.key.choice)
        its_uses = [use for use in uses if use.key == transition.key]
        _print_transition(console, transition, by_call.pop(key, ()), its_uses, width)
    for outcome in episode.unjoined:
        console.print(f"  outcome of no recorded call: {outcome.tool} {outcome.status.value}", style="yellow")
    console.print(f"  result: {printable(json.dumps(episode.result, ensure_ascii=False), width)}")
    terminal = [reward for reward in episode.rewards if reward.call is None]
    for reward in episode.rewards:
        if reward.call is not None and (reward.call, reward.choice) in by_call:
            console.print(f"  reward {_describe_reward(reward)[:-1]}, which does not count)", style="yellow")
    parts = ", ".join(map(_describe_reward, terminal))
    console.print(f"  terminal reward: {parts or 'none'}", style="bold")


def _print_transition(
    console: Console, transition: Transition, rewards: Sequence[Reward], uses: Sequence[Use], width: int
) -> None:
    version = "" if transition.version is None else f" v{transition.version}"
    agent = printable(transition.agent or "unnamed agent", 60)
    console.print(f"\n  turn {transition.turn}  {agent}  ({transition.policy}{version})", style="cyan")
    for message in transition.messages[-1:]:
        text = printable(_text(message), width, tail=True)
        console.print(f"    {message.get('role')}: {text}", style="dim")
    console.print(f"    → {printable(_text(transition.response), width)}  [{transition.finish_reason.value}]")
    if transition.state is not None:
        state = printable(json.dumps(transition.state, ensure_ascii=False), width)
        console.print(f"    state {state}", style="dim")
    ids = (
        "no token ids"
        if not transition.has_ids
        else f"{_size(transition.prompt_ids)} + {_size(transition.response_ids)} tokens"
    )
    logprob = "" if transition.logprobs is None else f", log-probability {float(transition.logprobs.sum()):.3f}"
    broken = ", prefix broken" if transition.prefix_broken else ""
    console.print(f"    {ids}{logprob}{broken}", style="dim")
    if transition.parse_error:
        console.print(f"    tool call did not parse: {printable(transition.parse_error, width)}", style="yellow")
    for outcome in transition.outcomes:
        said = outcome.error or json.dumps(outcome.result, ensure_ascii=False)
        arguments = json.dumps(outcome.arguments, ensure_ascii=False)
        console.print(
            f"    tool {printable(outcome.tool, 60)}({printable(arguments, 80)}): {outcome.status.value}  "
            f"{printable(said, width)}",
            style="green" if outcome.status.value == "ok" else "red",
        )
    for reward in rewards:
        console.print(f"    reward {_describe_reward(reward)}")
    for use in uses:
        console.print(f"    {_describe_use(use)}", style="magenta")


def _describe_reward(reward: Reward) -> str:
    """Its name, value and provenance."""
    of = "" if reward.call is None else f", for call {printable(reward.call, 80)}"
    return f"{printable(reward.name, 80)} {reward.value:g} (by {printable(reward.source, 40)}{of})"


def _describe_use(use: Use) -> str:
    credit = "" if use.credit is None else f"credit {use.credit:.4g}  "
    if use.dropped is not None:
        return f"step {use.step}: {credit}dropped: {use.dropped}"
    advantage = math.nan if use.advantage is None else use.advantage
    return f"step {use.step}: {credit}advantage {advantage:.4g}  weight in the loss {use.weight:.4g}"


def printable(text: str, width: int, *, tail: bool = False) -> str:
    """`text` on one line, without what a terminal would obey, cut to `width` (at its beginning if `tail`)."""
    safe = "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in text)
    if len(safe) <= width:
        return safe
    return f"…{safe[-width + 1 :]}" if tail else f"{safe[: width - 1]}…"


def superseded(rollout: Rollout, runs: Sequence[Run]) -> bool:
    """Whether a later incarnation resumed from before this rollout's step."""
    return any(
        r.id == rollout.run
        and r.incarnation > rollout.incarnation
        and r.resumed_step is not None
        and rollout.mode.trains
        and rollout.step > r.resumed_step
        for r in runs
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


async def _rewards(store: Store, rollout: Rollout) -> list[Reward]:
    keys = [a.key for a in await store.attempts(rollout.id) if a.attempt == rollout.counted_attempt]
    return await store.rewards(keys)


def _read(run: Path | None, read: Any) -> tuple[Any, list[Run]]:
    """Call `read` with the run's store, opened for reading only."""
    from agl_core.cli.captures import is_capture
    from agl_core.config.load import CONFIG_FILE, load_for_server

    folder = newest_run() if run is None else find_run(run)
    build = _build_store if is_capture(folder) else load_for_server(folder / CONFIG_FILE).store.build

    async def reading() -> tuple[Any, list[Run]]:
        store: Store = build(folder, True)
        async with store:
            return await read(store), await store.runs()

    return asyncio.run(reading())


def _build_store(folder: Path, read_only: bool) -> Store:
    from agl_core.store.sqlite import SqliteStore

    return SqliteStore(folder / "store.sqlite", read_only=read_only)


def newest_run() -> Path:
    """The newest run's folder below ./runs."""
    from agl_core.config.load import CONFIG_FILE

    found = sorted(Path("runs").glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("There are no runs below ./runs. Name a run's folder, or train first: agl train CONFIG.")
    return found[-1].parent
