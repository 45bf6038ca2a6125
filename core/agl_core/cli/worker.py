"""`agl worker`: run rollouts for a training run, from anywhere."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from agl_core.cli.screen import Screen, Set
from agl_core.client.agent import agent_environment, client_variables
from agl_core.client.local import choose_runner
from agl_core.client.worker import LightningClient, Worker, on_signals
from agl_core.config.load import CONFIG_FILE, apply_overrides, read_config
from agl_core.config.models import RunConfig, UntrainedConfig
from agl_core.config.resolve import Problems
from agl_core.errors import ConfigError
from agl_core.plugins import Plugins
from agl_core.types import Ending
from agl_core.wire import OPERATOR_KEY, SERVER_FILE, WORKER_KEY, ServerFile, problem_of_key, take_key, take_keys

Target = Annotated[
    Path | None,
    typer.Argument(
        help="The run's configuration (TOML), or its folder; not needed with --server and --set agent.…",
    ),
]
ServerUrl = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Where `agl train` listens."),
]
Concurrency = Annotated[
    int | None,
    typer.Option(min=1, help="Rollouts run at the same time; by default workers.concurrency of the file."),
]
Drain = Annotated[float, typer.Option(min=0, help="Seconds that rollouts get to end after SIGTERM or Ctrl-C.")]

_URL = re.compile(r"https?://[^\s/]+")
_LOOK_AGAIN = 0.5
_SHOW_EVERY = 10.0
"""Seconds between lines about the attempts."""


def work(
    target: Target = None,
    server: ServerUrl = None,
    concurrency: Concurrency = None,
    drain: Drain = 30.0,
    set_: Set = [],
) -> None:
    """Run rollouts for `agl train TARGET` until that run is over. There may be any number of workers.

    On the machine of `agl train`, the run's folder says where the server is and has its key. On other machines, name
    the server with --server and set AGL_WORKER_KEY to the value it has there. Each machine needs the agent and what the
    agent needs, and the configuration, or --set agent.entry=MODULE:FUNCTION. It needs no engine, algorithms, rewards or
    weights.

    A worker may be killed at any time: what it ran is tried again elsewhere. While the server is away, it waits. The
    first Ctrl-C or SIGTERM lets its rollouts end (--drain), the second gives them back immediately.
    """
    keys = take_keys()
    config, run_dir = _configured(target, server, set_)
    for name in config.secret_variables(os.environ):
        take_key(name)
    known = None if target is None else config
    find = partial(find_server, known, run_dir, server, keys)
    console = Screen(stderr=True)
    ended = partial(is_over, known, run_dir)
    if asyncio.run(_work(config, find, ended, concurrency or config.workers.concurrency, drain, console)):
        console.print("the server has moved: starting again")
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **keys})


def _configured(target: Path | None, url: str | None, overrides: list[str]) -> tuple[RunConfig, Path | None]:
    """The configuration with an absolute `folder`; and the run's folder, if that is the target."""
    run_dir = target if target is not None and target.is_dir() else None
    if target is None:
        data: dict[str, Any] = {"config_version": 1}
        report = Problems(Path("--set"), apply_overrides(data, overrides))
        own = report.validated(UntrainedConfig, data)
        report.raise_if_any()
        assert own is not None
        config: RunConfig = own.model_copy(update={"folder": Path.cwd() / own.folder})
    else:
        config = read_config(target if run_dir is None else run_dir / CONFIG_FILE, overrides, runs_agent=True)
    if config.agent is None or (target is None and url is None):
        raise ConfigError(
            "Name the run's configuration, which names the agent, or its folder. A worker needs neither with --server "
            "and the agent, as in --set agent.entry=MODULE:FUNCTION."
        )
    return config, run_dir


async def _work(
    config: RunConfig,
    find: Callable[[], ServerAddress | None],
    has_ended: Callable[[ServerAddress], bool],
    concurrency: int | None,
    drain: float,
    console: Screen,
) -> bool:
    """Work for the server of `find`; True if it has moved."""
    plugins, server = Plugins.load(config.plugin_files), find()
    if server is None:
        console.print("waiting for `agl train` to start the run")
    while server is None:
        await asyncio.sleep(_LOOK_AGAIN)
        server = find()
    elsewhere = over = False

    def gone() -> bool:
        nonlocal elsewhere, over
        elsewhere, over = find() not in (None, server), has_ended(server)
        return elsewhere or over

    def drained(_: signal.Signals) -> None:
        console.print(f"ending: {worker.running} rollouts get {drain:g} s to end; a second signal ends them now")
        worker.drain(drain)

    with agent_environment(client_variables(server.base_url)):
        runner = choose_runner(config, plugins, server.base_url)
        async with LightningClient(server.base_url, server.key) as client:
            worker = Worker(client, runner, concurrency=concurrency, moved=gone)
            console.print(f"working for {server.base_url}")
            showing = asyncio.create_task(_show(worker, console))
            with on_signals(drained):
                try:
                    await worker.run()
                finally:
                    showing.cancel()
            if over:
                console.print("the run is over")
            console.print(_counts(worker))
    return elsewhere


async def _show(worker: Worker, console: Screen) -> None:
    shown = ""
    while True:
        await asyncio.sleep(_SHOW_EVERY)
        if (counts := _counts(worker)) != shown:
            console.print(counts)
            shown = counts


def _counts(worker: Worker) -> str:
    done = worker.endings[Ending.FINISHED]
    return f"attempts: {worker.running} running, {done} done, {worker.endings.total() - done} failed"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    base_url: str
    key: str = field(repr=False)


def find_server(
    config: RunConfig | None, folder: Path | None, url: str | None, chosen: Mapping[str, str], name: str = WORKER_KEY
) -> ServerAddress | None:
    """The server of a run: at `url`, else where the file in the run's `folder`, or in the newest run of its name, says.

    The key is the `chosen` one (`take_keys`) of the variable `name`, else the one in that file. None if there is no
    such file yet; ConfigError if only the key is missing, or if it is invalid.
    """
    base_url = (url or "").rstrip("/")
    file = _newest(config, folder, base_url)
    base_url = base_url or (file.base_url if file and not file.over else "")
    if base_url and not _URL.fullmatch(base_url):
        raise ConfigError(f"{base_url!r} is no address of a server. Give it as http://HOST:PORT.")
    kept = "operator_key" if name == OPERATOR_KEY else "worker_key"
    key = chosen.get(name) or (file and getattr(file, kept))
    if key and (problem := problem_of_key(name if name in chosen else SERVER_FILE, key)):
        raise ConfigError(f"{problem} Set it anew, to the value that it has where the server runs.")
    if base_url and not key:
        raise ConfigError(
            f"The key of the server at {base_url} is not known here: set {name} to the value it has where the server "
            f"runs (where it has none, it is the {kept} in the run's {SERVER_FILE})."
        )
    return ServerAddress(base_url, key) if base_url and key else None


def is_over(config: RunConfig | None, folder: Path | None, server: ServerAddress) -> bool:
    """True if the file of this server says that its run is over; False on a machine that does not have the file."""
    file = _newest(config, folder, server.base_url)
    return file is not None and file.base_url == server.base_url and file.over


def _newest(config: RunConfig | None, folder: Path | None, base_url: str) -> ServerFile | None:
    """The file of this server, if there is one, else the newest one."""
    if folder is not None:
        files = [folder / SERVER_FILE]
    elif config is None:
        files = []
    else:
        same_name = re.compile(rf"{re.escape(config.name)}(-\d+)?")
        files = [file for file in config.runs.glob(f"*/{SERVER_FILE}") if same_name.fullmatch(file.parent.name)]
    servers = [(file.stat().st_mtime, server) for file in files if (server := ServerFile.read(file))]
    servers.sort(key=lambda entry: (entry[1].base_url == base_url, entry[0]))
    return servers[-1][1] if servers else None
