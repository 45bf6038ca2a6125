"""`agl` commands: in a process of their own, or by fixtures in this one, which you import into your module."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeAlias

import psutil
import pytest

Agl: TypeAlias = Callable[..., CompletedProcess[str]]


@dataclass
class Command:
    """One `agl` command under way, in a process group of its own; its output goes to a file."""

    process: subprocess.Popen[str]
    log: Path

    @classmethod
    def start(cls, *arguments: str | Path, log: Path, **environment: str) -> Command:
        """Begin it in the log's folder."""
        with log.open("w") as output:
            process = subprocess.Popen(
                [Path(sys.executable).with_name("agl"), *map(str, arguments)],
                cwd=log.parent,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        return cls(process, log)

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout: float = 400) -> int:
        return self.process.wait(timeout)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], object], timeout: float = 240) -> None:
        """Wait for a condition; fail with the log if the command ends before it or the time is up."""
        deadline = time.monotonic() + timeout
        while not condition():
            if not self.running or time.monotonic() > deadline:
                pytest.fail(f"the condition never came; exit code {self.process.poll()}\n{self.output()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL it alone, as a crash would; what it started has to notice by itself."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.running else []
        self.process.kill()
        self.process.wait(60)
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"left behind: {alive}"

    def stop(self) -> None:
        """End it in any case, with all that it started."""
        if self.running:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(name="agl")
def agl_in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> Agl:
    """Runs an `agl` command in this process, from its first line to the exit status; a process takes a second more."""
    [command] = entry_points(group="console_scripts", name="agl")
    main = command.load()

    def run(*arguments: str) -> CompletedProcess[str]:
        # A process would have no modules of other tests, and those of its own folder first.
        _forget_modules_in(tmp_path_factory.getbasetemp())
        for file in Path.cwd().glob("*.py"):
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
        monkeypatch.setattr(sys, "argv", ["agl", *arguments])
        status: object = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
        output = capsys.readouterr()
        return CompletedProcess(["agl", *arguments], int(str(status)), output.out, output.err)

    return run


@pytest.fixture
def core_and_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other package of agl seems to be installed."""
    monkeypatch.setattr(
        "importlib.metadata.entry_points",
        lambda group: [entry for entry in entry_points(group=group) if entry.dist.name in ("agl-core", "agl-server")],
    )


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The test's folder as the one in which a user runs a command here; what is imported from it goes with it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    _forget_modules_in(tmp_path)


def _forget_modules_in(folder: Path) -> None:
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{folder}/"):
            del sys.modules[name]
