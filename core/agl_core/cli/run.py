"""`agl run`: record one execution of any command, with no change to its code."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core.capture import Recording
from agl_core.capture.attaching import bootstrap_variables
from agl_core.capture.recording import read_spool
from agl_core.cli.screen import KeyVariable, Model, UpstreamUrl
from agl_core.cli.upstreams import ANEW, choose_key, choose_url, open_upstream
from agl_core.cli.words import amount, one_line
from agl_core.config.load import LoadedConfig, load
from agl_core.config.sections import GatewaySection
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, Upstream
from agl_core.reading.explained import AttemptReport, reports_of
from agl_core.reading.runs import RUNS, check_name, is_capture, open_store, write_capture
from agl_core.server import Keys, LightningServer
from agl_core.server.upstream import RunSettings
from agl_core.training.run import first_free, new_run_dir, passthrough_key, removed_unless_begun
from agl_core.training.session import engine_context
from agl_core.types import AttemptKey, Ending, Mode, Rollout, Run, Task
from agl_core.wire import Lease, LeaseRequest, take_keys
from agl_core.worker.agent import OTHER_KEY, Ended, attempt_variables, closing
from agl_core.worker.processes import attempt_folder

Command = Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The command, after --.")]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Use the engine, policies and store of this configuration."),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name",
        help="The run's folder below ./runs. A recording of this name gets one rollout more. By default 'capture', "
        "with a number if that is taken, as capture-2.",
    ),
]

_LONGEST = 30 * 86_400.0
"""Seconds that an attempt may take: a command ends when it ends."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """Where a run is recorded, and what answers its calls: an upstream, or the engine of a configuration."""

    folder: Path
    described: Mapping[str, Any]
    """Stored as the run's configuration."""
    answering: Upstream | LoadedConfig


def run(
    command: Command,
    config: ConfigOption = None,
    upstream: UpstreamUrl = None,
    upstream_key_env: KeyVariable = None,
    model: Model = None,
    name: NameOption = None,
) -> None:
    """Run a command, and record what its agent does as one rollout: agl run -- python my_agent.py

    Environment variables point its LLM clients at agl, and the installed adapters attach themselves in all its Python
    processes. Replies are sampled as the agent asks. The exit status is the command's.
    """
    take_keys()  # They are of another server, and the command is to have none of them.
    if shutil.which(command[0]) is None:
        raise ConfigError(f"There is no command '{command[0]}'. Put the whole command after --, as you would type it.")
    if config is None:
        setting = _forwarding(command, upstream, upstream_key_env, model, name)
    elif upstream or upstream_key_env or model:
        raise ConfigError("--config brings its own engine and models: leave out --upstream… and --model.")
    else:
        setting = _configured(config, name)
    _say(f"recording to {setting.folder}")
    with removed_unless_begun(setting.folder) as begun:
        status = asyncio.run(_record(command, setting, begun))
    raise typer.Exit(status)


def _forwarding(
    command: Sequence[str], url: str | None, key_variable: str | None, model: str | None, name: str | None
) -> _Setting:
    address = choose_url(url)
    upstream, missing = open_upstream(address, choose_key(key_variable), model)
    _say(f"forwarding to {address}")
    if missing:
        _say(
            f"note: exact token ids are not recorded, for {missing}. The episode is text: it can be read and scored, "
            f"not trained on. Servers like vLLM return ids (return_token_ids)."
        )
    elif not upstream.continues_ids:
        _say(ANEW)
    described = {"command": list(command), "upstream": address, "models": dict(upstream.models)}
    folder = RUNS / check_name(name or "capture")
    if name is None or not is_capture(folder):
        folder = first_free(folder, lambda new: write_capture(new, described))
    return _Setting(folder, described, upstream)


def _configured(config: Path, name: str | None) -> _Setting:
    loaded = load(config, [f"name={name}"] if name else [])
    folder = new_run_dir(loaded)
    return _Setting(folder, loaded.config.model_dump(mode="json"), loaded)


async def _record(command: Sequence[str], setting: _Setting, begun: Callable[[], None]) -> int:
    run_id = setting.folder.name
    async with AsyncExitStack() as stack:
        hook, gateway = Plugins.load().hook, GatewaySection()
        agents: Mapping[str, tuple[str, ...]] = {}
        files: Sequence[Path] = ()
        upstream = setting.answering
        if isinstance(upstream, LoadedConfig):
            loaded, config = upstream, upstream.config
            store = loaded.store.build(setting.folder)
            hook, gateway, files = loaded.plugins.hook, config.gateway, config.plugin_files
            agents = {policy: section.agents for policy, section in config.policies.items()}
            engine: Engine = loaded.engine.build(engine_context(loaded, setting.folder))
            stack.push_async_callback(engine.stop)
            upstream = await engine.start()
        else:
            store = open_store(setting.folder, read_only=False)
        settings = RunSettings(sampling=None, seed=0, timeout=_LONGEST, attempts=1, agents=agents)
        keys = Keys(passthrough=passthrough_key(gateway))
        await stack.enter_async_context(store)
        serving = LightningServer(store, upstream, settings, hook, gateway=gateway, keys=keys)
        server = await stack.enter_async_context(serving)
        restart = len(await store.runs())
        await store.put(Run(run_id, restart, time.time(), setting.described))
        await server.queue.abandon(run_id)  # What earlier restarts left unfinished ends as lost.
        id = f"{run_id}-{uuid.uuid4().hex[:8]}"
        rollout = Rollout(
            id=id,
            run=run_id,
            restart=restart,
            group=id,
            task=Task(run_id, {"command": list(command)}, split="capture"),
            # What the agent asks for is what is sampled: nothing of it was sampled for training.
            mode=Mode.EVAL_SAMPLED,
            step=0,
            member=0,
        )
        begun()
        await server.queue.enqueue([rollout])
        worker = f"agl run {os.getpid()}"
        [lease] = (await server.queue.lease(LeaseRequest(worker=worker, capacity=1, wait=0))).leases
        key = AttemptKey(lease.rollout, lease.attempt)
        status, interrupted, recording = await _launch(command, lease, server.base_url, files)
        ending = Ending.FINISHED if status == 0 else Ending.CANCELLED if interrupted else Ending.CRASHED
        error = f"the command ended with status {status}" if ending is Ending.CRASHED else None
        await server.queue.close_attempt(key, closing(Ended(ending, {"exit_status": status}, error), recording))
        [report] = await reports_of(server.store, [rollout])
        _summarise(report.attempts[0], recording, setting.folder)
    return status


async def _launch(
    command: Sequence[str], lease: Lease, base_url: str, plugins: Sequence[Path]
) -> tuple[int, bool, Recording]:
    """Run the command as a shell would; its exit status, whether a signal was passed on to it, and its reports.

    OSError if it cannot be started.
    """
    recording, key = Recording(), AttemptKey(lease.rollout, lease.attempt)
    inherited = {name: value for name, value in os.environ.items() if name != OTHER_KEY}
    process: asyncio.subprocess.Process | None = None
    signals: list[signal.Signals] = []
    # A terminal sends its Ctrl-C to the command too.
    has_terminal = any(os.isatty(descriptor) for descriptor in range(3))

    def pass_on(number: signal.Signals) -> None:
        signals.append(number)
        if process is not None and not (number is signal.SIGINT and has_terminal):
            with suppress(ProcessLookupError):
                process.send_signal(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, pass_on, number)
    with attempt_folder() as reports:
        bootstrap = bootstrap_variables(key, base_url, lease.key, reports, os.environ, plugins)
        environment = {**inherited, **attempt_variables(lease, base_url), **bootstrap}
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        for number in tuple(signals):  # Those from before its start.
            pass_on(number)
        status = await process.wait()
        read_spool(reports, recording)
    return status if status >= 0 else 128 - status, bool(signals), recording


def _summarise(report: AttemptReport, recording: Recording, folder: Path) -> None:
    for problem in recording.problems:
        _say(f"problem: {problem}")
    attempt, episode = report.attempt, report.episode
    calls = {transition.key.call: transition.agent for transition in (*episode.transitions, *episode.undelivered)}
    agents = sorted({agent for agent in calls.values() if agent})
    by = f" by {', '.join(agents)}" if agents else ""
    ending = attempt.ending.value if attempt.ending else "running"
    _say(f"{ending}: {amount(len(calls), 'LLM call')}{by}, {amount(len(recording.tool_results), 'tool result')}")
    for address, count in (attempt.bypassed or {}).items():
        _say(f"past agl, and not recorded: {amount(count, 'call')} to {one_line(address, 200)}")
    if attempt.error:
        _say(attempt.error)
    _say(f"agl show {folder} {attempt.rollout}")


def _say(text: str) -> None:
    """On the error stream: the output belongs to the command."""
    typer.echo(f"agl: {text}", err=True)
