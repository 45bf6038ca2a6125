"""Runs from Python: train, and read what a run recorded as tables, in a script or a notebook."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import tomli_w

from agl_core.cli.screen import Screen
from agl_core.config.load import load
from agl_core.errors import TrainingError
from agl_server.commands.runs import show
from agl_server.commands.screen import ConsoleObserver
from agl_server.commands.train import print_summary
from agl_server.health.verdict import RunVerdict, read_metrics, verdict_of
from agl_server.http import listening
from agl_server.reading.export import Format, export_run
from agl_server.reading.rollouts import Query
from agl_server.reading.runs import find_run
from agl_server.training import run as training

Result = TypeVar("Result")


def train(config: str | Path | Mapping[str, Any], /, **overrides: Any) -> Run:
    """Train as `agl train` does; `overrides` are dotted keys. In a notebook: `await train_async(…)`.

    run = agl_server.train("train.toml", **{"train.steps": 20})
    """
    return _alone(train_async(config, **overrides))


async def train_async(config: str | Path | Mapping[str, Any], /, **overrides: Any) -> Run:
    """The same where an event loop runs, in the main thread. Stopping the cell saves a checkpoint.

    A configuration as a mapping has the keys of a file in the working directory.
    """
    with TemporaryDirectory(prefix="agl-") as folder:
        file = config
        if isinstance(file, Mapping):
            file = Path(folder) / "config.toml"
            file.write_text(tomli_w.dumps({"folder": str(Path.cwd()), **config}))  # type: ignore[dict-item]
        loaded = load(Path(file), [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    run_dir, screen = training.new_run_dir(loaded), Screen()
    observer = ConsoleObserver(screen, loaded.config.train.steps)
    summary = await training.train(loaded, run_dir, observer, look=True)
    summary.write()
    print_summary(screen, summary)
    return Run(run_dir)


class Run:
    """A run, finished or going on. Tables are pandas frames with the columns of docs/data.md.

    run = agl_server.Run("calc")
    run.metrics().plot(x="step", y="reward/mean")
    run.transitions(ending="crashed")[["agent", "tool_results"]]
    """

    def __init__(self, run: str | Path | None = None) -> None:
        """`run` is a folder, or a name below ./runs; None: the newest. ConfigError if there is none."""
        self.folder = find_run(None if run is None else Path(run))

    @property
    def verdict(self) -> RunVerdict | None:
        """The run's verdict so far; None before its first step."""
        return verdict_of(read_metrics(self.folder))

    def metrics(self, kind: str = "train") -> Any:
        """The numbers of each training step, or with "eval" of each evaluation (docs/health.md)."""
        import pandas as pd

        lines = read_metrics(self.folder)
        return pd.DataFrame([{**line.values, "step": line.step} for line in lines if line.kind == kind])

    def rollouts(self, **filters: Any) -> Any:
        """A row for each rollout that has ended; `filters` are the fields of `agl_server.reading.rollouts.Query`."""
        return self._table("episodes", filters).to_pandas()

    def transitions(self, **filters: Any) -> Any:
        """A row for each transition, with token ids, reward, credit, advantage and weight."""
        return self._table("transitions", filters).to_pandas()

    def dataset(self, **filters: Any) -> Any:
        """The transitions as a Hugging Face dataset."""
        import datasets

        return datasets.Dataset(datasets.table.InMemoryTable(self._table("transitions", filters)))

    def show(self, rollout: str, *, width: int = 300, tokens: bool = False) -> None:
        """Print a rollout turn by turn, as `agl show` does."""
        _aside(show, [str(self.folder), rollout], width, tokens)

    def _table(self, name: str, filters: Mapping[str, Any]) -> Any:
        import pyarrow.parquet

        with TemporaryDirectory(prefix="agl-") as folder:
            out = Path(folder) / "tables"
            _aside(asyncio.run, export_run(self.folder, Format.PARQUET, out, Query(**filters)))
            return pyarrow.parquet.read_table(out / f"{name}.parquet")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"


def _alone(work: Coroutine[Any, Any, Result]) -> Result:
    if asyncio._get_running_loop() is None:
        return listening.run(work)
    work.close()
    raise TrainingError("An event loop runs here, as in a notebook: await agl_server.train_async(…) instead.")


def _aside(function: Callable[..., Result], *args: Any) -> Result:
    """Call it in a thread of its own, where no event loop runs, as one does in a notebook."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *args).result()
