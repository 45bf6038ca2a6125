"""Runs that tables are made of: each an example, what is changed in it, and a seed. They can be interrupted.

Every result is kept in a JSON file as soon as its run ends. A run is made again if the example's configuration, policy
or code has changed since; comments and docstrings may change.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeAlias

EXAMPLES = Path(__file__).resolve().parent

Result: TypeAlias = dict[str, Any]
"""The record of a run: its summary's figures, CPU seconds, the cores it had, and the digest of what it trained."""
Look: TypeAlias = Callable[[Path], Result]
"""Reads figures of a page's own from a run's folder."""
Cell: TypeAlias = Callable[[Sequence[Result]], str]
"""Makes a table's cell of the runs of a row."""

KEPT = (
    "rewards", "seconds", "peak_rss_bytes", "rollouts", "llm_calls", "transitions", "evaluations", "train_rewards",
)  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    folder: Path
    label: str
    settings: tuple[str, ...]
    """Changes to the example's `train.toml`."""
    seed: int
    look: Look = lambda run: {}

    @property
    def example(self) -> str:
        folder = self.folder.resolve()
        return str(folder.relative_to(EXAMPLES)) if folder.is_relative_to(EXAMPLES) else folder.name

    @property
    def name(self) -> str:
        return "/".join(filter(None, [self.example, self.label, f"seed {self.seed}"]))

    @property
    def digest(self) -> str:
        """Of everything that decides the result, but agl's own code: configuration, policy, agent and tasks.

        How the policy was made (`make_*.py`) does not count: its weights do.
        """
        config = tomllib.loads((self.folder / "train.toml").read_text())
        for section in {"algorithm", "credit"} & config.keys():
            chosen = dict(s.split("=", 1) for s in self.settings).get(f"{section}.name", config[section]["name"])
            config[section] = {key: value for key, value in config[section].items() if key in ("name", chosen)}
        digest = hashlib.sha256(json.dumps([config, list(self.settings)], sort_keys=True).encode())
        for file in sorted({*self.folder.glob("*.py"), *(self.folder / path for path in config.get("plugins", ()))}):
            if not file.name.startswith("make_"):
                digest.update(without_words(file.read_text()).encode())
        for file in sorted((self.folder / "policy").iterdir()):
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def run(self, runs: Path) -> Result:
        """Train in a new folder below `runs`, and return what is kept. Exits if training fails or is interrupted."""
        name = f"{self.folder.name}-seed-{self.seed}"
        command = [str(Path(sys.executable).with_name("agl")), "train", str(self.folder / "train.toml")]
        for setting in (f"seed={self.seed}", f"runs={runs}", f"name={name}", *self.settings):
            command += ["--set", setting]
        spent = cpu_seconds()
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ended.returncode:
            sys.exit(f"{name} ended with status {ended.returncode}; call this again to go on\n{ended.stdout[-2000:]}")
        # If runs/NAME was taken, agl made runs/NAME-2 and so on.
        summaries = [*runs.glob(f"{name}/summary.json"), *runs.glob(f"{name}-*/summary.json")]
        newest = max(summaries, key=lambda file: file.stat().st_mtime)
        summary = json.loads(newest.read_text())
        return {
            "digest": self.digest,
            "cpu_seconds": round(cpu_seconds() - spent, 1),
            "cores": len(os.sched_getaffinity(0)),
            **{key: summary[key] for key in KEPT},
            **self.look(newest.parent),
        }


def without_words(code: str) -> str:
    """Python code without comments and docstrings.

    >>> without_words("def f() -> int:\\n    'Words.'\\n    return 1  # more")
    'def f() -> int:\\n    return 1'
    """
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [  # type: ignore[attr-defined]
                line for line in body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return ast.unparse(tree)


@dataclass(frozen=True)
class Results:
    """The runs' results so far, by name, in a JSON file."""

    file: Path

    def read(self) -> dict[str, Result]:
        return dict(json.loads(self.file.read_text())) if self.file.is_file() else {}

    def valid(self, experiments: Iterable[Experiment]) -> list[Result]:
        """The results of these runs; those that are missing or out of date are left out."""
        results = self.read()
        return [results[e.name] for e in experiments if e.name in results and results[e.name]["digest"] == e.digest]

    def keep(self, name: str, result: Result) -> None:
        part = self.file.with_suffix(".part")
        results = self.read() | {name: result}
        part.write_text(json.dumps(results, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        os.replace(part, self.file)

    def complete(
        self, experiments: Sequence[Experiment], minutes: float = float("inf"), runs: Path | None = None
    ) -> None:
        """Run what is missing, in order. No run starts after so many minutes. Without `runs`, no run's folder stays."""
        results, began = self.read(), time.monotonic()
        missing = [e for e in experiments if results.get(e.name, {}).get("digest") != e.digest]
        for number, experiment in enumerate(missing, 1):
            if time.monotonic() - began > 60 * minutes:
                print(f"time is up; {len(missing) - number + 1} runs are left, call it again to go on", file=sys.stderr)
                return
            print(f"{number}/{len(missing)} {experiment.name}", end=" … ", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as temporary:
                result = experiment.run(runs or Path(temporary))
            self.keep(experiment.name, result)
            print({name: rewards["after"] for name, rewards in result["rewards"].items()}, file=sys.stderr, flush=True)


def cpu_seconds() -> float:
    """The CPU time of the processes started from here so far, and of those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(first: str, rows: Mapping[str, Sequence[Result]], columns: Mapping[str, Cell]) -> Iterator[str]:
    """As Markdown. Where a row has no runs, its cells are empty."""
    yield f"| {' | '.join([first, *columns])} |"
    yield "|---" * (len(columns) + 1) + "|"
    for label, runs in rows.items():
        yield f"| {' | '.join([label, *(cell(runs) if runs else '' for cell in columns.values())])} |"


def spread(value: Callable[[Result], float], digits: int = 3) -> Cell:
    """Its mean over the runs, and its range.

    >>> spread(lambda run: run["reward"])([{"reward": 0.5}, {"reward": 1.0}])
    '0.750 (0.50–1.00)'
    """

    def cell(runs: Sequence[Result]) -> str:
        values = [value(run) for run in runs]
        rest = max(0, digits - 1)
        span = f" ({min(values):.{rest}f}–{max(values):.{rest}f})" if len(values) > 1 else ""
        return f"{mean(values):.{digits}f}{span}"

    return cell


def average(value: Callable[[Result], float]) -> Cell:
    """Its mean over the runs, as a whole number."""
    return lambda runs: f"{mean(map(value, runs)):.0f}"
