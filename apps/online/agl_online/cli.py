"""The commands of real use: `agl serve`, `learn`, `sessions`, `versions` and `policy`."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core import kinds
from agl_core.cli.screen import AsJson, Screen, Set, print_json, table
from agl_core.cli.words import number, one_line
from agl_core.client.worker import LightningClient, until_signal
from agl_core.config.load import CONFIG_FILE, SERVED, LoadedConfig, load, store_config
from agl_core.errors import ConfigError
from agl_core.kinds import Kind
from agl_core.types import Mode
from agl_core.wire import OPERATOR_KEY, SERVER_FILE, ServerFile, take_key, take_key_of, take_keys
from agl_online import HELP, learner, policies
from agl_online.config import online_section
from agl_online.deployed import fixed_upstream
from agl_online.policies import POLICY_KEY, Version, find_policy
from agl_online.sessions import check_known, sessions_of
from agl_online.versions import DecidedBy, Decision, Ledger, LedgerError, State
from agl_online.wire import DELETE_SESSIONS, ApplicationKeys, DeleteSessions, Purpose
from agl_server.commands.screen import ConsoleObserver, Port, Run, show_in_browser
from agl_server.commands.train import train_and_report
from agl_server.commands.upstreams import ANEW, open_upstream
from agl_server.http import listening
from agl_server.http.keys import Keys
from agl_server.reading.explained import RolloutReport
from agl_server.reading.rollouts import Query, list_rollouts
from agl_server.reading.runs import find_run, has_writer, open_store, read_settings
from agl_server.training.run import local_server, make_run_dir, removed_unless_begun, run_settings

Target = Annotated[Path, typer.Argument(help="The run's configuration (TOML), or its folder.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Sessions, by their ids.")]
Application = Annotated[str, typer.Argument(help="The application, as in [online.applications].")]
Limit = Annotated[int, typer.Option(min=1, help="The number of sessions, the newest ones.")]
ForFeedback = Annotated[bool, typer.Option("--feedback", help="The key for feedback alone.")]
Name = Annotated[
    str, typer.Argument(metavar="NAME[@STEP]", help="As calc@40; calc alone means the version named above.")
]
Reason = Annotated[str, typer.Option(help="Why, for the ledger.")]
Saved = Annotated[str, typer.Argument(metavar="NAME@STEP", help="As calc@40, calc@latest, calc@best or calc@stable.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME[@STEP]...", help="As calc@40; calc alone: the latest.")]
Out = Annotated[Path, typer.Option(help="The folder to write; it must not exist.")]
Host = Annotated[str, typer.Option(help="The address to listen on.")]

_BY_HAND = "An operator decided so."

sessions = typer.Typer(help=HELP["sessions"], no_args_is_help=True)
versions = typer.Typer(help=HELP["versions"], no_args_is_help=True)
policy = typer.Typer(help=HELP["policy"], no_args_is_help=True)


def serve(target: Target, set_: Set = []) -> None:
    """Stand between deployed applications and their model: record their sessions, and take feedback on them.

    The configuration has [online] with the applications and the model server (docs/deploy-and-learn.md). The run's
    folder, runs/NAME, holds the store. The server may be killed at any time: the same command goes on with open
    sessions. This machine needs no weights, and only the store among the configuration's plugins.

    To be reached from other machines, give it an address of this one with `--set server.host=…`, and set
    AGL_WORKER_KEY. Traffic is not encrypted. Ctrl-C or SIGTERM stops it.
    """
    loaded, run_dir = _read(target, set_, SERVED)
    is_new = not run_dir.exists()
    if not (run_dir / CONFIG_FILE).exists():
        make_run_dir(run_dir, partial(store_config, loaded.config))
    with removed_unless_begun(run_dir if is_new else None) as begun:
        listening.run(until_signal(_serve(loaded, run_dir, Screen(), begun)))


async def _serve(loaded: LoadedConfig, run_dir: Path, console: Screen, begun: Callable[[], None]) -> None:
    online = online_section(loaded)
    if online.upstream is None:
        raise ConfigError(
            "With [learn], versions of the run's own answer its sessions, and `agl learn` serves them: start that, or "
            "leave [learn] out and name online.upstream."
        )
    key = take_key_of("online.upstream_key_env", online.upstream_key_env)
    upstream, missing = open_upstream(online.upstream.rstrip("/"), key or "none", online.model)
    if missing:
        console.print(f"note: no token ids are recorded, for {missing}. Sessions can be read, not trained on.")
    elif not upstream.continues_ids:
        console.print(ANEW)
    answering = fixed_upstream(upstream, run_settings(loaded.config))
    recorded = sessions_of(loaded, run_dir, answering, console.print)
    async with local_server(loaded, run_dir, recorded) as server:
        begun()
        console.print(f"serving {run_dir} at {server.base_url}")
        async with show_in_browser(run_dir, loaded.config.server, server.keys.operator) as address:
            ConsoleObserver(console, 0, address).begun()
            try:
                await asyncio.Event().wait()
            finally:
                console.print("stopping")


def learn(target: Target, set_: Set = []) -> None:
    """Serve a run's versions to applications, learn from their sessions, and test each new version before it serves.

    The configuration has [online] with the applications, and [learn]. Everything runs on this machine: both engines
    (one trains, one answers), server and workers. The address for applications is printed at the start; `agl sessions
    key` makes their keys.

    Each step takes rewarded sessions that ended. Every learn.propose_every steps the weights go to the gate, then to a
    share of the sessions, then to all (docs/deploy-and-learn.md). `agl versions` shows each version's state.

    Ctrl-C stops the run and saves a checkpoint (exit status 130; 143 after SIGTERM). The same command goes on with it.
    """
    loaded, run_dir = _read(target, set_)
    console = Screen()
    console.print(f"run folder: {run_dir}")
    learning = partial(learner.learn, loaded, run_dir)
    train_and_report(loaded, run_dir, learning, console, f"agl learn {run_dir}")


def _read(target: Path, overrides: Sequence[str], needs: Collection[Kind] = kinds.KINDS) -> tuple[LoadedConfig, Path]:
    if target.is_dir():
        return load(target / CONFIG_FILE, overrides, needs=needs), target
    loaded = load(target, overrides, needs=needs)
    return loaded, loaded.config.runs / loaded.config.name


def _entry(report: RolloutReport) -> dict[str, Any]:
    rollout, [recorded] = report.entry.rollout, report.attempts
    annotations = recorded.episode.annotations
    return {
        "id": rollout.id,
        "application": str(rollout.task.metadata.get("application")),
        "name": rollout.task.metadata.get("session"),
        "started": recorded.attempt.started,
        "ended": recorded.attempt.ended,
        "ending": rollout.ending,
        "calls": len({transition.key.call for transition in recorded.episode.transitions}),
        "feedback": [{"id": a.id, "received": a.received, "call": a.call, **a.said} for a in annotations],
    }


@sessions.command("list")
def list_sessions(run: Run, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the sessions of a run, the newest last. --json has all feedback; agl show RUN ID has the calls of one."""
    reports = asyncio.run(list_rollouts(find_run(run), Query(mode=Mode.USE), limit))
    entries = [_entry(report) for report in reports]
    if as_json:
        print_json(entries)
        return
    rows = table("session", "application", "name", "started", "ended", "calls", "feedback")
    for entry in entries:
        numbers = {name: value for feedback in entry["feedback"] for name, value in feedback["rewards"].items()}
        given = ", ".join(f"{one_line(name, 40)} {number(value)}" for name, value in numbers.items())
        rows.add_row(
            entry["id"],
            one_line(entry["application"], 40),
            one_line(entry["name"] or "-", 40),
            _when(entry["started"]),
            entry["ending"] or "open",
            str(entry["calls"]),
            given or ("said" if entry["feedback"] else "-"),
        )
    Screen().print(rows)


@sessions.command("delete")
def delete_sessions(run: Run, ids: Ids, as_json: AsJson = False) -> None:
    """Remove everything that was recorded of sessions, for good. Feedback on them is refused from then on."""
    folder = find_run(run)
    deleted = asyncio.run(_delete(folder, ids))
    if as_json:
        print_json({"deleted": deleted})
        return
    nothing = f"; of {len(ids) - deleted} nothing was left" if deleted < len(ids) else ""
    Screen().print(f"{deleted} sessions deleted{nothing}")


async def _delete(folder: Path, ids: list[str]) -> int:
    """Have the server delete sessions, if one is there; returns how many had anything recorded."""
    if not has_writer(folder):
        async with open_store(folder, read_only=False) as store:
            await check_known(store, ids)
            return await store.erase(ids)
    server = ServerFile.read(folder / SERVER_FILE)
    key = take_keys().get(OPERATOR_KEY) or (server and server.operator_key)
    if server is None or not key:
        raise ConfigError(
            f"A server is writing {folder}, and the key to it is not known here. Set {OPERATOR_KEY} to the value that "
            f"it has there, or stop the server first."
        )
    async with LightningClient(server.base_url, key) as client:
        return (await client.ask(DELETE_SESSIONS, DeleteSessions(sessions=ids))).deleted


@sessions.command("key")
def print_key(run: Run, application: Application, feedback: ForFeedback = False) -> None:
    """Print a key of an application: for its model calls and sessions, or for feedback on these."""
    folder = find_run(run)
    applications = read_settings(folder).get("online", {}).get("applications", {})
    server = ServerFile.read(folder / SERVER_FILE)
    if application not in applications:
        known = ", ".join(applications) or "none: it has no [online]"
        raise ConfigError(f"The run {folder} has no application '{application}'. Known: {known}.")
    if server is None:
        raise ConfigError(f"The run {folder} has no keys yet: start it once with `agl serve` or `agl learn`.")
    keys = ApplicationKeys(Keys(secret=server.agent_secret), applications)
    typer.echo(keys.of(Purpose.FEEDBACK if feedback else Purpose.APPLICATION, application))


@versions.command("list")
def list_versions(run: Run, as_json: AsJson = False) -> None:
    """List the versions of a deployed run: what each is, since when and why. --json has the figures behind it."""
    folder = find_run(run)
    ledger = Ledger(folder)
    standing = ledger.current()
    names = {step: f"{folder.resolve().name}@{step}" for step in sorted(standing.decided)}
    if as_json:
        decisions = ledger.decisions()
        entries = []
        for step, name in names.items():
            own = [decision for decision in decisions if decision.step == step]
            entries.append({"name": name, "step": step, "state": standing.state(step), "decisions": own})
        print_json(entries)
        return
    rows = table("version", "state", "since", "by", "reason")
    for step, name in names.items():
        decision, state = standing.decided[step], standing.state(step)
        rows.add_row(name, state, _when(decision.time), decision.by, one_line(decision.reason, 200))
    Screen().print(rows)


@versions.command()
def promote(name: Name, reason: Reason = _BY_HAND) -> None:
    """Make a version that passed the gate the stable one. Without @STEP it is the canary, or else the last that passed.

    It answers all sessions from their next call on.
    """
    Screen().print(f"{_decide(name, State.STABLE, reason)} is the stable version")


@versions.command()
def rollback(name: Name, reason: Reason = _BY_HAND) -> None:
    """Withdraw a version at once, from open sessions too. Without @STEP it is the canary, or else the stable version.

    If it was the stable version, the one before it is stable again.
    """
    Screen().print(f"{_decide(name, State.ROLLED_BACK, reason)} is rolled back")


def _decide(name: str, state: State, reason: str) -> str:
    """Write an operator's decision; returns the name of the version."""
    run, _ = find_policy(name.partition("@")[0])
    standing = Ledger(run).current()
    otherwise = standing.passed if state is State.STABLE else standing.stable
    step = standing.canary if standing.canary is not None else otherwise
    if "@" in name:
        step = Version.find(name).step
    if step is None:
        raise LedgerError(f"There is no such version of {name}: it was never deployed (`agl learn`), or none waits.")
    Ledger(run).record(Decision(step, state, DecidedBy.OPERATOR, reason))
    return f"{run.resolve().name}@{step}"


@policy.command("export")
def export_version(name: Saved, out: Out, set_: Set = []) -> None:
    """Write a version as a Hugging Face folder, with tokenizer, chat template and model card.

    It has all weights, or the adapter alone if the run trained one.
    """
    version = Version.find(name)
    policies.export(version, out, set_)
    Screen().print(f"{version} is in {out}")


@policy.command("serve")
def serve_policies(names: Names, host: Host = "127.0.0.1", port: Port = 8400, set_: Set = []) -> None:
    """Serve versions to any client of OpenAI's or Anthropic's APIs, without a trainer. Nothing is recorded.

    Requests name a version as their model, as it is named here. A single version answers whatever they name.

    To be reached from other machines, set AGL_POLICY_KEY, which clients send as their API key, and name an address of
    this machine with --host. Traffic is not encrypted. Ctrl-C or SIGTERM stops it.
    """
    listening.run(until_signal(_serve_policies(names, host, port, take_key(POLICY_KEY), set_, Screen())))


async def _serve_policies(
    names: list[str], host: str, port: int, key: str | None, overrides: list[str], console: Screen
) -> None:
    console.print("starting the engine")
    async with policies.serving(names, host=host, port=port, key=key, overrides=overrides) as (url, engine):
        console.print(f"serving at {url}/v1 (Anthropic's clients: {url})")
        bearer = "" if key is None else " -H 'Authorization: Bearer '$AGL_POLICY_KEY"
        body = f'{{"model": "{names[0]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
        console.print(f"try: curl {url}/v1/chat/completions -H 'Content-Type: application/json'{bearer} -d '{body}'")
        try:
            while True:
                await engine.versions()  # EngineError once it is lost.
                await asyncio.sleep(1.0)
        finally:
            console.print("stopping")


def _when(moment: float | None) -> str:
    return "-" if moment is None else f"{datetime.datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"
