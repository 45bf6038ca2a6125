"""Runs that a page's tables are made of: each an example, what is changed in it, and a seed. They can be interrupted.

Every result is kept in a JSON file as soon as its run ends. A result is taken again when the example's configuration,
policy or code has changed since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).parents[1]

Result: TypeAlias = dict[str, Any]
Look: TypeAlias = Callable[[Path], Result]
"""What else a page needs of a run's folder, before that is removed."""


@dataclass(frozen=True)
class Experiment:
    """One run."""

    example: str
    label: str
    settings: tuple[str, ...]
    """What is changed in the example's `train.toml`."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.example}/{self.label}/seed {self.seed}"

    @property
    def digest(self) -> str:
        """Of everything that decides the result, but agl's own code: configuration, policy, agent and tasks."""
        folder = ROOT / "examples" / self.example
        config = tomllib.loads((folder / "train.toml").read_text())
        for section in ("algorithm", "credit"):
            chosen = dict(each.split("=", 1) for each in self.settings).get(f"{section}.name", config[section]["name"])
            config[section] = {key: value for key, value in config[section].items() if key in ("name", chosen)}
        digest = hashlib.sha256(json.dumps([config, list(self.settings)], sort_keys=True).encode())
        code = [file for file in folder.glob("*.py") if not file.name.startswith("make_")]
        for file in sorted([*code, *(folder / "policy").iterdir()]):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]


def nothing_else(run: Path) -> Result:
    return {}


@dataclass(frozen=True)
class Results:
    """What the runs of a page have given so far, by name, in a JSON file."""

    file: Path

    def read(self) -> dict[str, Result]:
        return dict(json.loads(self.file.read_text())) if self.file.is_file() else {}

    def valid(self, experiments: Iterable[Experiment]) -> list[Result]:
        """The results of these runs; those that are missing or out of date are left out."""
        found = self.read()
        return [found[e.name] for e in experiments if e.name in found and found[e.name]["digest"] == e.digest]

    def keep(self, name: str, result: Result) -> None:
        part = self.file.with_suffix(".part")
        results = self.read() | {name: result}
        part.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        os.replace(part, self.file)

    def complete(self, experiments: Sequence[Experiment], minutes: float, look: Look = nothing_else) -> None:
        """Run what is missing, in order. No run starts after so many minutes."""
        found, began = self.read(), time.monotonic()
        missing = [each for each in experiments if found.get(each.name, {}).get("digest") != each.digest]
        for number, experiment in enumerate(missing, 1):
            if time.monotonic() - began > 60 * minutes:
                print(f"time is up; {len(missing) - number + 1} runs are left, call it again to go on")
                return
            print(f"{number}/{len(missing)} {experiment.name}", end=" … ", flush=True)
            result = run(experiment, look)
            self.keep(experiment.name, result)
            print(f"{result['reward']['after']}", flush=True)


def run(experiment: Experiment, look: Look) -> Result:
    """Train, and return what the tables need. RuntimeError if training fails."""
    with tempfile.TemporaryDirectory() as runs:
        command = [str(Path(sys.executable).with_name("agl")), "train", f"examples/{experiment.example}/train.toml"]
        command += ["--seed", str(experiment.seed), "--set", f"runs={runs}", "--set", "name=run"]
        for setting in experiment.settings:
            command += ["--set", setting]
        spent = cpu_seconds()
        ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{ended.stdout[-2000:]}")
        folder = Path(runs) / "run"
        summary = json.loads((folder / "summary.json").read_text())
        return {
            "digest": experiment.digest,
            "reward": summary["reward"],
            "train_rewards": [round(reward, 4) for reward in summary["train_rewards"]],
            "cpu_seconds": round(cpu_seconds() - spent, 1),
            **look(folder),
        }


def cpu_seconds() -> float:
    """What the processes started from here have used so far, and those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def mean_and_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.2f}–{max(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def command_line(description: str | None) -> argparse.Namespace:
    """Which runs to make: --minutes, --only, --write."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no further run after so long")
    parser.add_argument("--only", default="", help="runs whose name begins so, for instance 'trip/ppo'")
    parser.add_argument("--write", action="store_true", help="write the page from the results there are")
    return parser.parse_args()
