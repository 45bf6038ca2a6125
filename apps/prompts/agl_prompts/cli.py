"""`agl optimize`: improve the prompts of the agent that a configuration names."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from agl_core import kinds
from agl_core.cli.screen import Screen, Set, table
from agl_core.client.worker import until_signal
from agl_core.config.load import CONFIG_FILE, LoadedConfig, load
from agl_core.errors import ConfigError
from agl_core.wire import take_key_of
from agl_prompts.config import OptimizeSection, Proposer, ServedModel
from agl_prompts.gepa import gepa
from agl_prompts.search import Search, SearchOverError
from agl_server.commands.screen import ConsoleObserver, Seed
from agl_server.http.listening import run
from agl_server.reading.runs import find_run
from agl_server.training.run import local_server, new_run_dir, removed_unless_begun, run_settings
from agl_server.training.session import open_session

Config = Annotated[Path | None, typer.Argument(help="The run's configuration (TOML).")]
Resume = Annotated[Path | None, typer.Option(metavar="RUN", help="A run: go on with its search.")]

_FILE, _PROPOSALS = "prompts.toml", "proposals.jsonl"
"""In the run's folder: the best candidate, and what the proposer answered."""
_ANSWERED_ELSEWHERE = (kinds.TASK_SOURCE, kinds.REWARD, kinds.STORE, kinds.CONFIG_TABLE)
"""The kinds that are needed where no engine of this run answers."""


def optimize(config: Config = None, seed: Seed = None, set_: Set = [], resume: Resume = None) -> None:
    """Improve the agent's prompts by reflection on its rollouts, and print the rewards before and after.

    Weights stay as they are. The prompts are those of [prompts]; [optimize] says which model proposes others, and how
    many rollouts they may take. The best ones are written to prompts.toml in the run's folder, also if the search is
    stopped by Ctrl-C; --resume goes on with it, and repeats no rollout.
    """
    if (config is None) == (resume is None):
        raise ConfigError("Name either a configuration file or, with --resume, a run. See agl optimize --help.")
    file = config if config is not None else find_run(resume) / CONFIG_FILE
    loaded, settings = _load(file, set_, seed)
    run_dir = new_run_dir(loaded) if resume is None else file.parent
    console = Screen()
    console.print(f"run folder: {run_dir}")
    stopped_by = run(_optimize(loaded, settings, run_dir, console))
    if stopped_by is not None:
        raise typer.Exit(128 + stopped_by)


def _load(file: Path, overrides: list[str], seed: int | None) -> tuple[LoadedConfig, OptimizeSection]:
    loaded = load(file, overrides, seed, needs=_ANSWERED_ELSEWHERE)
    config = loaded.config
    if "optimize" not in loaded.sections:
        raise ConfigError(f"{file}: add the table [optimize], with a `proposer` (docs/how-to/prompts.md).")
    if not config.prompts or "train" not in config.tasks or config.agent is None:
        raise ConfigError(
            f"{file}: agl optimize needs [agent], [tasks.train], and a table [prompts.NAME] for each prompt."
        )
    settings = loaded.sections["optimize"].options
    assert isinstance(settings, OptimizeSection)
    if settings.upstream is None:
        loaded = load(file, overrides, seed)
    return loaded, settings


async def _optimize(
    loaded: LoadedConfig, settings: OptimizeSection, run_dir: Path, console: Screen
) -> signal.Signals | None:
    """Search, print the result, and return the signal by which it was stopped."""
    observer = ConsoleObserver(console, settings.budget)
    async with AsyncExitStack() as stack:
        begun = stack.enter_context(removed_unless_begun(run_dir))
        variables = {server.api_key_env for server in (settings.proposer, settings.upstream) if server}
        keys = {name: take_key_of("optimize: api_key_env", name) or "none" for name in variables}
        upstream, engine = settings.upstream, None
        if upstream is not None:
            engine = ServedModel(upstream, keys[upstream.api_key_env], loaded.config.policies)
        proposer = Proposer(settings.proposer, keys[settings.proposer.api_key_env], run_dir / _PROPOSALS)
        server = await stack.enter_async_context(local_server(loaded, run_dir))
        recorded = await server.store.rollouts()
        session = await stack.enter_async_context(open_session(loaded, run_dir, server, observer, own_engine=engine))
        begun()
        if not session.upstream.returns_ids:  # A hosted API may refuse settings that it does not know.
            server.relay.connect(session.upstream, replace(run_settings(loaded.config), sampling=None))
        search = Search(loaded.config, settings, session, observer, proposer, recorded)
        try:
            outcome = await until_signal(_search(search, observer))
        finally:
            if search.scores:
                search.write(run_dir / _FILE)
        stopped_by = outcome if isinstance(outcome, signal.Signals) else None
        if search.scores:
            _print(console, search, [] if isinstance(outcome, signal.Signals) else outcome, run_dir)
    return stopped_by


async def _search(search: Search, observer: ConsoleObserver) -> list[dict[str, float]]:
    """The rewards on held-out sets: of the seed, and of the best candidate that was found."""
    await search.begin()
    before = await search.held_out(search.seed)
    try:
        await gepa(search)
    except SearchOverError as over:
        observer.say(f"the search is over: {over}")
    return [before, await search.held_out(search.best)]


def _print(console: Screen, search: Search, rewards: list[dict[str, float]], run_dir: Path) -> None:
    candidates = table("candidate", "prompts", numbers=("validation",))
    for number, score in sorted(search.scores.items()):
        candidate = search.candidates[number]
        changed = [text for name, text in candidate.items() if text != search.seed[name]] or ["as they were"]
        mark = " (chosen)" if candidate == search.best else ""
        candidates.add_row(f"{number}{mark}", " | ".join(text[:60] for text in changed), f"{score:.3f}")
    console.print(candidates)
    if rewards:
        before, after = rewards
        held_out = table("held-out set", numbers=("before", "after"))
        for name in before:
            held_out.add_row(name, f"{before[name]:.3f}", f"{after[name]:.3f}")
        console.print(held_out)
    console.print(f"rollouts     {search.spent}, for {len(search.candidates)} candidates")
    console.print(f"prompts      {run_dir / _FILE}")
    console.print(f"next: agl rollouts {run_dir} --step {search.candidates.index(search.best)}")
