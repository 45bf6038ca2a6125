"""A program reaches what it may, and ends with its parent and at its limits, whatever runs it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agl_core.errors import ConfigError
from agl_harnesses.sandbox import confined
from agl_harnesses.workspace import WorkspaceSection

bubblewrap = pytest.param(
    "bubblewrap", marks=pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
)
each_runner = pytest.mark.parametrize("runner", ["plain", bubblewrap])

PROBE = """
import json, os, sys, urllib.request

def tried(function, *arguments):
    try:
        return function(*arguments)
    except OSError as error:
        return type(error).__name__

def read(url):
    return urllib.request.urlopen(url, timeout=20).read().decode()

gateway, other, *paths = sys.argv[1:]
print(json.dumps({
    "gateway": tried(read, gateway),
    "other": tried(read, other),
    "paths": [tried(os.listdir, path) for path in paths],
    "system": tried(open, "/usr/planted", "w") and "read-only",
    "tmp": sorted(os.listdir("/tmp")),
}))
open("made", "w").close()
open(os.path.join(os.environ["HOME"], "made"), "w").close()
sys.exit(3)
"""


class Attempt:
    """A workspace and a home beside another attempt's."""

    def __init__(self, root: Path) -> None:
        self.root, self.workspace, self.home = root, root / "work", root / "home"
        for folder in (self.workspace, self.home, root / "other_attempt", root / "configuration"):
            folder.mkdir()
            (folder / "there").touch()

    async def start(
        self, command: list[str], gateway: str | None = None, variables: Any = None, **settings: Any
    ) -> tuple[int, str]:
        """The exit status and the output of a command."""
        section = WorkspaceSection.model_validate(settings)
        places: Any = {"workspace": self.workspace, "home": self.home, "section": section, "variables": variables}
        async with confined(command, gateway=gateway, **places) as line:
            process = await asyncio.create_subprocess_exec(
                *line,
                cwd=self.workspace,
                env={**os.environ, "HOME": str(self.home)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
        assert process.returncode is not None
        return process.returncode, output.decode()

    async def python(self, program: str, *arguments: str, **settings: Any) -> tuple[int, str]:
        return await self.start([sys.executable, "-I", "-S", "-c", program, *arguments], **settings)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Two HTTP servers: the gateway and another one."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        path = request.split()[1]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (len(path), path))
        await writer.drain()
        writer.close()

    servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
    yield [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1" for server in servers]
    for server in servers:
        server.close()


@pytest.mark.parametrize("runner", [bubblewrap])
async def test_the_sandbox_has_the_gateway_and_its_folders_alone(
    attempt: Attempt, urls: list[str], runner: str
) -> None:
    hidden = [str(attempt.root / "other_attempt"), str(attempt.root / "configuration"), str(Path(__file__).parent)]
    arguments = (*urls, *hidden, "/usr/src", "/var", "/home")
    status, output = await attempt.python(PROBE, *arguments, gateway=urls[0], runner=runner)
    seen = json.loads(output)
    assert status == 3
    assert (seen["gateway"], seen["other"]) == ("/v1", "URLError")
    assert seen["paths"] == ["FileNotFoundError"] * 3 + [[], "FileNotFoundError", "FileNotFoundError"]
    assert seen["system"] == "read-only"
    assert seen["tmp"] == [attempt.root.relative_to("/tmp").parts[0]] or not attempt.root.is_relative_to("/tmp")
    assert (attempt.workspace / "made").exists()
    assert (attempt.home / "made").exists()
    _, output = await attempt.python(PROBE, *arguments, gateway=urls[0], runner=runner, network=True, reads=hidden[:1])
    seen = json.loads(output)
    assert (seen["gateway"], seen["other"]) == ("/v1", "/v1")
    assert seen["paths"][:2] == [["there"], "FileNotFoundError"]


CONTAINER = (
    *("bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--setenv", "PATH", os.environ["PATH"]),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"),
    *("--ro-bind", sys.base_prefix, sys.base_prefix, "--bind", "{workspace}", "{workspace}"),
    *("--bind", "{home}", "{home}", "--ro-bind", "{sandbox}", "{sandbox}"),
    *("--ro-bind", "{sandbox}/hosts", "/etc/hosts", "--setenv", "NAME", "{name} {user}"),
)
"""A container, as far as agl can tell, of the runner `command`."""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
async def test_a_container_has_the_gateway_its_folders_and_its_variables(attempt: Attempt, urls: list[str]) -> None:
    probe = PROBE.replace('"tmp":', '"variables": [os.getcwd(), os.environ.get("KEY"), os.environ["NAME"]], "tmp":')
    hidden = str(attempt.root / "other_attempt")
    command = ["python3", "-c", probe, urls[0], urls[1], hidden]
    variables = {"HOME": str(attempt.home), "KEY": "a key"}
    settings = {"runner": "command", "wrap": CONTAINER}
    status, output = await attempt.start(command, gateway=urls[0], variables=variables, **settings)
    assert status == 3, output
    seen = json.loads(output)
    folder, key, name = seen["variables"]
    assert (seen["gateway"], seen["other"], seen["paths"]) == ("/v1", "URLError", ["FileNotFoundError"])
    assert (folder, key) == (str(attempt.workspace), "a key")
    assert name.startswith("agl-")
    assert name.endswith(f" {os.getuid()}:{os.getgid()}")
    assert (attempt.home / "made").exists()


@pytest.mark.parametrize(
    "settings", [{"runner": "command"}, {"wrap": ["run", "{home}"], "runner": "command"}, {"wrap": CONTAINER}]
)
def test_a_container_that_lacks_a_folder_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=r"needs `wrap` with \{workspace\}, \{home\} and \{sandbox\}"):
        WorkspaceSection.model_validate(settings)


def test_a_placeholder_that_a_container_has_not_is_named() -> None:
    wrap = (*CONTAINER, "--label={workspce}", "${HOME}")
    with pytest.raises(ValidationError, match=r"`wrap` has no placeholder \{workspce\}"):
        WorkspaceSection.model_validate({"runner": "command", "wrap": wrap})
    assert WorkspaceSection.model_validate({"runner": "command", "wrap": (*CONTAINER, "${HOME}")}).wrap[-1] == "${HOME}"


async def test_a_plain_process_passes_its_status_and_its_signals_on(attempt: Attempt, urls: list[str]) -> None:
    status, output = await attempt.python(PROBE, *urls, gateway=urls[0], runner="plain")
    assert (status, json.loads(output)["gateway"]) == (3, "/v1")
    ends_well = "trap 'exit 7' TERM; kill -TERM $PPID; while :; do sleep 0.1; done"
    assert (await attempt.start(["sh", "-c", ends_well], runner="plain"))[0] == 7
    assert (await attempt.start(["no-such-program"], runner="plain"))[0] == 127


def running(mark: str) -> list[int]:
    """The processes with this word among their arguments."""
    commands = (path for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [int(path.parent.name) for path in commands if mark.encode() in _read(path).split(b"\0")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def until(mark: str, *, runs: bool) -> None:
    """Wait for a process with this mark, or for its end."""
    deadline = time.monotonic() + 120
    while bool(running(mark)) is not runs:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@each_runner
async def test_nothing_that_a_command_started_outlives_it(attempt: Attempt, runner: str) -> None:
    mark = uuid.uuid4().hex
    leaves = f"setsid sh -c 'sleep 300; :' {mark} > /dev/null 2>&1 & setsid sleep 300 & until [ -e ready ]; do :; done"
    starts = asyncio.create_task(attempt.start(["sh", "-c", leaves], runner=runner))
    await until(mark, runs=True)
    (attempt.workspace / "ready").touch()
    assert (await starts)[0] == 0
    assert running(mark) == []


PARENT = """
import asyncio, os, sys
from pathlib import Path
from agl_harnesses.sandbox import confined
from agl_harnesses.workspace import WorkspaceSection

async def main(root, runner, mark):
    places = {"workspace": root / "work", "home": root / "home", "section": WorkspaceSection(runner=runner)}
    async with confined(["sh", "-c", "trap '' TERM; touch ready; sleep 300; :", mark], **places) as line:
        await (await asyncio.create_subprocess_exec(*line, cwd=root / "work")).wait()

asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
"""


@each_runner
async def test_a_command_dies_with_its_parent(attempt: Attempt, runner: str) -> None:
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", PARENT, str(attempt.root), runner, mark]
    parent = await asyncio.create_subprocess_exec(*command)
    try:
        while not (attempt.workspace / "ready").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    finally:
        parent.kill()
        await parent.wait()
    await until(mark, runs=False)


@each_runner
@pytest.mark.parametrize(
    ("program", "settings", "status", "words"),
    [
        ("bytearray(300 << 20)", {"memory_mib": 128}, 1, "MemoryError"),
        (
            "import os, time\nfor _ in range(20):\n    os.fork() or (time.sleep(300), os._exit(0))\ntime.sleep(300)",
            {"processes": 8},
            137,
            "workspace.processes",
        ),
        (
            "import time\nfor n in range(4):\n    open(str(n), 'wb').write(bytes(2 << 20))\ntime.sleep(300)",
            {"disk_mib": 5},
            137,
            "workspace.disk_mib",
        ),
    ],
    ids=["memory", "processes", "disk"],
)
async def test_a_limit_is_kept_and_named(
    attempt: Attempt, runner: str, program: str, settings: dict[str, int], status: int, words: str
) -> None:
    ended, output = await attempt.python(program, runner=runner, **settings)
    assert ended == status
    assert words in output


@pytest.mark.parametrize("gateway", ["http://10.0.0.5:8000/v1", "https://models.example.com/v1"])
@pytest.mark.parametrize("runner", [bubblewrap])
async def test_a_gateway_that_cannot_be_had_inside_is_refused(attempt: Attempt, runner: str, gateway: str) -> None:
    with pytest.raises(ConfigError, match=r"workspace\.network = true"):
        await attempt.start(["true"], gateway=gateway, runner=runner)


async def test_without_bubblewrap_it_is_an_error_or_a_warning(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = str(shutil.which("true"))
    monkeypatch.setenv("PATH", str(attempt.root))
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        await attempt.start([program], runner="bubblewrap")
    for _ in range(2):
        assert (await attempt.start([program]))[0] == 0
    assert [record.message for record in caplog.records if "without a sandbox" in record.message] != []
    assert len(caplog.records) == 1
