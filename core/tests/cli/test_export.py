"""`agl export`: what leaves a run, in each format, read by the tools that it is for."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pandas
import pyarrow.parquet
import pytest

import agl_core
from agl_core.errors import StoreError
from agl_core.reading.export import Format
from agl_core.types import Call, Ending, Mode, Rollout, RolloutState, Run, Task


@pytest.fixture
def trained(run: Any) -> Any:
    """Step 1 has three rollouts, step 2 has two and an evaluation; one rollout is not done."""
    evaluated = run.planned(2, "m7", id="e2", mode=Mode.EVAL_GREEDY, task=Task("t2", "6 * 7", split="eval"))
    done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
    run.put(*run.trained(2, "m0"), *run.trained(2, "m1"), run.planned(2, "m3"))
    run.put(replace(evaluated, **done), *(replace(e, rollout="e2") for e in run.trained(2, "m2")[1:4]))
    metrics = [{"step": step, "kind": "train", "restart": 0, "reward/mean": 0.5} for step in (1, 2)]
    (run.store.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return run


def exported(run: Any, *arguments: str, to: str = "episodes", out: str = "out") -> Any:
    return run.agl("export", "calc", "--to", to, "--out", out, *arguments)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def names(run: Any, out: str = "out") -> list[str]:
    return [line["rollout"] for line in lines(run.folder / out)]


def test_parquet_has_what_was_recorded_for_pandas_and_datasets(trained: Any) -> None:
    assert exported(trained, to="parquet").exit_code == 0

    out = trained.folder / "out"
    tables = {file.stem: pyarrow.parquet.read_table(file).to_pylist() for file in out.iterdir()}
    assert {name: len(rows) for name, rows in tables.items()} == {"transitions": 12, "episodes": 6}
    row = next(r for r in tables["transitions"] if (r["rollout"], r["turn"]) == ("s1-g0-m1", 0))
    assert (row["run"], row["step"], row["agent"], row["split"], row["mode"]) == ("calc", 1, "solver", "train", "train")
    assert json.loads(row["messages"]) == [{"role": "user", "content": "6 * 7"}]
    assert (row["prompt_ids"], row["response_ids"], row["logprobs"]) == ([1, 2, 3], [7, 8], [-0.5, -0.5])
    assert (row["reward"], row["terminal_reward"], row["credit"], row["weight"]) == (-0.25, 0.0, -0.25, 1.0)
    assert [result["status"] for result in json.loads(row["tool_results"])] == ["error"]
    episode = next(r for r in tables["episodes"] if r["rollout"] == "s1-g0-m1")
    assert [(reward["source"], reward["value"]) for reward in json.loads(episode["rewards"])] == [("right", 0.0)]
    frame = pandas.read_parquet(out / "transitions.parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(out / "transitions.parquet"), cache_dir=str(trained.folder / "cache")
    )
    assert list(frame["rollout"]) == loaded["train"]["rollout"][:]
    assert frame["logprobs"][0].dtype == "float32"


def test_episodes_are_those_that_agl_loads_and_no_undelivered_reply_is_a_transition(trained: Any) -> None:
    call = next(record for record in trained.trained(2, "m0") if isinstance(record, Call))
    trained.put(replace(call, undelivered=True))

    exported(trained)

    episodes = {episode.rollout: episode for episode in agl_core.load_episodes(trained.folder / "out")}
    evaluated = episodes["e2"]
    assert (evaluated.task.split, evaluated.mode, len(evaluated.transitions)) == ("eval", Mode.EVAL_GREEDY, 2)
    assert [t.key.call for episode in episodes.values() for t in episode.undelivered] == [call.id]
    assert sum(len(episode.transitions) for episode in episodes.values()) == 11


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--step", "1"], ["s1-g0-m0", "s1-g0-m1", "s1-g0-m2"]),
        (["--step", "2", "--mode", "train"], ["s2-g0-m0", "s2-g0-m1"]),
        (["--split", "eval"], ["e2"]),
        (["--min-reward", "0.5"], ["s1-g0-m0", "s1-g0-m2", "s2-g0-m0"]),
        (["--agent", "solver", "--step", "1", "--max-reward", "0"], ["s1-g0-m1"]),
        (["--verdict", "unhealthy"], ["s1-g0-m1", "s1-g0-m2", "s2-g0-m1"]),
    ],
)
def test_filters(trained: Any, filters: list[str], expected: list[str]) -> None:
    exported(trained, *filters)

    assert names(trained) == expected


def test_of_one_agent_there_are_its_own_transitions_alone(trained: Any) -> None:
    [first, second] = [e for e in trained.trained(3, "m0") if isinstance(e, Call)]
    others = [record for record in trained.trained(3, "m0") if not isinstance(record, Call)]
    trained.put(*others, replace(first, agent="planner", prompt_ids=None), replace(second, agent="\ud800"))

    output = exported(trained, "--agent", "planner", to="parquet").stdout

    [row] = pyarrow.parquet.read_table(trained.folder / "out" / "transitions.parquet").to_pylist()
    assert (row["rollout"], row["turn"], row["agent"]) == ("s3-g0-m0", 0, "planner")
    assert "1 transitions, 1 episodes" in output
    assert "left out: 1 rollouts that are not done" in output
    exported(trained, "--step", "3", to="parquet", out="whole")
    agents = pandas.read_parquet(trained.folder / "whole" / "transitions.parquet")["agent"]
    assert list(agents) == ["planner", "?"], "what is no UTF-8 is replaced"


def test_sft_has_a_prompt_a_completion_and_tools_for_each_call(trained: Any) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    trained.put(
        *(
            replace(record, request={**record.request, "tools": tools}) if isinstance(record, Call) else record
            for record in trained.trained(3, "m0")
        )
    )

    exported(trained, "--min-reward", "1", "--step", "3", to="sft", out="sft.jsonl")

    first, second = lines(trained.folder / "sft.jsonl")
    assert first["prompt"] == [{"role": "user", "content": "6 * 7"}]
    assert first["completion"][0]["tool_calls"][0]["function"] == {"name": "look", "arguments": {}}
    assert second["completion"] == [{"role": "assistant", "content": "42"}]
    assert json.loads(second["tools"]) == tools


def test_preferences_are_of_replies_to_one_prompt_in_one_group(trained: Any) -> None:
    exported(trained, to="preferences", out="pairs.jsonl")

    pair = {
        "prompt": [{"role": "user", "content": "6 * 7"}],
        "chosen": [{"role": "assistant", "content": "42"}],
        "rejected": [{"role": "assistant", "content": "7"}],
        "tools": None,
    }
    assert lines(trained.folder / "pairs.jsonl") == [pair, pair]


def test_what_is_trained_on_elsewhere_is_not_what_this_run_is_evaluated_on(trained: Any) -> None:
    def count(*arguments: str) -> int:
        name = f"{'-'.join(arguments)}.jsonl"
        exported(trained, *arguments, to="sft", out=name)
        return len(lines(trained.folder / name))

    assert "left out: 1 rollouts that are evaluations" in exported(trained, to="sft").stdout
    assert count("--split", "eval") == count("--mode", "eval-greedy") == 2
    assert count() == count("--mode", "train") == 10
    caught = trained.folder / "runs" / "caught"
    caught.mkdir()
    (caught / "config.toml").write_text("[capture]\n")
    rollout, *others = trained.trained(1, "m0")
    trained.put(replace(rollout, mode=Mode.EVAL_SAMPLED), *others, to=caught / "store.sqlite")
    trained.agl("export", "caught", "--to", "sft", "--out", "caught.jsonl")
    assert len(lines(trained.folder / "caught.jsonl")) == 2, "of what is no training run, everything"


def test_superseded_rollouts_stay_and_pruned_calls_are_no_conversations(trained: Any) -> None:
    trained.agl("runs", "prune", "calc", "--steps", "1")
    trained.put(Run("calc", 1, 1.0, {}, resumed_step=1))

    output = exported(trained, to="parquet").stdout

    assert "left out: 2 rollouts that are superseded" in output
    assert "the calls of 3 rollouts were pruned" in output
    frame = pandas.read_parquet(trained.folder / "out" / "transitions.parquet")
    assert frame[frame["step"] == 1]["pruned"].all()
    assert set(frame["rollout"]) == {"s1-g0-m0", "s1-g0-m1", "s1-g0-m2", "e2"}
    assert "has nothing to export" in str(exported(trained, to="sft", out="sft.jsonl").exception)


def test_a_page_after_another_and_a_group_after_another(run: Any) -> None:
    """More rollouts than are read, and more rows than are written, at a time."""
    records: list[Any] = []
    for step in range(2, 102):
        records += [record for member in ("m0", "m1", "m2") for record in run.trained(step, member)]
    run.put(*records)

    exported(run, to="parquet")

    rollouts = sum(isinstance(record, Rollout) for record in records)
    assert len(pandas.read_parquet(run.folder / "out" / "episodes.parquet")) == rollouts + 3
    assert len(pandas.read_parquet(run.folder / "out" / "transitions.parquet")) == 2 * (rollouts + 3)


def test_what_cannot_be_exported_leaves_nothing(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: str, to: str = "parquet", out: str = "out") -> Any:
        before = sorted(path.name for path in trained.folder.iterdir())
        error = exported(trained, *arguments, to=to, out=out).exception
        assert sorted(path.name for path in trained.folder.iterdir()) == before
        return error

    (trained.folder / "taken").write_text("mine")
    assert "taken exists already" in str(refused(out="taken"))
    assert (trained.folder / "taken").read_text() == "mine"
    assert "no folder nowhere" in str(refused(out="nowhere/out"))
    for to in Format:
        assert "6 not what the filters ask for" in str(refused("--split", "nowhere", to=to))
    monkeypatch.setattr("agl_core.reading.export._Parquet.write", lambda *_: 1 / 0)
    assert isinstance(refused(), ZeroDivisionError)
    connection = sqlite3.connect(trained.store)
    connection.execute("PRAGMA user_version = 999")
    connection.close()
    assert isinstance(refused(), StoreError)
