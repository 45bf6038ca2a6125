"""`agl run`: record one execution of any command, with no change to its code."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core.capture import Recording
from agl_core.capture.attaching import bootstrap_variables
from agl_core.capture.reports import read_spool
from agl_core.cli.words import amount, one_line
from agl_core.client.agent import OTHER_KEY, AttemptEnd, attempt_variables, closing
from agl_core.client.processes import attempt_folder
from agl_core.config.load import LoadedConfig, load
from agl_core.config.models import UntrainedConfig
from agl_core.errors import ConfigError
from agl_core.kinds import HARNESS
from agl_core.plugins import Plugins
from agl_core.protocols import Engine, Harness, Launch, Upstream
from agl_core.types import AttemptKey, Ending, Mode, Rollout, Run, Task
from agl_core.wire import Lease, LeaseRequest, take_keys
from agl_server.commands.screen import HarnessName, KeyVariable, Model, UpstreamUrl
from agl_server.commands.upstreams import ANEW, choose_key, choose_url, open_upstream
from agl_server.gateway.attempts import RunSettings
from agl_server.http.keys import Keys
from agl_server.reading.explained import AttemptReport, reports_of
from agl_server.reading.runs import RUNS, check_name, is_capture, open_store, write_capture
from agl_server.server import LightningServer
from agl_server.training.rollouts import UNKNOWN_CALLS
from agl_server.training.run import first_free, new_run_dir, passthrough_key, removed_unless_begun
from agl_server.training.session import engine_context

Command = Annotated[
    list[str], typer.Argument(metavar="COMMAND...", help="The command, after --; with --harness, the prompt.")
]
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

_TIMEOUT = 30 * 86_400.0
"""Seconds: a command ends by itself."""


def run(
    command: Command,
    harness: HarnessName = None,
    config: ConfigOption = None,
    upstream: UpstreamUrl = None,
    upstream_key_env: KeyVariable = None,
    model: Model = None,
    name: NameOption = None,
) -> None:
    """Run a command, and record what its agent does as one rollout: agl run -- python my_agent.py

    A program that is known by name starts in this folder: agl run --harness codex -- "Fix the failing test."
    Environment variables point its LLM clients at agl, and the installed adapters attach themselves in all its Python
    processes. Replies are sampled as the agent asks. The exit status is the command's.
    """
    take_keys()  # They are of another server, and the command is to have none of them.
    program = None if harness is None else _program(harness, model)
    if program is None and shutil.which(command[0]) is None:
        raise ConfigError(f"There is no command '{command[0]}'. Put the whole command after --, as you would type it.")
    answering: Upstream | LoadedConfig
    described: Mapping[str, Any]
    if config is None:
        answering = _open_upstream(choose_url(upstream), choose_key(upstream_key_env), model)
        asked = {"command": command} if harness is None else {"harness": harness, "prompt": " ".join(command)}
        described = {**asked, "upstream": answering.urls[0], "models": dict(answering.models)}
        folder = RUNS / check_name(name or "capture")
        if name is None or not is_capture(folder):
            folder = first_free(folder, lambda new: write_capture(new, described))
    elif upstream or upstream_key_env or model:
        raise ConfigError("--config brings its own engine and models: leave out --upstream… and --model.")
    else:
        answering = load(config, [f"name={name}"] if name else [])
        described, folder = answering.config.model_dump(mode="json"), new_run_dir(answering)
    _say(f"recording to {folder}")
    with removed_unless_begun(folder) as begun:
        status = asyncio.run(_record(command, program, folder, described, answering, begun))
    raise typer.Exit(status)


def _program(name: str, model: str | None) -> Harness:
    """The harness of this name, in the current folder; it asks for the model that the server is asked for."""
    component = Plugins.load().component(HARNESS, name, "--harness")
    if missing := [key for key, field in component.options.model_fields.items() if field.is_required()]:
        raise ConfigError(f"--harness {name} needs settings ({', '.join(missing)}). Run it itself: agl run -- COMMAND")
    program: Harness = component.build(component.options(**({"model": model} if model else {})), None)
    return program


def _open_upstream(url: str, key: str, model: str | None) -> Upstream:
    """The model server that answers; notes say what its replies lack."""
    upstream, missing = open_upstream(url, key, model)
    _say(f"forwarding to {url}")
    if missing:
        _say(
            f"note: exact token ids are not recorded, for {missing}. The episode is text: it can be read and scored, "
            f"not trained on. Servers like vLLM return ids (return_token_ids)."
        )
    elif not upstream.continues_ids:
        _say(ANEW)
    return upstream


async def _record(
    command: Sequence[str],
    program: Harness | None,
    folder: Path,
    described: Mapping[str, Any],
    answering: Upstream | LoadedConfig,
    begun: Callable[[], None],
) -> int:
    """The exit status of the recorded command; `described` is stored as the run's configuration."""
    run_id = folder.name
    async with AsyncExitStack() as stack:
        if isinstance(answering, LoadedConfig):
            config, plugins, store = answering.config, answering.plugins, answering.store.build(folder)
            engine: Engine = answering.engine.build(engine_context(answering, folder))
            stack.push_async_callback(engine.stop)
            upstream = await engine.start()
        else:
            config, plugins, upstream = UntrainedConfig(config_version=1), Plugins.load(), answering
            store = open_store(folder, read_only=False)
        agents = {policy: section.agents for policy, section in config.policies.items()}
        settings = RunSettings(sampling=None, seed=0, timeout=_TIMEOUT, attempts=1, agents=agents)
        keys = Keys(passthrough=passthrough_key(config.gateway))
        await stack.enter_async_context(store)
        serving = LightningServer(store, upstream, settings, plugins.hook, gateway=config.gateway, keys=keys)
        server = await stack.enter_async_context(serving)
        restart = len(await store.runs())
        await store.put(Run(run_id, restart, time.time(), described))
        await server.queue.abandon(run_id)  # What earlier restarts left unfinished ends as lost.
        id = f"{run_id}-{uuid.uuid4().hex[:8]}"
        rollout = Rollout(
            id=id,
            run=run_id,
            restart=restart,
            group=id,
            task=Task(run_id, " ".join(command) if program else {"command": list(command)}, split="capture"),
            # Sampled as the agent asks, and not for training.
            mode=Mode.EVAL_SAMPLED,
            step=0,
            member=0,
        )
        begun()
        await server.queue.enqueue([rollout])
        worker = f"agl run {os.getpid()}"
        [lease] = (await server.queue.lease(LeaseRequest(worker=worker, capacity=1, wait=0))).leases
        key = AttemptKey(lease.rollout, lease.attempt)
        status, interrupted, recording = await _launch(command, program, lease, server.base_url, config.plugin_files)
        ending = Ending.FINISHED if status == 0 else Ending.CANCELLED if interrupted else Ending.CRASHED
        error = f"the command ended with status {status}" if ending is Ending.CRASHED else None
        await server.queue.close_attempt(key, closing(AttemptEnd(ending, {"exit_status": status}, error), recording))
        [report] = await reports_of(server.store, [rollout])
        _summarise(report.attempts[0], recording, folder)
    return status


async def _launch(
    command: Sequence[str], program: Harness | None, lease: Lease, base_url: str, plugin_files: Sequence[Path]
) -> tuple[int, bool, Recording]:
    """Run the command as a shell would: its status, whether it got a signal, its reports. OSError without a start."""
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
    with attempt_folder() as folder:
        reports, own = folder / "reports", folder / "work"
        reports.mkdir()
        own.mkdir()
        as_typed = nullcontext(Launch(command, Path(), {}))
        async with program.launch(lease, base_url, own) if program else as_typed as launch:
            environment = {**inherited, **attempt_variables(lease, base_url), **launch.variables}
            if program is None:
                environment |= bootstrap_variables(key, base_url, lease.key, reports, os.environ, plugin_files)
            process = await asyncio.create_subprocess_exec(*launch.command, env=environment, cwd=launch.folder)
            for number in tuple(signals):  # Those from before its start.
                pass_on(number)
            status = await process.wait()
        read_spool(reports, recording)
    return status if status >= 0 else 128 - status, bool(signals), recording


def _summarise(report: AttemptReport, recording: Recording, folder: Path) -> None:
    for problem in recording.problems:
        _say(f"problem: {problem}")
    if report.uncounted_rewards:
        _say(f"problem: {UNKNOWN_CALLS}")
    attempt, episode = report.attempt, report.episode
    calls = {transition.key.call: transition.agent for transition in (*episode.transitions, *episode.undelivered)}
    results = sum(len(transition.tool_results) for transition in episode.transitions) + len(episode.unjoined)
    agents = sorted({agent for agent in calls.values() if agent})
    by = f" by {', '.join(agents)}" if agents else ""
    ending = attempt.ending.value if attempt.ending else "running"
    _say(f"{ending}: {amount(len(calls), 'LLM call')}{by}, {amount(results, 'tool result')}")
    for address, count in (attempt.bypassed or {}).items():
        _say(f"past agl, and not recorded: {amount(count, 'call')} to {one_line(address, 200)}")
    if attempt.error:
        _say(attempt.error)
    _say(f"agl show {folder} {attempt.rollout}")


def _say(text: str) -> None:
    """On the error stream: the output belongs to the command."""
    typer.echo(f"agl: {text}", err=True)
