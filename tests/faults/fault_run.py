"""A run of seconds in processes of its own, each of which a test may end at any moment and start again."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from ..support.agl_command import Command
from ..support.testing_aids import Recorded, read_store
from .fault_agent import NOTES

HERE = Path(__file__).parent
PATIENCE = 240.0
"""Seconds after which a run hangs: a hundred times what anything here takes on a machine with nothing else to do."""
FOR_EVER = 100_000
"""Steps of a run that goes on until it is told how many it is to make."""

_LOOK = 0.02
_TELL = 2.0


class HungError(AssertionError):
    """An expected event did not come; says what every process was doing instead."""


TRAINER = "trainer"
"""The name of the part that trains, and serves the workers."""


class TinyRun:
    """A run in a folder: start its parts, strike them, wait for its end, and read what it left.

    `changes` are settings by dotted key, `environment` is added to all its processes'. Workers reach the server by
    `server`, if that is given, instead of by the run's folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        workers: int = 2,
        environment: Mapping[str, str] | None = None,
        server: str | None = None,
        **changes: Any,
    ) -> None:
        self.root, self.folder = root, root / "runs" / "tiny"
        self.config, self.store = root / "tiny.toml", self.folder / "store.sqlite"
        self.notes = root / "notes.jsonl"
        self.overrides: list[str] = []
        """Further arguments of `agl train`."""
        self.parts: dict[str, Command] = {}
        self._workers, self._server = workers, server
        self._environment = {
            "PYTHONPATH": os.pathsep.join([str(HERE / "child"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "AGL_FAULTS_FOLDER": str(root),
            NOTES: str(self.notes),
            **(environment or {}),
        }
        self._logs = 0
        root.mkdir(parents=True, exist_ok=True)
        self.notes.touch()
        self.settings = _configuration(root, changes)
        self.config.write_text(tomli_w.dumps(self.settings))

    @property
    def begun(self) -> bool:
        """True if there is a run to go on with."""
        return (self.folder / "config.toml").is_file()

    @property
    def trainer(self) -> Command:
        return self.parts[TRAINER]

    @property
    def workers(self) -> list[Command]:
        return [part for name, part in self.parts.items() if name != TRAINER]

    def start(self) -> None:
        for name in (TRAINER, *(f"worker {number}" for number in range(self._workers))):
            self.begin(name)

    def begin(self, name: str) -> Command:
        """Start a part, or start it again, as its user would."""
        if name == TRAINER:
            if self.folder.exists() and not self.begun:
                shutil.rmtree(self.folder)  # It was killed before it wrote down what it was to do.
            arguments = ["train", *(["--resume", str(self.folder)] if self.begun else [str(self.config)])]
            arguments += self.overrides
        else:
            arguments = ["worker", str(self.config), "--concurrency=3"]
            arguments += ["--server", self._server] if self._server else []
        self._logs += 1
        log = self.root / f"{self._logs:03d}-{name.replace(' ', '-')}.log"
        self.parts[name] = Command.start(*arguments, log=log, **self._environment)
        return self.parts[name]

    def until(self, condition: Callable[[], object], what: str, *, may_end: bool = False) -> None:
        """Wait for a condition; HungError if it does not come, or, unless they `may_end`, a part ends before it."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            ended = {name: part.process.returncode for name, part in self.parts.items() if not part.running}
            if ended and not may_end:
                codes = ", ".join(f"{name} with {code}" for name, code in ended.items())
                raise HungError(f"{codes} ended, before {what}\n{self.diagnosis()}")
            if time.monotonic() > deadline:
                raise HungError(f"{PATIENCE:g} seconds were not enough until {what}\n{self.diagnosis()}")
            time.sleep(_LOOK)

    def finish(self) -> None:
        """Wait until training has ended well, then end what would wait for more of it: workers that missed its end."""
        self._ended(TRAINER, 0)
        for part in self.parts.values():
            part.process.terminate()
        for name in self.parts:
            self._ended(name, 0, -signal.SIGTERM)

    def _ended(self, name: str, *codes: int) -> None:
        part = self.parts[name]
        try:
            assert part.wait(PATIENCE) in codes, part.output()
        except subprocess.TimeoutExpired:
            raise HungError(f"{name} did not end in {PATIENCE:g} s\n{self.diagnosis()}") from None

    def finish_after(self, more_steps: int) -> int:
        """Have a run that goes on for ever end some steps after its last checkpoint; how many it has made then."""
        self.trainer.kill()
        steps = max((int(path.name[-6:]) for path in (self.folder / "checkpoints").glob("step-*")), default=0)
        self.overrides = [f"--set=train.steps={steps + more_steps}"]
        self.begin(TRAINER)
        self.finish()
        return steps + more_steps

    def stop(self) -> None:
        for part in self.parts.values():
            part.stop()

    def running_agents(self) -> list[int]:
        """The processes of agents that are under way."""
        begun = [entry["pid"] for entry in self.noted_as("begun")]
        return [pid for pid in begun[-20:] if _is_forked(pid)]

    def noted(self) -> list[dict[str, Any]]:
        *lines, _ = self.notes.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines]

    def acknowledged(self) -> list[dict[str, Any]]:
        return self.noted_as("acknowledged")

    def noted_as(self, what: str) -> list[dict[str, Any]]:
        return [entry[what] for entry in self.noted() if what in entry]

    def recorded(self) -> Recorded:
        return read_store(self.store)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    def diagnosis(self) -> str:
        """Each part's log, with what its processes that still run are doing."""
        reports: list[str] = []
        for name, part in self.parts.items():
            state = "running" if part.running else f"ended with {part.process.returncode}"
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(part.process.pid)
                for child in (process, *process.children(recursive=True)):
                    child.send_signal(signal.SIGUSR1)  # `child/sitecustomize.py` answers it.
            time.sleep(_TELL)
            reports.append(f"===== {name} ({part.process.pid}): {state}; {part.log.name}:\n{part.output()}")
        return "\n".join(reports)


def _is_forked(pid: int) -> bool:
    """True if this is the living process of an agent."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "agl_core.processes.server" in process.cmdline()
    except psutil.Error:
        return False


def _configuration(root: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "config_version": 1,
        "name": "tiny",
        "runs": str(root / "runs"),
        "folder": str(HERE),
        "plugins": [str(HERE / "fault_parts.py")],
        "agent": {"entry": "fault_agent:solve", "attach": False},
        "tasks": {"train": {"source": "counting"}},
        "policies": {"default": {"model": {"path": "a-ledger"}}},
        "sampling": {"max_tokens": 400},
        "train": {"steps": FOR_EVER, "groups_per_step": 2, "group_size": 2, "checkpoint_every": 1},
        "eval": {"tasks": 2, "modes": ["eval-greedy"], "every": 5},
        "workers": {"processes": 0, "timeout": 30.0, "attempts": 30},
        "rewards": {"parity": {}},
        "algorithm": {"name": "none"},
        "engine": {"name": "ledger"},
        "trackers": {"tensorboard": False},
    }
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = data
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return data
