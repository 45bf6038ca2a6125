"""Effects of the settings of reward rules, credit rules and task sources."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from typing import Any
from unittest import mock

import datasets
import httpx
import numpy as np
import pyarrow.csv
import pyarrow.parquet

from agl_core.errors import ConfigError
from agl_core.learning import score
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.training.rollouts import scoring_rules
from agl_core.training.server import make_run_dir
from agl_core.types import Ending, Episode, Mode, Reward, RolloutState, Run, Task, ToolResult, ToolStatus
from agl_rewards import JudgeError

from .run_effects import train_tasks
from .settings_bench import Bench, Effect, Given, Ran, ran

METADATA = {"result": "Ann 5.001", "also": "nothing"}
COUNTED = 300_000
SLOW_QUERY = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {COUNTED}) SELECT max(i) FROM n"


def episode(result: Any = "ann 5", terminal: float = 1.0, rollout: str = "r", metadata: Given = METADATA) -> Episode:
    """Three calls; the tools of the first two answered, once well. Rollouts share the first prompt."""
    transitions = [
        make.transition(
            turn,
            *[make.tool_result(f"o{turn}", tool="search", rollout=rollout, result=rollout, status=status)][: 2 - turn],
            rollout=rollout,
            prompt_ids=np.array([1, turn if rollout == "r" else 2 * turn], np.int32),
            rewards=(Reward(rollout, 0, "step", 0.5, "test", f"{rollout}-c{turn}"),),
        )
        for turn, status in enumerate((ToolStatus.ERROR, ToolStatus.OK, ToolStatus.OK))
    ]
    task = Task("t", "a question", metadata=metadata)
    return make.episode(*transitions, rollout=rollout, task=task, result=result, terminal=terminal)


def reward(name: str, result: Any = "ann 5") -> Callable[[Bench, Given], Awaitable[Any]]:
    """Observe what a reward rule says of an episode with this result; rewards of single calls by name and value."""

    async def observe(bench: Bench, given: Given) -> Any:
        value = bench.load(given).rewards[name].build()(episode(result))
        value = await value if inspect.isawaitable(value) else value
        return [(reward.name, reward.value) for reward in value] if isinstance(value, list) else value

    return observe


async def limited(bench: Bench, given: Given) -> Any:
    """Whether an answer on which the search takes about a second has a reward."""
    rules = [rule for rule in scoring_rules(bench.load(given)) if rule.name == "regex_format"]
    scored, _ = await score(episode("a" * 21), rules, dict.fromkeys(Ending, "score"))
    return scored.dropped


def credit(bench: Bench, given: Given) -> list[list[float]]:
    """The values of a group."""
    rule = bench.load(given).policies["default"].credit.build()
    values: list[list[float]] = rule([episode(), episode(terminal=0.0, rollout="s")])
    return values


async def queried(bench: Bench, given: Given) -> float | str:
    """What the agent's query is worth, on databases of one and of three pets, or that the rule refuses the task."""
    for pets in (1, 3):
        with closing(sqlite3.connect(bench.folder / f"pets{pets}.sqlite")) as connection, connection:
            connection.execute("DROP TABLE IF EXISTS pet")
            connection.execute("CREATE TABLE pet (name TEXT)")
            connection.executemany("INSERT INTO pet VALUES (?)", [("Ada",), ("Bo",), ("Cy",)][:pets])
    loaded = bench.load(given)
    expected = {"result": "SELECT name FROM pet", "also": "SELECT 'Ada'", "last": f"SELECT {COUNTED}"}
    query = SLOW_QUERY if loaded.config.rewards["sql_match"].settings["field"] == "last" else expected["result"]
    metadata = {**expected, "folder": str(bench.folder)}
    try:
        return float(await loaded.rewards["sql_match"].build()(episode(query, metadata=metadata)))
    except ConfigError as error:
        return type(error).__name__


async def judged(bench: Bench, given: Given) -> Any:
    """Two answers judged at once, and one again by a second judge: the scores, what was asked, and whether at once."""
    settings = {"base_url": "http://judge/v1", "model": "m", "rubric": "Polite."}
    settings |= {key.removeprefix("rewards.judge."): value for key, value in given.items()}
    if "cache" in settings:
        settings["cache"] = str(bench.folder / settings["cache"])
    asked: list[Any] = []
    scores: list[Any] = []

    async def answer(client: httpx.AsyncClient, url: str, json: Any) -> httpx.Response:
        asked.append((url, client.headers.get("Authorization"), str(json)))
        before = len(asked)
        await asyncio.sleep(0.05)
        asked.append(len(asked) > before)
        reply = {"choices": [{"message": {"content": '{"score": 7}'}}]}
        return httpx.Response(200, json=reply, request=httpx.Request("POST", url))

    async def ask(judge: Any, result: str) -> None:
        try:
            scores.append(await judge(episode(result)))
        except JudgeError as error:
            scores.append(type(error).__name__)

    loaded = bench.load({"rewards": {"judge": settings}})
    with mock.patch.dict("os.environ", {"JUDGE_KEY": "secret"}), mock.patch("httpx.AsyncClient.post", answer):
        judge = loaded.rewards["judge"].build()
        await asyncio.gather(ask(judge, "yes"), ask(judge, "no"))
        await ask(loaded.rewards["judge"].build(), "yes")
    return scores, asked


def mean_rewards(run: Ran) -> list[float]:
    rewards: list[float] = run.summary.state.train_rewards
    return rewards


def values(run: Ran) -> list[list[float]]:
    return [update["values"] for update in run.updates]


def lenient(tool_result: ToolResult) -> float:
    """A rule of the user's for one tool."""
    return 0.125


def table_tasks(bench: Bench, given: Given) -> list[str]:
    """The ids of the tasks of a table, which is made in each format."""
    for name in ("table", "more"):
        table = pyarrow.Table.from_pylist([{"input": name, "id": f"{name}-{n}", "number": f"n{n}"} for n in range(3)])
        pyarrow.parquet.write_table(table, bench.folder / f"{name}.parquet")
        pyarrow.csv.write_csv(table, bench.folder / f"{name}.csv")
        configs = "configs:\n"
        for n, subset in enumerate(("first", "second")):
            folder = bench.folder / f"{name}-dataset" / subset
            folder.mkdir(parents=True, exist_ok=True)
            configs += f"- config_name: {subset}\n  data_files:\n"
            for rows, split in enumerate(("train", "eval"), 1 + n):
                pyarrow.parquet.write_table(table[:rows], folder / f"{split}-0.parquet")
                configs += f"  - split: {split}\n    path: {subset}/{split}-0.parquet\n"
        (bench.folder / f"{name}-dataset" / "README.md").write_text(f"---\n{configs}---\n")
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", bench.folder / "cache"):
        return train_tasks(bench, given)


async def recorded_tasks(bench: Bench, given: Given) -> list[list[str]]:
    """The tasks of a recorded run, and how many of its calls are trained on without log-probabilities."""
    for task in ("first", "second"):
        make_run_dir(bench.folder / task, lambda folder: None)
        (bench.folder / task / "config.toml").write_text("config_version = 1\n[capture]\n")
        async with SqliteStore(bench.folder / task / "store.sqlite") as store:
            await store.put(Run(task, 0, 0.0, {}))
            for split in ("train", "other"):
                name = f"{task}-{split}"
                done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED, "mode": Mode.USE}
                rollout = make.rollout(name, group=name, task=Task(name, name, split, {"result": "56"}), **done)
                call = make.call(0, make.choice(tokens=3), rollout=name, prompt_ids=np.arange(3, dtype=np.int32))
                await store.put(rollout, make.attempt(name), call)
    run = await bench.run({"train.group_size": 1, "algorithm.name": "reinforce++", **given})
    counted = [str(line["transitions/without_logprobs"]) for line in run.metrics if line["kind"] == "train"]
    return [train_tasks(bench, given), counted]


def _rule(name: str, **settings: Any) -> Given:
    """The only reward rule is this one."""
    return {"rewards": {name: settings}}


def _sql(pets: int = 3, **settings: Any) -> Given:
    return _rule("sql_match", database=f"{{folder}}/pets{pets}.sqlite", **settings)


def _tasks(source: str, **settings: Any) -> Given:
    return {"tasks.train": {"source": source, **settings}}


RULES: Mapping[str, tuple[Any, Given, Given]] = {
    "exact_match.field": (reward("exact_match", "nothing"), {}, {"field": "also"}),
    "numeric_match.field": (ran(mean_rewards), {}, {"field": "also"}),
    "numeric_match.tolerance": (reward("numeric_match"), {}, {"tolerance": 0.1}),
    "regex_format.pattern": (reward("regex_format"), {"pattern": "5$"}, {"pattern": "^5"}),
    "token_f1.field": (reward("token_f1", "nothing"), {}, {"field": "also"}),
    "tool_results.default_weight": (reward("tool_results"), {}, {"default_weight": 0.3}),
    "tool_results.weights": (reward("tool_results"), {}, {"weights": {"search": 0.5}}),
    "tool_results.rules": (reward("tool_results"), {}, {"rules": {"search": f"{__name__}:lenient"}}),
}
"""For a rule's setting: how it is observed, and the rule's settings before and after."""
JUDGE = {
    "base_url": "http://another/v1", "model": "another", "rubric": "Short.", "field": "result", "max_calls": 1,
    "api_key_env": "JUDGE_KEY", "cache": "judgements",
}  # fmt: skip
GYM = {"dataset": "basic_arithmetic", "split": "eval", "settings": {"max_terms": 2}}
RECORDED = {"run": "second", "split": "other", "without_logprobs": True}
PLACES: Mapping[str, Given] = {
    "csv": {"path": "table.csv"},
    "parquet": {"path": "table.parquet"},
    "hf": {"dataset": "table-dataset", "subset": "first"},
}
TABLES = {
    "csv": {"path": "more.csv", "columns": {"id": "number"}},
    "parquet": {"path": "more.parquet", "columns": {"id": "number"}},
    "hf": {"dataset": "more-dataset", "columns": {"id": "number"}, "split": "eval", "subset": "second"},
}
"""The changes, by source and setting."""

EFFECTS: Mapping[str, Effect] = {
    "rewards.NAME.rule": Effect(ran(mean_rewards), _rule("it", rule="token_f1"), _rule("it", rule="exact_match")),
    "rewards.NAME.weight": Effect(ran(mean_rewards), {"rewards.exact_match.weight": 0.5}),
    "rewards.NAME.time_limit": Effect(
        limited, {"rewards.regex_format.time_limit": 1e-6}, _rule("regex_format", pattern="(a|a)*b", time_limit=600)
    ),
    **{
        f"reward.{name}": Effect(observe, _rule(name.split(".")[0], **after), _rule(name.split(".")[0], **before))
        for name, (observe, before, after) in RULES.items()
    },
    "reward.sql_match.field": Effect(queried, _sql(field="also"), _sql()),
    "reward.sql_match.database": Effect(queried, _sql(1, field="also"), _sql(field="also")),
    "reward.sql_match.timeout": Effect(queried, _sql(field="last", timeout=0.002), _sql(field="last", timeout=60.0)),
    **{f"reward.judge.{name}": Effect(judged, {f"rewards.judge.{name}": value}) for name, value in JUDGE.items()},
    "credit.name": Effect(ran(values), {"credit.name": "discounted", "credit.discounted.gamma": 0.0}),
    "policies.NAME.credit.name": Effect(
        ran(values), {"policies.default.credit": {"name": "discounted", "discounted": {"gamma": 0.0}}}
    ),
    "credit.discounted.gamma": Effect(credit, {"credit.discounted.gamma": 0.5}, {"credit.name": "discounted"}),
    "credit.stepwise.gamma": Effect(credit, {"credit.stepwise.gamma": 0.5}, {"credit.name": "stepwise"}),
    "credit.air.reward": Effect(credit, {"credit.air.reward": "return"}, {"credit.name": "air"}),
    "credit.air.alpha": Effect(credit, {"credit.air.alpha": 0.7}, {"credit.name": "air"}),
    "task_source.jsonl.path": Effect(train_tasks, {"tasks.train.path": "other.jsonl"}),
    "task_source.jsonl.columns": Effect(
        train_tasks, {"tasks.train.columns": {"id": "name"}}, _tasks("jsonl", path="renamed.jsonl")
    ),
    **{
        f"task_source.{source}.{name}": Effect(
            table_tasks, {f"tasks.train.{name}": value}, _tasks(source, **PLACES[source])
        )
        for source, changes in TABLES.items()
        for name, value in changes.items()
    },
    **{
        f"task_source.reasoning_gym.{name}": Effect(
            train_tasks, {f"tasks.train.{name}": value}, _tasks("reasoning_gym", dataset="chain_sum")
        )
        for name, value in GYM.items()
    },
    **{
        f"task_source.recorded.{name}": Effect(
            recorded_tasks, {f"tasks.train.{name}": value}, _tasks("recorded", run="first")
        )
        for name, value in RECORDED.items()
    },
}
