"""`agl export`: what leaves a run, in each format, read by the tools that it is for."""

from __future__ import annotations

import csv
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow.parquet
import pytest

import agl_core
from agl_core.errors import ConfigError, StoreError
from agl_core.types import Call, Ending, Mode, Rollout, RolloutState, Task, Verdict

FORMATS = ("parquet", "jsonl", "hf", "csv")


@pytest.fixture
def trained(run: Any) -> Any:
    """Step 1 has three rollouts, step 2 has two and an evaluation; one rollout is not done."""
    evaluated = run.planned(2, "m7", id="e2", mode=Mode.EVAL_GREEDY, task=Task("t2", "6 * 7", split="eval"))
    done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
    run.put(*run.trained(2, "m0"), *run.trained(2, "m1"), run.planned(2, "m3"))
    run.put(replace(evaluated, **done), *(replace(e, rollout="e2") for e in run.trained(2, "m2")[1:4]))
    lines = [{"step": step, "kind": "train", "restart": 0, "reward/mean": 0.5} for step in (1, 2)]
    (run.store.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def exported(run: Any, *arguments: str, to: str = "jsonl", out: str = "out") -> Any:
    return run.agl("export", "calc", "--to", to, "--out", out, *arguments)


WRITER = """
import asyncio, pathlib, sys
from agl_core.store.sqlite import SqliteStore

async def hold():
    async with SqliteStore(pathlib.Path(sys.argv[1])):
        print("open", flush=True)
        sys.stdin.read()

asyncio.run(hold())
"""


@contextmanager
def writing(store: Path) -> Iterator[None]:
    """Meanwhile another process has the store open for writing."""
    command = [sys.executable, "-c", WRITER, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"open\n"
        yield
        process.communicate()


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_parquet(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {file.stem: pyarrow.parquet.read_table(file).to_pylist() for file in folder.glob("*.parquet")}


def read_datasets(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {path.name: datasets.load_from_disk(path).to_list() for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize(("to", "read"), [("parquet", read_parquet), ("hf", read_datasets)])
def test_tables_have_what_was_recorded(
    trained: Any, to: str, read: Callable[[Path], dict[str, list[dict[str, Any]]]]
) -> None:
    assert exported(trained, to=to).exit_code == 0

    tables = read(trained.folder / "out")
    counts = {"transitions": 12, "episodes": 6, "rewards": 10, "credits": 10, "metrics": 2}
    assert {name: len(rows) for name, rows in tables.items()} == counts
    row = next(r for r in tables["transitions"] if (r["rollout"], r["turn"]) == ("s1-g0-m1", 0))
    assert (row["run"], row["step"], row["agent"], row["split"], row["mode"]) == ("calc", 1, "solver", "train", "train")
    assert json.loads(row["messages"]) == [{"role": "user", "content": "6 * 7"}]
    assert (row["prompt_ids"], row["response_ids"], row["logprobs"]) == ([1, 2, 3], [7, 8], [-0.5, -0.5])
    assert (row["reward"], row["terminal_reward"], row["credit"], row["weight"]) == (-0.25, 0.0, -0.25, 1.0)
    assert [each["status"] for each in json.loads(row["tool_results"])] == ["error"]
    assert {(r["kind"], r["key"], r["value"]) for r in tables["metrics"]} == {("train", "reward/mean", 0.5)}


def test_pandas_and_load_dataset_open_what_is_theirs(trained: Any) -> None:
    exported(trained, to="parquet", out="p")
    exported(trained, to="hf", out="h")

    frame = pandas.read_parquet(trained.folder / "p" / "transitions.parquet")
    loaded = datasets.load_dataset(str(trained.folder / "h"), "transitions", cache_dir=str(trained.folder / "cache"))
    parquet = datasets.load_dataset(
        "parquet",
        data_files=str(trained.folder / "p" / "transitions.parquet"),
        cache_dir=str(trained.folder / "cache"),
    )

    assert list(frame["rollout"]) == loaded["train"]["rollout"][:] == parquet["train"]["rollout"][:]
    assert frame["logprobs"][0].dtype == np.float32
    assert frame["prompt_ids"][0].tolist() == loaded["train"][0]["prompt_ids"]


def test_a_call_with_an_undelivered_reply_is_no_transition_to_train_on(trained: Any) -> None:
    call = next(each for each in trained.trained(2, "m0") if isinstance(each, Call))
    trained.put(replace(call, undelivered=True))

    for to in ("parquet", "hf", "jsonl"):
        exported(trained, to=to, out=to)

    tables = [read_parquet(trained.folder / "parquet"), read_datasets(trained.folder / "hf")]
    rows = [*(table["transitions"] for table in tables), lines(trained.folder / "jsonl" / "transitions.jsonl")]
    assert [(len(each), call.id in {row["call"] for row in each}) for each in rows] == [(11, False)] * 3
    episodes = list(agl_core.load_episodes(trained.folder / "jsonl" / "episodes.jsonl"))
    assert sum(len(each.transitions) for each in episodes) == 11
    assert [t.key.call for each in episodes for t in each.undelivered] == [call.id]


def test_csv_has_lists_as_json(trained: Any) -> None:
    exported(trained, to="csv")

    with (trained.folder / "out" / "transitions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert json.loads(rows[0]["prompt_ids"]) == [1, 2, 3]
    assert rows[0]["parse_error"] == ""
    assert len(pandas.read_csv(trained.folder / "out" / "episodes.csv")) == 6


def test_jsonl_episodes_are_those_that_agl_loads(trained: Any) -> None:
    exported(trained)

    [episode] = [e for e in agl_core.load_episodes(trained.folder / "out" / "episodes.jsonl") if e.rollout == "e2"]
    assert (episode.task.split, episode.mode, len(episode.transitions)) == ("eval", Mode.EVAL_GREEDY, 2)
    about = json.loads((trained.folder / "out" / "export.json").read_text())
    assert about["reward_weights"] == {"right": 1.0, "tools": 1.0}
    assert about["rows"]["episodes"] == 6


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--step", "1"], ["s1-g0-m0", "s1-g0-m1", "s1-g0-m2"]),
        (["--step", "2-9", "--mode", "train"], ["s2-g0-m0", "s2-g0-m1"]),
        (["--split", "eval"], ["e2"]),
        (["--min-reward", "0.5"], ["s1-g0-m0", "s1-g0-m2", "s2-g0-m0"]),
        (["--max-reward", "0.5"], ["s1-g0-m1", "s2-g0-m1"]),
        (["--agent", "solver", "--step", "1", "--max-reward", "0"], ["s1-g0-m1"]),
    ],
)
def test_filters(trained: Any, filters: list[str], expected: list[str]) -> None:
    exported(trained, *filters)

    assert [line["rollout"] for line in lines(trained.folder / "out" / "episodes.jsonl")] == expected


def test_the_filter_by_verdict_is_that_of_agl_rollouts(trained: Any) -> None:
    found = []
    for verdict in Verdict:
        shown = json.loads(trained.agl("rollouts", "calc", "--verdict", verdict, "--json").output)
        exported(trained, "--verdict", verdict, out=verdict)
        names = [line["rollout"] for line in lines(trained.folder / verdict / "episodes.jsonl")]
        assert sorted(names) == sorted(each["id"] for each in shown)
        found.append(set(names))
    assert sum(map(bool, found)) > 1, "they differ"


def test_only_some_tables(trained: Any) -> None:
    said = exported(trained, "--table", "rewards", "--table", "credits").stdout

    assert {file.name for file in (trained.folder / "out").iterdir()} == {
        "rewards.jsonl", "credits.jsonl", "export.json",
    }  # fmt: skip
    assert "10 rewards, 10 credits" in said
    assert "left out: 1 rollouts that are not done" in said


def test_of_one_agent_only_its_own_transitions_are_written(trained: Any) -> None:
    [first, second] = [e for e in trained.trained(3, "m0") if isinstance(e, Call)]
    others = [each for each in trained.trained(3, "m0") if not isinstance(each, Call)]
    trained.put(*others, replace(first, agent="planner"), second)

    exported(trained, "--agent", "planner")

    [row] = lines(trained.folder / "out" / "transitions.jsonl")
    assert (row["rollout"], row["turn"], row["agent"]) == ("s3-g0-m0", 0, "planner")
    assert [each["call"] for each in lines(trained.folder / "out" / "credits.jsonl")] == ["s3-g0-m0-c0"]


def test_sft_has_a_prompt_and_a_completion_for_each_call(trained: Any) -> None:
    exported(trained, "--min-reward", "1", "--step", "1", to="sft", out="sft.jsonl")

    rows = lines(trained.folder / "sft.jsonl")
    assert len(rows) == 4
    assert rows[0]["prompt"] == [{"role": "user", "content": "6 * 7"}]
    [asked] = rows[0]["completion"][0]["tool_calls"]
    assert asked["function"] == {"name": "look", "arguments": {}}
    assert rows[1]["completion"] == [{"role": "assistant", "content": "42"}]
    assert rows[0].keys() == {"prompt", "completion", "tools"}


@pytest.mark.parametrize("to", ["sft", "preferences"])
def test_what_is_trained_on_elsewhere_is_not_what_this_run_is_evaluated_on(trained: Any, to: str) -> None:
    def count(name: str, *arguments: str) -> int:
        exported(trained, *arguments, to=to, out=name)
        return len(lines(trained.folder / name))

    if to == "sft":
        assert "left out: 1 rollouts that are evaluations" in exported(trained, to=to, out="said").stdout
        assert count("all", "--split", "eval") == count("mode", "--mode", "eval-greedy") == 2
    rows = count("of training")
    assert rows == count("train", "--mode", "train") > 0


def test_of_what_is_no_training_run_everything_is_exported(run: Any) -> None:
    caught = run.folder / "runs" / "caught"
    caught.mkdir()
    (caught / "config.toml").write_text("[capture]\n")
    rollout, *others = run.trained(1, "m0")
    run.put(replace(rollout, mode=Mode.EVAL_SAMPLED), *others, to=caught / "store.sqlite")

    run.agl("export", "caught", "--to", "sft", "--out", "sft.jsonl")

    assert len(lines(run.folder / "sft.jsonl")) == 2


def test_tools_go_with_the_conversations(trained: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    records = trained.trained(3, "m0")
    offered = [
        replace(each, request={**each.request, "tools": tools}) if isinstance(each, Call) else each for each in records
    ]
    trained.put(*offered)

    exported(trained, "--step", "3", to="sft", out="sft.jsonl")

    assert [json.loads(row["tools"]) for row in lines(trained.folder / "sft.jsonl")] == [tools, tools]


def test_preferences_are_of_replies_to_one_prompt_in_one_group(trained: Any) -> None:
    exported(trained, "--mode", "train", to="preferences", out="pairs.jsonl")

    pair = {
        "prompt": [{"role": "user", "content": "6 * 7"}],
        "chosen": [{"role": "assistant", "content": "42"}],
        "rejected": [{"role": "assistant", "content": "7"}],
        "tools": None,
    }
    assert lines(trained.folder / "pairs.jsonl") == [pair, pair]


def test_superseded_rollouts_stay(trained: Any) -> None:
    trained.put(agl_core.types.Run("calc", 1, 1.0, {}, resumed_step=1))

    said = exported(trained).stdout

    assert "left out: 2 rollouts that were superseded" in said
    assert {line["rollout"] for line in lines(trained.folder / "out" / "episodes.jsonl")} == {
        "s1-g0-m0", "s1-g0-m1", "s1-g0-m2", "e2",
    }  # fmt: skip


def test_pruned_calls_are_named_and_are_no_conversations(trained: Any) -> None:
    trained.agl("runs", "prune", "calc", "--steps", "1")

    assert "the calls of 3 rollouts were pruned" in exported(trained).stdout
    rows = lines(trained.folder / "out" / "transitions.jsonl")
    assert [row["pruned"] for row in rows if row["step"] == 1] == [True] * 6
    exported(trained, to="sft", out="sft.jsonl")
    assert len(lines(trained.folder / "sft.jsonl")) == 4


class TestRefused:
    """Errors that say what to do, and leave nothing behind."""

    def refused(self, run: Any, *arguments: str, to: str = "parquet", out: str = "out") -> str:
        before = sorted(path.name for path in run.folder.iterdir())
        found = exported(run, *arguments, to=to, out=out)
        assert sorted(path.name for path in run.folder.iterdir()) == before
        assert isinstance(found.exception, ConfigError | StoreError | ModuleNotFoundError), found
        return str(found.exception)

    @pytest.mark.parametrize("to", [*FORMATS, "sft", "preferences"])
    def test_nothing_that_the_filters_ask_for(self, trained: Any, to: str) -> None:
        said = self.refused(trained, "--split", "nowhere", to=to)
        assert "6 not what the filters ask for" in said

    def test_a_run_without_rollouts(self, run: Any) -> None:
        (run.folder / "runs" / "empty").mkdir()
        (run.folder / "runs" / "empty" / "config.toml").write_text("[capture]\n")
        run.put(to=run.folder / "runs" / "empty" / "store.sqlite")
        found = run.agl("export", "empty", "--to", "csv", "--out", "out")
        assert "has no rollout to export" in str(found.exception)

    def test_a_place_that_is_taken(self, trained: Any) -> None:
        (trained.folder / "out").write_text("mine")
        assert "out exists already" in self.refused(trained)
        assert (trained.folder / "out").read_text() == "mine"

    def test_a_folder_that_is_not_there(self, trained: Any) -> None:
        assert "no folder nowhere" in self.refused(trained, out="nowhere/out")

    def test_a_run_that_is_written(self, trained: Any) -> None:
        with writing(trained.store):
            assert "is still written" in self.refused(trained)
            assert "--step 1-2" in self.refused(trained, "--step", "1-3")
            assert exported(trained, "--step", "1-2").exit_code == 0

    def test_a_store_of_another_version(self, trained: Any) -> None:
        connection = sqlite3.connect(trained.store)
        connection.execute("PRAGMA user_version = 999")
        connection.close()
        assert "start a new run" in self.refused(trained)

    def test_a_table_or_a_step_that_there_is_not(self, trained: Any) -> None:
        assert "Did you mean 'rewards'" in self.refused(trained, "--table", "reward")
        assert "--step 3-7" in self.refused(trained, "--step", "7-3")

    @pytest.mark.parametrize(("to", "module"), [("parquet", "pyarrow"), ("hf", "datasets")])
    def test_without_the_library(self, trained: Any, monkeypatch: pytest.MonkeyPatch, to: str, module: str) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
        assert module in self.refused(trained, to=to)

    def test_a_disk_that_is_full(self, trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise ConfigError("full")

        monkeypatch.setattr("agl_core.analysis.export.files.ParquetFile.write", fail)
        assert self.refused(trained) == "full"


def test_a_page_after_another(run: Any) -> None:
    """More rollouts than are read at a time."""
    made: list[Any] = []
    for step in range(2, 42):
        made += [record for member in ("m0", "m1", "m2") for record in run.trained(step, member)]
    run.put(*made)

    exported(run)

    assert len(lines(run.folder / "out" / "episodes.jsonl")) == sum(isinstance(each, Rollout) for each in made) + 3
