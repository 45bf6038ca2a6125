"""Runs of the real command on the real example, in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from agl_command import Command, working_folder  # noqa: F401
from typer.testing import CliRunner

from agl_core.cli import app

ROOT = Path(__file__).parents[2]
CALC = ROOT / "examples" / "calc" / "train.toml"


@dataclass
class Agl:
    """Starts `agl` commands in a folder of their own."""

    folder: Path
    started: list[Command] = field(default_factory=list)

    def start(self, *arguments: str | Path) -> Command:
        log = self.folder / f"log-{len(self.started)}.txt"
        self.started.append(Command.start(*arguments, log=log))
        return self.started[-1]

    def run(self, *arguments: str | Path) -> str:
        command = self.start(*arguments)
        code = command.wait()
        assert code == 0, command.output()
        return command.output()

    def look(self, *arguments: str | Path) -> str:
        """The output of a command that only reads. It runs in this process, which has imported everything already."""
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(part) for part in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    def calc(self, *settings: str) -> list[str]:
        """The arguments for a small run of the calc example."""
        small = ["train.steps=4", "train.groups_per_step=2", "train.group_size=8", "eval.every=2", "eval.tasks=2"]
        return ["train", str(CALC), *(f"--set={key}" for key in (*small, "train.checkpoint_every=1", *settings))]

    def metrics(self, run: str) -> list[dict[str, Any]]:
        path = self.folder / "runs" / run / "metrics.jsonl"
        # While the run goes on, the last line may be half there: it is whole once its newline is.
        lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def summary(self, run: str) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.folder / "runs" / run / "summary.json").read_text())
        return summary

    def stop(self) -> None:
        for command in self.started:
            command.stop()


@pytest.fixture
def agl(tmp_path: Path) -> Iterator[Agl]:
    agl = Agl(tmp_path)
    yield agl
    agl.stop()
