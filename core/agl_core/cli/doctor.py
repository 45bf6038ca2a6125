"""`agl doctor`: what would go wrong, before anything runs, and what to do about it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.analysis.text.words import harmless
from agl_core.cli.shared.options import AsJson, KeyVariable, Model
from agl_core.cli.shared.text import print_json
from agl_core.errors import AglError

if TYPE_CHECKING:
    from agl_core.cli.shared.upstreams import Probe
    from agl_core.config.load import LoadedConfig
    from agl_core.protocols import Adapter, Engine, Upstream
    from agl_core.training.preflight import Look
    from agl_core.types import Needs, Workload

ConfigArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[CONFIG|RUN]",
        help="A run's configuration (TOML): check all that it needs. Or a run's folder: what is wrong with it.",
    ),
]
UpstreamOption = Annotated[
    str | None,
    typer.Option("--upstream", metavar="URL", help="Check an OpenAI-compatible server."),
]

SERVER_MODULES = ("httptools", "starlette", "uvicorn")
"""What agl-core imports of its extra `server`."""

QUIET = 10.0
"""Seconds without an end of a rollout after which what a run waits for comes with a remedy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

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


def doctor(
    config: ConfigArgument = None,
    upstream: UpstreamOption = None,
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
    found = []
    for finding in _findings(config, upstream, upstream_key_env, model):
        found.append(finding)
        if as_json:
            continue
        typer.echo(harmless(f"{finding.mark:<4}  {finding.what}: {finding.said}"))
        if finding.remedy:
            typer.echo(harmless(f"      → {finding.remedy}"))
    if as_json:
        print_json([{"mark": each.mark, "what": each.what, "said": each.said, "remedy": each.remedy} for each in found])
    raise typer.Exit(int(any(each.mark == "FAIL" for each in found)))


def _findings(config: Path | None, upstream: str | None, key_env: str | None, model: str | None) -> Iterator[Finding]:
    if config is not None and config.suffix != ".toml":
        yield from _checked("run", lambda: _run(config))
        return
    yield Finding("Python", platform.python_version())
    yield from _packages()
    yield from _attaching()
    if config is not None:
        yield from _configured(config)
    if upstream is not None:
        yield from _checked("model server", lambda: _server(upstream, key_env, model))


def _packages() -> Iterator[Finding]:
    from agl_core import kinds
    from agl_core.plugins import Plugins

    missing = [name for name in SERVER_MODULES if importlib.util.find_spec(name) is None]
    yield Finding(
        "server",
        f"{', '.join(missing)} missing" if missing else "its packages are installed",
        "pip install 'agl-core[server]' (an environment that only runs agents or workers does not need it)"
        if missing
        else "",
        is_needed=False,
    )

    def listed() -> Iterator[Finding]:
        plugins = Plugins.load()
        for kind in (kinds.ENGINE, kinds.ALGORITHM, kinds.ADAPTER):
            names = ", ".join(sorted(plugins.components(kind))) or "none"
            yield Finding(f"{kind}s", names)
        for broken in plugins.broken:
            said = f"'{broken.name}' of {broken.origin} cannot be used ({broken.error})"
            yield Finding("plugins", said, "reinstall or uninstall it; what it brings is missing", is_needed=False)

    yield from _checked("plugins", listed)


def _attaching() -> Iterator[Finding]:
    """The frameworks of installed adapters, and whether agl attaches to them."""
    from agl_core.capture import attach, installed_adapters

    adapters: list[Adapter] = []
    with contextlib.suppress(AglError):  # the line on plugins says why
        adapters = installed_adapters()
    for framework in dict.fromkeys(each.framework for each in adapters):
        attachment = attach([each for each in adapters if each.framework == framework])
        try:
            importlib.import_module(framework)
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and f"{framework}.".startswith(f"{error.name}."):
                continue  # It is not installed.
            remedy = "an agent that uses it cannot run: reinstall it"
            yield Finding(framework, f"cannot be imported ({type(error).__name__}: {error})", remedy, is_needed=False)
            continue
        failed = attachment.failed.get(framework)
        remedy = f"install a version of {framework.split('.')[0]} that the adapter's package asks for" if failed else ""
        yield Finding(framework, failed or "agl attaches to it", remedy)
    if not adapters:
        remedy = "if the agent uses a framework, install the adapter for it (README, Where everything is)"
        yield Finding("frameworks", "no adapter is installed", remedy, is_needed=False)


def _configured(config: Path) -> Iterator[Finding]:
    from agl_core.config.check import check
    from agl_core.config.load import load

    loaded: list[LoadedConfig] = []

    def reading() -> Iterator[Finding]:
        found = load(config)
        check(found)
        loaded.append(found)
        yield Finding("configuration", f"{config} is valid")

    yield from _checked("configuration", reading)
    for each in loaded:
        yield from _parts(each)


def _parts(loaded: LoadedConfig) -> Iterator[Finding]:
    """What a run with this configuration needs: the agent, tasks, the engine, and that they work together."""
    asked: list[Workload] = []
    found = [*_checked("agent", lambda: _agent(loaded)), *_checked("tasks", lambda: _tasks(loaded, asked))]
    yield from found
    can_run = loaded.config.agent is not None and all(finding.mark != "FAIL" for finding in found)
    yield from _checked("engine", lambda: _engine(loaded, asked, can_run))


def _agent(loaded: LoadedConfig) -> Iterator[Finding]:
    from agl_core.worker import load_agent
    from agl_core.worker.agent import agent_environment, client_variables
    from agl_core.worker.commands import has_program

    agent = loaded.config.agent
    if agent is None:
        return  # What it is needed for is found out with the tasks.
    runs = loaded.config.runs.resolve()
    yield Finding(
        "agent's reach",
        f"no tool that a model drives should be able to read {loaded.folder} (tasks with their answers) or {runs} "
        f"(records, keys): run such tools as another user, or in a container (docs/security.md)",
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


def _tasks(loaded: LoadedConfig, asked: list[Workload]) -> Iterator[Finding]:
    from agl_core.training.preflight import workload

    asked.append(workload(loaded))
    yield Finding("tasks", f"the first of each set ({', '.join(loaded.tasks)}) can be made")


def _engine(loaded: LoadedConfig, asked: list[Workload], can_run: bool) -> Iterator[Finding]:
    """What the engine needs and returns and, if the agent can be run, one rollout of it."""
    from agl_core.cli.shared.upstreams import open_upstream
    from agl_core.protocols import RecordedTasks
    from agl_core.training.metrics import Observer
    from agl_core.training.preflight import first_look
    from agl_core.training.server import local_server
    from agl_core.training.session import engine_context, open_session

    class Served(Observer):
        def serving(self, upstream: Upstream) -> None:
            self.upstream = upstream

    async def examined(engine: Engine, served: Upstream) -> tuple[list[tuple[str, Probe]], list[Needs]]:
        probes = [
            (policy, (await asyncio.to_thread(open_upstream, served.urls[0], served.api_key, name))[1])
            for policy, name in served.models.items()
        ]
        return probes, [await engine.estimate(w) for w in asked if engine.supports("estimate")]

    async def look(folder: Path) -> tuple[list[tuple[str, Probe]], list[Needs], Look | None]:
        here = loaded.config.model_copy(update={"workers": loaded.config.workers.model_copy(update={"embedded": True})})
        observer = Served()
        async with (
            local_server(loaded, folder) as server,
            open_session(replace(loaded, config=here), folder, server, observer) as session,
        ):
            found = await examined(session.engine, observer.upstream)
            if isinstance(session.tasks["train"], RecordedTasks):
                return *found, None
            with observer.phase("first look", 0) as phase:
                return *found, await first_look(session, phase)

    async def start(folder: Path) -> tuple[list[tuple[str, Probe]], list[Needs], Look | None]:
        engine = loaded.engine.build(engine_context(loaded, folder))
        try:
            return *await examined(engine, await engine.start()), None
        finally:
            await engine.stop()

    with tempfile.TemporaryDirectory(prefix="agl-doctor-") as place:
        probes, estimated, seen = asyncio.run((look if can_run else start)(Path(place)))
    for policy, probe in probes:
        yield from _ids(f"engine, policy '{policy}'", probe, is_needed=True)
    for work, needs in zip(asked, estimated, strict=False):
        yield _resources(work, needs)
    if seen is not None:
        for described in seen.seen[:-1]:
            yield Finding("rollout", described)
        fault = seen.fault
        remedy = "" if fault is None else f"{fault.remedy} {fault.details}".strip() or "see what the agent does"
        yield Finding("rollout", seen.seen[-1], remedy)


def _resources(work: Workload, needs: Needs) -> Finding:
    """What training takes; too little memory is a note, since the figure is rough."""
    gib, minutes = 2**30, max(1, round(needs.seconds / 60))
    is_enough = needs.memory_bytes <= needs.available_bytes
    return Finding(
        "resources",
        f"training takes about {needs.memory_bytes / gib:.1f} GiB of {needs.available_bytes / gib:.0f} GiB and, at the "
        f"speed that this machine has now, {minutes} min: {work.steps} steps with {work.groups * work.group_size} "
        f"rollouts each, and {work.evaluated} rollouts in evaluations, each with one call of {work.prompt_tokens} + "
        f"{work.response_tokens} tokens (more calls take as much each; agents and tools take their own time)",
        "" if is_enough else "train a LoRA adapter (policies.NAME.model.lora), or a smaller model",
        is_needed=False,
    )


def _run(run: Path) -> Iterator[Finding]:
    from agl_core.analysis.health import read_health
    from agl_core.analysis.runs import find_run, read_entry

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


def _waiting(folder: Path) -> Iterator[Finding]:
    from agl_core.analysis.health import read_waiting
    from agl_core.analysis.runs import read_run
    from agl_core.client import find_server
    from agl_core.wire.keys import OPERATOR_KEY, take_keys

    server = find_server(None, folder, None, take_keys(), OPERATOR_KEY)
    if server is None:
        remedy = "see the log of the process that runs it (agl train)"
        yield Finding("waiting", "a process writes the run's store, but serves no run", remedy)
        return
    activity, seen, remedy = read_run(folder, lambda store: read_waiting(server, store))
    ended = "none has finished yet" if activity.finished is None else f"one finished {activity.finished:.0f} s ago"
    yield Finding("rollouts", f"{activity.running} run, {activity.queued} are queued, {ended}")
    if activity.running or activity.queued or not activity.serving:
        is_stalled = not activity.running or (activity.finished or 0.0) > QUIET or activity.finished is None
        yield Finding("waiting", seen, remedy if is_stalled else "")


def _server(url: str, key_env: str | None, model: str | None) -> Iterator[Finding]:
    from agl_core.cli.shared.upstreams import chosen_key, chosen_url, open_upstream

    upstream, probe = open_upstream(chosen_url(url), chosen_key(key_env), model)
    yield Finding("model server", f"{upstream.urls[0]} answers, with {', '.join(sorted(upstream.models.values())[:5])}")
    yield from _ids("token ids", probe, is_needed=False)


def _ids(what: str, probe: Probe, *, is_needed: bool) -> Iterator[Finding]:
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


def _checked(what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What `look` finds; the message of an error that agl raises on purpose says what to do."""
    try:
        yield from look()
    except AglError as error:
        said, _, remedy = str(error).partition(". ")
        yield Finding(what, said, remedy or "see above")
