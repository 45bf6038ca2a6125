"""`agl serve`: stand between deployed applications and their model, and record their sessions."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agl_core.cli.options import Set

if TYPE_CHECKING:
    from agl_core.cli.screen import Screen
    from agl_core.config.load import LoadedConfig
    from agl_core.protocols import Upstream
    from agl_online.config import OnlineSection

Target = Annotated[Path, typer.Argument(help="The run's configuration (TOML), or its folder.")]
Host = Annotated[str | None, typer.Option(help="The address to listen on, instead of server.host.")]
Port = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="The port to listen on, instead of server.port."),
]


def serve(
    target: Target,
    host: Host = None,
    port: Port = None,
    set_: Set = [],  # noqa: B006
) -> None:
    """Stand between deployed applications and their model: record their sessions, and take feedback on them.

    The configuration has [online] with the applications and the model server (docs/deploy-and-learn.md). The run's
    folder, runs/NAME, holds the store. The server may be killed at any time; start it again with the same command, and
    open sessions go on.

    This machine needs no weights, and of the plugins in the configuration only the store and the redactors.

    To be reached from other machines, give it an address of this one with --host, and set AGL_WORKER_KEY. What crosses
    the network is not encrypted. Ctrl-C or SIGTERM stops it.
    """
    from agl_core.cli.screen import Screen
    from agl_core.config.load import CONFIG_FILE, SERVED, load, store_config
    from agl_core.server.listening import run
    from agl_core.training.server import make_run_dir, removed_unless_begun

    changes = [f"server.{name}={value}" for name, value in (("host", host), ("port", port)) if value is not None]
    file = target / CONFIG_FILE if target.is_dir() else target
    loaded = load(file, [*set_, *changes], needs=SERVED)
    run_dir = target if target.is_dir() else loaded.config.runs / loaded.config.name
    is_new = not run_dir.exists()
    if not (run_dir / CONFIG_FILE).exists():
        make_run_dir(run_dir, partial(store_config, loaded.config))
    with removed_unless_begun(run_dir if is_new else None) as begun:
        run(_serve(loaded, run_dir, Screen(), begun))


async def _serve(loaded: LoadedConfig, run_dir: Path, console: Screen, begun: Callable[[], None]) -> None:
    from agl_core.cli.screen import shown
    from agl_core.errors import ConfigError
    from agl_core.training.server import local_server, run_settings
    from agl_online.config import online_section
    from agl_online.sessions import fixed_upstream, sessions_of

    online = online_section(loaded)
    if "learn" in loaded.sections:
        raise ConfigError(
            "With [learn], versions of the run's own answer its sessions, and `agl learn` serves them: start that, or "
            "leave [learn] out and name online.upstream."
        )
    answering = fixed_upstream(_upstream(online, console), run_settings(loaded.config))
    recorded = sessions_of(loaded, run_dir, answering, console.print)
    stopping = asyncio.ensure_future(until_signalled())  # A signal that comes early stops it as cleanly.
    async with local_server(loaded, run_dir, recorded) as server:
        begun()
        console.print(f"serving {run_dir} at {server.base_url}")
        if loaded.config.server.host in ("0.0.0.0", "::"):
            console.print("from other machines, use an address of this one in its place")
        async with shown(run_dir, loaded.config.server, server.keys.operator, console):
            await stopping
        console.print("stopping")


def _upstream(settings: OnlineSection, console: Screen) -> Upstream:
    """What answers real use. ConfigError without its key, EngineError if it does not answer."""
    from agl_core.cli.upstreams import open_upstream
    from agl_core.errors import ConfigError
    from agl_core.wire.keys import take_key

    variable = settings.upstream_key_env
    key = None if variable is None else take_key(variable)
    if variable is not None and key is None:
        raise ConfigError(
            f"online.upstream_key_env: the environment variable {variable} is not set. Set it to the key of the model "
            f"server {settings.upstream}, or leave upstream_key_env out."
        )
    assert settings.upstream is not None, "it was checked"
    upstream, probe = open_upstream(settings.upstream.rstrip("/"), key or "none", settings.model)
    if not probe.returns_ids:
        console.print(f"note: no token ids are recorded, for {probe.missing}. Sessions can be read, not trained on.")
    return upstream


async def until_signalled() -> None:
    """Return on Ctrl-C or SIGTERM; a second one gets the default treatment."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for each in signals:
        loop.add_signal_handler(each, stopped.set)
    await stopped.wait()
    for each in signals:
        loop.remove_signal_handler(each)
