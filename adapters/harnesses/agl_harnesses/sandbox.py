"""How a program runs in a workspace: as a plain process, or in a sandbox with the gateway alone, by bubblewrap or by a
command of the user's that starts a container.

    program ─▶ 127.0.0.1:PORT (launcher, inside) ─▶ Unix socket ─▶ worker's process ─▶ gateway

In the sandbox the system's folders can be read; the workspace and the home can be written; there is nothing else, and
no network. The gateway's address is the same inside and outside. Limits are kept by the launcher, inside as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import agl_core
from agl_core.errors import ConfigError
from agl_harnesses import launcher
from agl_harnesses.workspace import PLACES, WorkspaceSection

logger = logging.getLogger(__name__)

_ETC = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d",
    "localtime", "mime.types", "nsswitch.conf", "passwd", "pki", "ssl",
)  # fmt: skip
"""Files and folders of /etc that programs need and that hold no secrets."""
_LAUNCHER, _SOCKET = "/run/agl/launcher.py", "/run/agl/gateway"
_PYTHON = os.path.realpath(sys.executable)
_MIB = 1 << 20


@contextlib.asynccontextmanager
async def confined(
    command: Sequence[str],
    *,
    workspace: Path,
    home: Path,
    section: WorkspaceSection,
    gateway: str | None = None,
    reads: Iterable[Path] = (),
    variables: Mapping[str, str] | None = None,
    mount: str | None = None,
    mounts: Sequence[tuple[str, str, str]] = (),
    alone: bool = False,
) -> AsyncIterator[list[str]]:
    """The command line that runs `command` in the workspace as the section says; run it in the workspace's folder.

    `gateway` is the only address that it can reach, served as long as the context lasts; None: there is none. It may
    write to `workspace` and `home`, and in the sandbox to a /tmp of its own. `reads` are further files and folders that
    it may read, for instance those of the program itself. A container gets the `variables`; other runners inherit them.
    ConfigError if the section cannot be kept here.

    `mount` is the workspace's path in the sandbox, and `mounts` are further ones there: `--bind` or `--ro-bind`, the
    path outside, the path inside. `alone`: if a process has outlived the one that had started it, the exit status is
    `OVER_LIMIT`.
    """
    mount = mount or str(workspace)
    settings = {
        "port": None,
        "socket": _SOCKET,
        "memory": section.memory_mib and section.memory_mib * _MIB,
        "processes": section.processes,
        "disk": section.disk_mib and section.disk_mib * _MIB,
        "folders": [mount, str(home), *(inside for option, _, inside in mounts if option == "--bind")],
        "alone": alone,
        "variables": None,
    }
    python, runner = [_PYTHON, "-I", "-S"], section.runner
    if mount != str(workspace):
        if runner in ("plain", "command"):
            raise ConfigError(f"The workspace has to be at {mount}, which workspace.runner = '{runner}' cannot do.")
        runner = "bubblewrap"
    is_container = runner == "command"
    if not is_container and not await asyncio.to_thread(_uses_bubblewrap, runner, shutil.which("bwrap")):
        yield [*python, launcher.__file__, json.dumps(settings), *command]
        return
    async with contextlib.AsyncExitStack() as stack:
        own = Path(stack.enter_context(TemporaryDirectory(prefix="agl-")))
        hosts, binds = "127.0.0.1 localhost\n", list[str]()
        if gateway is not None and not section.network:
            host, port = _address(gateway)
            hosts += f"127.0.0.1 {host}\n"
            settings["port"] = port
            await stack.enter_async_context(_relay(own / "gateway", host, port))
            binds += ["--bind", str(own / "gateway"), _SOCKET]
        (own / "hosts").write_text(hosts)
        if is_container:
            shutil.copy(launcher.__file__, own / "launcher.py")
            (own / "variables").write_text(json.dumps(dict(variables or {})))
            settings |= {"socket": str(own / "gateway"), "variables": str(own / "variables")}
            users = (f"agl-{secrets.token_hex(8)}", f"{os.getuid()}:{os.getgid()}")
            places = dict(zip(PLACES, (str(workspace), str(home), str(own), *users), strict=True))
            container = [filled(word, places) for word in section.wrap]
            yield [*container, "python3", "-I", "-S", str(own / "launcher.py"), json.dumps(settings), *command]
            return
        if not section.network:
            binds += ["--ro-bind", str(own / "hosts"), "/etc/hosts"]
        inside = [*python, _LAUNCHER, json.dumps(settings), *command]
        sandbox = _bubblewrap(workspace, mount, home, section, [*reads, *section.reads])
        yield [*sandbox, *itertools.chain(*mounts), *binds, "--remount-ro", "/", "--", *inside]


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with its placeholders replaced, each once: a prompt's own braces stay as they are."""
    parts = re.split("(" + "|".join(map(re.escape, values)) + ")", text)
    return "".join(values.get(part, part) for part in parts)


def _bubblewrap(workspace: Path, mount: str, home: Path, section: WorkspaceSection, reads: Iterable[Path]) -> list[str]:
    """The sandbox's own part of the command line; later mounts lie over earlier ones."""
    options = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    etc = (*_ETC, "hosts", "resolv.conf") if section.network else _ETC
    if section.network:
        options += ["--share-net"]
    options += ["--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/src"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            options += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
        else:
            options += ["--ro-bind-try", f"/{name}", f"/{name}"]
    for name in etc:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    size = ["--size", str(section.disk_mib * _MIB)] if section.disk_mib else []
    options += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/tmp", *size, "--tmpfs", "/dev/shm"]
    if mount != str(workspace):  # Programs may be installed below it.
        options += ["--bind", str(workspace), mount]
    pythons = {Path(sys.prefix), Path(sys.base_prefix), Path(_PYTHON).parents[1]}
    pythons |= {Path(str(module.__file__)).parent for module in (agl_core, launcher)}  # For servers of tools.
    for path in sorted({path.absolute() for path in (*pythons, *reads)} - {Path("/usr"), Path("/")}):
        options += ["--ro-bind-try", str(path), str(path)]
    options += ["--ro-bind", launcher.__file__, _LAUNCHER]
    for path in (home, workspace) if mount == str(workspace) else (home,):
        options += ["--bind", str(path), str(path)]
    return [*options, "--chdir", mount]


@functools.cache
def _uses_bubblewrap(runner: str, program: str | None) -> bool:
    """True if programs run in bubblewrap. ConfigError if they must, and it does not work here."""
    if runner == "plain":
        return False
    problem = "the program bwrap is not installed"
    if program is not None:
        trial = [program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
        tried = subprocess.run(trial, capture_output=True, check=False)
        if tried.returncode == 0:
            return True
        problem = tried.stderr.decode(errors="replace").strip()
    remedy = "Install the system's package bubblewrap, on a kernel that lets users make namespaces"
    if runner == "bubblewrap":
        raise ConfigError(f"workspace.runner = 'bubblewrap' does not work here: {problem}. {remedy}.")
    logger.warning(
        "Programs in workspaces run without a sandbox (%s): they can read what this user can, and use the network. %s.",
        problem,
        remedy,
    )
    return False


def _address(gateway: str) -> tuple[str, int]:
    """Host and port of the gateway's URL. ConfigError if no program can listen there inside the sandbox."""
    parts = urlsplit(gateway)
    host, port = parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    try:
        is_elsewhere = not ipaddress.ip_address(host).is_loopback
    except ValueError:  # A name, which the sandbox resolves to itself.
        is_elsewhere = False
    if is_elsewhere or port < 1024:
        raise ConfigError(
            f"The sandbox cannot stand in for the gateway at {host}, port {port}. Give the worker the server's name "
            f"instead of a number, and a port from 1024 on; or set workspace.network = true."
        )
    return host, port


@contextlib.asynccontextmanager
async def _relay(path: Path, host: str, port: int) -> AsyncIterator[None]:
    """Pass connections to a Unix socket on to the gateway."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            to_reader, to_writer = await asyncio.open_connection(host, port)
            with contextlib.closing(to_writer):
                await asyncio.gather(pump(reader, to_writer), pump(to_reader, writer))

    tasks = set[asyncio.Task[None]]()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_unix_server(accept, path)
    try:
        yield
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
