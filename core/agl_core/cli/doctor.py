"""`agl doctor`: what would go wrong, before anything runs, and what to do about it."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import platform
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from agl_core import capture, kinds
from agl_core.cli import SERVER_MODULES
from agl_core.cli.options import AsJson, KeyVariable, Model, UpstreamUrl
from agl_core.cli.screen import print_json
from agl_core.cli.upstreams import Probe, chosen_key, chosen_url, open_upstream
from agl_core.client import LightningClient, find_server
from agl_core.config.check import check
from agl_core.config.load import LoadedConfig, load
from agl_core.errors import AglError
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, RecordedTasks, Upstream
from agl_core.reading.metrics import read_health
from agl_core.reading.runs import find_run, read_entry, read_run
from agl_core.reading.words import harmless
from agl_core.store.interface import Store
from agl_core.training.metrics import Observer
from agl_core.training.stall import who_waits
from agl_core.types import Needs, Workload
from agl_core.wire.keys import OPERATOR_KEY, take_keys
from agl_core.wire.operation import Empty
from agl_core.wire.workers import ACTIVITY, Activity
from agl_core.worker import load_agent
from agl_core.worker.agent import agent_environment, client_variables
from agl_core.worker.commands import has_program

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG|RUN]",
        help="A run's configuration (TOML): check all that it needs. Or a run's folder: what is wrong with it.",
    ),
]

QUIET_SECONDS = 10.0
"""Without an end of a rollout for so long, what a run waits for comes with a remedy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    said: str
    remedy: str = ""
    """What to do; empty if nothing is wrong."""
    is_needed: bool = True
    """Whether nothing works without it."""

    @property
    def mark(self) -> str:
        """`ok`, `note` or `FAIL`."""
        return "ok" if not self.remedy else "FAIL" if self.is_needed else "note"


Findings: TypeAlias = Iterator[Finding]


def doctor(
    config: ConfigArgument = None,
    upstream: UpstreamUrl = None,
    upstream_key_env: KeyVariable = None,
    model: Model = None,
    as_json: AsJson = False,
) -> None:
    """Check this environment and, if you name one, a configuration with its engine, a model server, or a run.

    With a configuration the agent is run once, on the first task: its calls, agents, tools and reward are shown, and
    nothing of it is kept. For a run it shows which alarms were raised and, while it runs, what waits for what
    (docs/health.md).

    Each problem comes with what to do. The exit status is 1 if something that is needed is broken.
    """
    findings = []
    for finding in _findings(config, upstream, upstream_key_env, model):
        findings.append(finding)
        if not as_json:
            typer.echo(harmless(f"{finding.mark:<4}  {finding.what}: {finding.said}"))
            if finding.remedy:
                typer.echo(harmless(f"      → {finding.remedy}"))
    if as_json:
        print_json([{"mark": f.mark, "what": f.what, "said": f.said, "remedy": f.remedy} for f in findings])
    raise typer.Exit(int(any(finding.mark == "FAIL" for finding in findings)))


def _findings(config: Path | None, upstream: str | None, key_env: str | None, model: str | None) -> Findings:
    if config is not None and config.suffix != ".toml":
        yield from _checked("run", lambda: _run(config))
        return
    yield Finding("Python", platform.python_version())
    missing = [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]
    remedy = "pip install 'agl-core[server]' (an environment that only runs agents or workers does not need it)"
    said = f"{', '.join(missing)} missing" if missing else "its packages are installed"
    yield Finding("server", said, remedy if missing else "", is_needed=False)
    yield from _checked("plugins", _plugins)
    yield from _attaching()
    if config is not None:
        loaded: list[LoadedConfig] = []
        yield from _checked("configuration", lambda: _configuration(config, loaded))
        for valid in loaded:
            yield from _parts(valid)
    if upstream is not None:
        yield from _checked("model server", lambda: _server(upstream, key_env, model))


def _checked(what: str, look: Callable[[], Findings]) -> Findings:
    """The findings of `look`; the message of an error that agl raises on purpose says what to do."""
    try:
        yield from look()
    except AglError as error:
        said, _, remedy = str(error).partition(". ")
        yield Finding(what, said, remedy or "see above")


def _plugins() -> Findings:
    plugins = Plugins.load()
    for kind in (kinds.ENGINE, kinds.ALGORITHM, kinds.ADAPTER):
        yield Finding(f"{kind}s", ", ".join(sorted(plugins.components(kind))) or "none")
    for broken in plugins.broken:
        said = f"'{broken.name}' of {broken.origin} cannot be used ({broken.error})"
        yield Finding("plugins", said, "reinstall or uninstall it; what it brings is missing", is_needed=False)


def _attaching() -> Findings:
    """The frameworks of installed adapters, and whether agl attaches to them."""
    try:
        adapters = capture.installed_adapters()
    except AglError:  # The line on plugins says why.
        return
    for framework in dict.fromkeys(adapter.framework for adapter in adapters):
        attachment = capture.attach([adapter for adapter in adapters if adapter.framework == framework])
        try:
            importlib.import_module(framework)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{framework}.".startswith(f"{error.name}."):
                continue  # It is not installed.
            said = f"cannot be imported ({type(error).__name__}: {error})"
            yield Finding(framework, said, "an agent that uses it cannot run: reinstall it", is_needed=False)
            continue
        failed = attachment.failed.get(framework)
        remedy = f"install a version of {framework.split('.')[0]} that the adapter's package asks for" if failed else ""
        yield Finding(framework, failed or "agl attaches to it", remedy)
    if not adapters:
        remedy = "if the agent uses a framework, install the adapter for it (README, Where everything is)"
        yield Finding("frameworks", "no adapter is installed", remedy, is_needed=False)


def _configuration(file: Path, loaded: list[LoadedConfig]) -> Findings:
    config = load(file)
    check(config)
    loaded.append(config)
    yield Finding("configuration", f"{file} is valid")


def _parts(loaded: LoadedConfig) -> Findings:
    """The agent, the tasks and the engine of a configuration, and whether they work together."""
    workloads: list[Workload] = []
    findings = [*_checked("agent", lambda: _agent(loaded)), *_checked("tasks", lambda: _tasks(loaded, workloads))]
    yield from findings
    can_run = loaded.config.agent is not None and all(finding.mark != "FAIL" for finding in findings)
    yield from _checked("engine", lambda: _engine(loaded, workloads, can_run))


def _agent(loaded: LoadedConfig) -> Findings:
    agent = loaded.config.agent
    if agent is None:
        return  # The tasks say what it is needed for.
    yield Finding(
        "agent's reach",
        f"no tool that a model drives should be able to read {loaded.folder} (tasks with their answers) or "
        f"{loaded.config.runs.resolve()} (records, keys): run such tools as another user, or in a container "
        f"(docs/security.md)",
    )
    if agent.entry is None:
        program = shlex.split(agent.command)[0] if isinstance(agent.command, str) else (agent.command or ("",))[0]
        remedy = "" if has_program(program, loaded.folder) else "name a program that is installed here (agent.command)"
        yield Finding("agent", f"{program} is {'not ' if remedy else ''}there", remedy)
        return
    # Its module may make a client, which wants an address and a key, as it finds them in a rollout.
    with agent_environment(client_variables("http://127.0.0.1:9")):
        load_agent(agent.entry, loaded.folder)
    yield Finding("agent", f"{agent.entry} can be imported")


def _tasks(loaded: LoadedConfig, workloads: list[Workload]) -> Findings:
    from agl_core.training.preflight import workload

    workloads.append(workload(loaded))
    yield Finding("tasks", f"the first of each set ({', '.join(loaded.tasks)}) can be made")


class _Served(Observer):
    def serving(self, upstream: Upstream) -> None:
        self.upstream = upstream


def _engine(loaded: LoadedConfig, workloads: list[Workload], can_run: bool) -> Findings:
    """The engine's token ids and needs and, if the agent can be run, one rollout of it."""
    from agl_core.training.preflight import Look, first_look
    from agl_core.training.server import local_server
    from agl_core.training.session import engine_context, open_session

    probes: list[tuple[str, Probe]] = []
    estimates: list[Needs] = []

    async def examine(engine: Engine, served: Upstream) -> None:
        for policy, name in served.models.items():
            _, probe = await asyncio.to_thread(open_upstream, served.urls[0], served.api_key, name)
            probes.append((policy, probe))
        if engine.supports("estimate"):
            estimates.extend([await engine.estimate(workload) for workload in workloads])

    async def start(folder: Path) -> Look | None:
        if not can_run:
            engine = loaded.engine.build(engine_context(loaded, folder))
            try:
                await examine(engine, await engine.start())
            finally:
                await engine.stop()
            return None
        workers = loaded.config.workers.model_copy(update={"embedded": True})
        here = replace(loaded, config=loaded.config.model_copy(update={"workers": workers}))
        observer = _Served()
        async with (
            local_server(loaded, folder) as server,
            open_session(here, folder, server, observer) as session,
        ):
            await examine(session.engine, observer.upstream)
            if isinstance(session.tasks["train"], RecordedTasks):
                return None
            with observer.phase("first look", 0) as phase:
                return await first_look(session, phase)

    with tempfile.TemporaryDirectory(prefix="agl-doctor-") as folder:
        look = asyncio.run(start(Path(folder)))
    for policy, probe in probes:
        yield from _ids(f"engine, policy '{policy}'", probe, is_needed=True)
    for workload, needs in zip(workloads, estimates, strict=False):
        yield _resources(workload, needs)
    if look is not None:
        for described in look.seen[:-1]:
            yield Finding("rollout", described)
        fault = look.fault
        remedy = "" if fault is None else f"{fault.remedy} {fault.details}".strip() or "see what the agent does"
        yield Finding("rollout", look.seen[-1], remedy)


def _resources(work: Workload, needs: Needs) -> Finding:
    """Memory and time of training; too little memory is a note, since the figure is rough."""
    gib, minutes = 2**30, max(1, round(needs.seconds / 60))
    return Finding(
        "resources",
        f"training takes about {needs.memory_bytes / gib:.1f} GiB of {needs.available_bytes / gib:.0f} GiB and, at the "
        f"speed that this machine has now, {minutes} min: {work.steps} steps with {work.groups * work.group_size} "
        f"rollouts each, and {work.evaluated} rollouts in evaluations, each with one call of {work.prompt_tokens} + "
        f"{work.response_tokens} tokens (more calls take as much each; agents and tools take their own time)",
        ""
        if needs.memory_bytes <= needs.available_bytes
        else "train a LoRA adapter (policies.NAME.model.lora), or a smaller model",
        is_needed=False,
    )


def _run(run: Path) -> Findings:
    folder = find_run(run)
    entry, health = read_entry(folder), read_health(folder)
    yield Finding("run", f"{folder}: {entry.state}, {entry.steps} steps made")
    if entry.verdict is not None:
        why, _, remedy = entry.verdict.text.partition(". ")
        yield Finding("verdict", why, remedy, is_needed=entry.verdict.failed)
    for line in health.damaged:
        remedy = f"mend or remove line {line}; the others are read, and a run is not resumed with such a line"
        yield Finding("metrics", f"line {line} of {folder / 'metrics.jsonl'} is no line of metrics", remedy)
    for step, alarm in health.alarms:
        since = "since step" if health.holding.get(alarm.name) == step else "step"
        yield Finding(f"alarm {alarm.name}, {since} {step}", alarm.seen, f"{alarm.why} {alarm.remedy}", is_needed=False)
    if not health.alarms:
        steps = len(health.verdicts)
        yield Finding("alarms", f"none in {steps} steps" if steps else "no step was made yet")
    if entry.state == "running":
        yield from _checked("waiting", lambda: _waiting(folder))


def _waiting(folder: Path) -> Findings:
    server = find_server(None, folder, None, take_keys(), OPERATOR_KEY)
    if server is None:
        remedy = "see the log of the process that runs it (agl train)"
        yield Finding("waiting", "a process writes the run's store, but serves no run", remedy)
        return

    async def look(store: Store) -> tuple[Activity, str, str]:
        async with LightningClient(server.base_url, server.key) as client:
            activity = await client.ask(ACTIVITY, Empty())
        return activity, *await who_waits(activity, store)

    activity, seen, remedy = read_run(folder, look)
    ended = "none has finished yet" if activity.finished is None else f"one finished {activity.finished:.0f} s ago"
    yield Finding("rollouts", f"{activity.running} run, {activity.queued} are queued, {ended}")
    if activity.running or activity.queued or not activity.serving:
        is_stalled = not activity.running or activity.finished is None or activity.finished > QUIET_SECONDS
        yield Finding("waiting", seen, remedy if is_stalled else "")


def _server(url: str, key_env: str | None, model: str | None) -> Findings:
    upstream, probe = open_upstream(chosen_url(url), chosen_key(key_env), model)
    yield Finding("model server", f"{upstream.urls[0]} answers, with {', '.join(sorted(upstream.models.values())[:5])}")
    yield from _ids("token ids", probe, is_needed=False)


def _ids(what: str, probe: Probe, *, is_needed: bool) -> Findings:
    if probe.returns_ids and not probe.doubts:
        yield Finding(what, "exact ids and log-probabilities are returned, and go together")
    for doubt in probe.doubts:
        remedy = "training on them would be wrong: update the model server, or use agl's own engine"
        yield Finding(what, doubt, remedy)
    if not probe.returns_ids:
        remedy = (
            "its replies can be recorded and scored, but not trained on; a server like vLLM returns ids when asked "
            "(return_token_ids)"
        )
        yield Finding(what, probe.missing, remedy, is_needed=is_needed)
