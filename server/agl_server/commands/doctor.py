"""`agl doctor`: what would go wrong, before anything runs, and what to do."""

from __future__ import annotations

import asyncio
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from agl_core import kinds
from agl_core.cli.screen import AsJson, Set, print_json
from agl_core.cli.words import harmless
from agl_core.cli.worker import find_server
from agl_core.client.worker import LightningClient
from agl_core.config.load import LoadedConfig, load
from agl_core.errors import AglError
from agl_core.plugins import Plugins
from agl_core.wire import HEALTH, OPERATOR_KEY, Activity, Empty, take_keys
from agl_server.commands.screen import KeyVariable, Model, UpstreamUrl
from agl_server.commands.upstreams import choose_key, choose_url, open_upstream
from agl_server.health.alarms import who_waits
from agl_server.health.verdict import read_health
from agl_server.reading.credit import read_credit
from agl_server.reading.runs import find_run, is_capture, open_store, read_entry
from agl_server.training.metrics import Observer, Prices

Target = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG|RUN]",
        help="A run's configuration (TOML): check all that it needs. Or a run's folder: what is wrong with it.",
    ),
]

QUIET_SECONDS = 10.0
"""A run that waits gets a remedy if no rollout has ended for so long."""


@dataclass(frozen=True, slots=True)
class Finding:
    mark: str
    """`ok`, `note`, or `FAIL` if nothing works without it."""
    subject: str
    text: str
    remedy: str = ""


Findings: TypeAlias = Iterator[Finding]


def doctor(
    target: Target = None,
    upstream: UpstreamUrl = None,
    upstream_key_env: KeyVariable = None,
    model: Model = None,
    set_: Set = [],
    as_json: AsJson = False,
) -> None:
    """Check this environment and, if you name one, a configuration with its engine, a model server, or a run.

    With a configuration the agent is run once, on the first task: its calls, agents, tools and reward are shown, and
    nothing of it is kept. For a run it shows which alarms were raised, which credit rule its rollouts speak for and,
    while it runs, what waits for what (docs/health.md).

    Each problem comes with what to do. The exit status is 1 if something that is needed is broken.
    """
    findings = []
    for finding in _findings(target, set_, upstream, upstream_key_env, model):
        findings.append(finding)
        if not as_json:
            typer.echo(harmless(f"{finding.mark:<4}  {finding.subject}: {finding.text}"))
            if finding.remedy:
                typer.echo(harmless(f"      → {finding.remedy}"))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    raise typer.Exit(int(any(finding.mark == "FAIL" for finding in findings)))


def _findings(target: Path | None, set_: list[str], url: str | None, key: str | None, model: str | None) -> Findings:
    if target is not None and target.suffix != ".toml":
        yield from _checked("run", _run(target))
        return
    yield Finding("ok", "Python", platform.python_version())
    yield from _checked("plugins", _plugins())
    if target is not None:
        yield from _checked("configuration", _configuration(target, set_))
    if url is not None:
        yield from _checked("model server", _server(url, key, model))


def _checked(subject: str, findings: Findings) -> Findings:
    """These findings, and an AglError, whose message says what to do, as the last."""
    try:
        yield from findings
    except AglError as error:
        text, _, remedy = str(error).partition(":\n  " if str(error).split("\n")[0].endswith(":") else ". ")
        yield Finding("FAIL", subject, text, remedy or "see above")


def _plugins() -> Findings:
    plugins = Plugins.load()
    for kind in (kinds.ENGINE, kinds.ALGORITHM, kinds.ADAPTER):
        names = ", ".join(sorted(plugins.components(kind)))
        yield Finding("ok" if names else "note", f"{kind}s", names or "none is installed")
    for broken in plugins.broken:
        text = f"'{broken.name}' of {broken.origin} cannot be used ({broken.error})"
        yield Finding("note", "plugins", text, "fix, reinstall or uninstall it; what it brings is missing")


def _configuration(file: Path, set_: list[str]) -> Findings:
    loaded = load(file, set_)
    yield Finding("ok", "configuration", f"{file} is valid")
    if loaded.config.agent is not None:
        text = (
            f"no tool that a model drives should be able to read {loaded.config.folder} (tasks with their answers) or "
            f"{loaded.config.runs.resolve()} (records, keys): run such tools as another user, or in a container "
            f"(docs/security.md)"
        )
        yield Finding("ok", "agent's reach", text)
    yield from _checked("start", _start(loaded))


def _start(loaded: LoadedConfig) -> Findings:
    from agl_server.training.run import removed_unless_begun
    from agl_server.training.session import task_sources

    task_sources(loaded)
    yield Finding("ok", "tasks", f"the first of each set ({', '.join(loaded.tasks)}) can be made")
    with removed_unless_begun(folder := Path(tempfile.mkdtemp(prefix="agl-doctor-"))):
        yield from asyncio.run(_session(loaded, folder))
    shutil.rmtree(folder)


async def _session(loaded: LoadedConfig, folder: Path) -> list[Finding]:
    from agl_server.training.run import local_server
    from agl_server.training.session import estimate_tokens, first_look, open_session

    workers = loaded.config.workers.model_copy(update={"processes": 1})
    here = replace(loaded, config=loaded.config.model_copy(update={"workers": workers}))
    observer = Observer()
    findings: list[Finding] = []
    begun = time.monotonic()
    async with local_server(loaded, folder) as server, open_session(here, folder, server, observer) as session:
        served, seconds = session.upstream, time.monotonic() - begun
        for policy, name in served.models.items():
            _, missing = await asyncio.to_thread(open_upstream, served.urls[0], served.api_key, name)
            findings.append(_ids(f"engine, policy '{policy}'", missing, "FAIL"))
        before, look = await session.engine.stats(), await first_look(session, observer)
        stats = await session.engine.stats()
        failed = "note" if look.fault is None else "FAIL"
        findings += [Finding("ok" if finished else failed, "rollout", seen) for finished, seen in look.seen]
        if look.fault is not None:
            findings[-1] = replace(findings[-1], remedy=f"{look.fault.remedy} {look.fault.details}".strip())
        grown = {key.removeprefix("tokens_"): count - before.get(key, 0) for key, count in stats.items()}
        if grown.get("decoded") and look.fault is None:
            rollouts, tokens = estimate_tokens(loaded, session, look, grown)
            about = Prices.of(loaded.config.model_dump()).describe({k: float(f"{n:.1e}") for k, n in tokens.items()})
            findings.append(Finding("ok", "cost", f"about {about}, if all {rollouts:,} rollouts are like this one"))
        if peak := stats.get("peak_rss_bytes"):
            took = f"took {peak / 2**30:.1f} GiB of memory; training takes more"
            findings.append(Finding("ok", "resources", f"the engine started in {seconds:.0f} s and {took}"))
    return findings


def _run(run: Path) -> Findings:
    folder = find_run(run)
    entry, health = read_entry(folder), read_health(folder)
    yield Finding("ok", "run", f"{folder}: {entry.state}, {entry.steps} steps made")
    if entry.verdict is not None:
        why, _, remedy = entry.verdict.text.partition(". ")
        yield Finding("FAIL" if entry.verdict.failed else "note" if remedy else "ok", "verdict", why, remedy)
    for line in health.damaged:
        text = f"line {line} of {folder / 'metrics.jsonl'} is no line of metrics"
        yield Finding("FAIL", "metrics", text, "remove it; a run is not resumed with such a line")
    for step, alarm in health.alarms:
        since = "since step" if health.holding.get(alarm.name) == step else "step"
        yield Finding("note", f"alarm {alarm.name}, {since} {step}", alarm.seen, alarm.remedy)
    if not health.alarms:
        steps = len(health.verdicts)
        yield Finding("ok", "alarms", f"none in {steps} steps" if steps else "no step was made yet")
    if (entry.steps or is_capture(folder)) and (facts := read_credit(folder)):
        yield Finding("ok", "credit", "; ".join(facts.lines()))
        yield Finding("ok", "advice", facts.advice)
    if entry.state == "running":
        yield from _checked("waiting", _waiting(folder))


def _waiting(folder: Path) -> Findings:
    server = find_server(None, folder, None, take_keys(), OPERATOR_KEY)
    if server is None:
        text = "a process writes the run's store, but serves no run"
        yield Finding("FAIL", "waiting", text, "see the log of the process that runs it (agl train)")
        return

    async def look() -> tuple[Activity, str, str]:
        async with LightningClient(server.base_url, server.key) as client:
            activity = await client.ask(HEALTH, Empty())
        async with open_store(folder) as store:
            return activity, *await who_waits(activity, store)

    activity, seen, remedy = asyncio.run(look())
    ended = "none has finished yet" if activity.finished is None else f"one finished {activity.finished:.0f} s ago"
    yield Finding("ok", "rollouts", f"{activity.running} run, {activity.queued} are queued, {ended}")
    if activity.running or activity.queued or not activity.serving:
        is_stalled = not activity.running or activity.finished is None or activity.finished > QUIET_SECONDS
        yield Finding("FAIL" if is_stalled and remedy else "ok", "waiting", seen, remedy if is_stalled else "")


def _server(url: str, key_env: str | None, model: str | None) -> Findings:
    upstream, missing = open_upstream(choose_url(url), choose_key(key_env), model)
    models = ", ".join(sorted(upstream.models.values())[:5])
    yield Finding("ok", "model server", f"{upstream.urls[0]} answers, with {models}")
    yield _ids("token ids", missing, "note")


def _ids(subject: str, missing: str, mark: str) -> Finding:
    """The finding about exact ids, with `mark` for a server that returns none."""
    if not missing:
        return Finding("ok", subject, "exact ids and log-probabilities are returned")
    remedy = "its replies can be recorded and scored, not trained on; servers like vLLM return ids when asked"
    return Finding(mark, subject, missing, remedy)
