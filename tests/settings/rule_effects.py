"""Effects of the settings of reward rules, credit rules and task sources."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import pyarrow.csv
import pyarrow.parquet
from aiohttp import web

from agl_core.errors import ConfigError
from agl_core.learning import score
from agl_core.store.sqlite import SqliteStore
from agl_core.testing import episodes as make
from agl_core.testing.upstream import served
from agl_core.training.rollouts.episodes import scoring_rules
from agl_core.training.run_folder import make_run_dir
from agl_core.types import (
    Ending,
    Episode,
    FinishReason,
    Mode,
    Reward,
    RolloutState,
    Run,
    Task,
    ToolResult,
    ToolStatus,
    Transition,
    TransitionKey,
)
from agl_rewards import JudgeError

from .run_effects import train_tasks
from .settings_bench import Bench, Effect, Given, Ran, ran

METADATA = {"result": "Ann 5.001", "also": "nothing"}
COUNTED = 300_000
SLOW_QUERY = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT {COUNTED}) SELECT max(i) FROM n"


def episode(
    result: Any = "ann 5", terminal: float | None = 1.0, rollout: str = "r", metadata: Given = METADATA
) -> Episode:
    """Three calls; the tools of the first two answered, once well. Rollouts share the first prompt."""

    def tool_result(turn: int) -> ToolResult:
        status = ToolStatus.OK if turn else ToolStatus.ERROR
        return ToolResult(f"o{turn}", rollout, 0, "search", status, result=rollout)

    transitions = tuple(
        Transition(
            key=TransitionKey(rollout, 0, f"c{turn}", 0),
            agent=None,
            turn=turn,
            agent_turn=turn,
            policy="default",
            version=0,
            messages=(),
            response={},
            finish_reason=FinishReason.STOP,
            temperature=1.0,
            prompt_ids=np.array([1, turn if rollout == "r" else 2 * turn], np.int32),
            tool_results=(tool_result(turn),) if turn < 2 else (),
            rewards=(Reward(rollout, 0, "step", 0.5, "test", f"c{turn}"),),
        )
        for turn in range(3)
    )
    task = Task("t", "a question", metadata=metadata)
    return Episode(rollout, 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, transitions, result=result, terminal=terminal)


async def value_of(rule: Callable[[Episode], Any], judged: Episode) -> Any:
    """What a rule says of an episode; rewards of single calls by name and value."""
    found = rule(judged)
    found = await found if inspect.isawaitable(found) else found
    return [(each.name, each.value) for each in found] if isinstance(found, list) else found


def reward(name: str, result: Any = "ann 5") -> Callable[[Bench, Given], Awaitable[Any]]:
    """Observe what a reward rule says of an episode with this result."""

    async def observe(bench: Bench, given: Given) -> Any:
        return await value_of(bench.load(given).rewards[name].build(), episode(result))

    return observe


async def limited(bench: Bench, given: Given) -> Any:
    """Whether an answer on which the search takes about a second has a reward."""
    rules = [each for each in scoring_rules(bench.load(given)) if each.name == "regex_format"]
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
        with closing(sqlite3.connect(bench.folder / f"pets{pets}.sqlite")) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS pet (name TEXT)")
            connection.execute("DELETE FROM pet")
            connection.executemany("INSERT INTO pet VALUES (?)", [("Ada",), ("Bo",), ("Cy",)][:pets])
            connection.commit()
    loaded = bench.load(given)
    expected = {"result": "SELECT name FROM pet", "also": "SELECT 'Ada'", "last": f"SELECT {COUNTED}"}
    found = SLOW_QUERY if loaded.config.rewards["sql_match"].settings["field"] == "last" else expected["result"]
    metadata = {**expected, "folder": str(bench.folder)}
    try:
        return float(await value_of(loaded.rewards["sql_match"].build(), episode(found, metadata=metadata)))
    except ConfigError as error:
        return type(error).__name__


@asynccontextmanager
async def endpoint(delay: float) -> AsyncIterator[tuple[str, list[tuple[str, str | None, str]]]]:
    """A judging model that answers after a while: its URL, and what it was asked (path, key, body)."""
    asked: list[tuple[str, str | None, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path, request.headers.get("Authorization"), await request.text()))
        await asyncio.sleep(delay)
        return web.json_response({"choices": [{"message": {"content": '{"score": 7}'}}]})

    async with answering(answer) as url:
        yield url, asked


def answering(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AbstractAsyncContextManager[str]:
    """A server on this machine that answers every request so: its URL."""
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    return served(app)


async def judged(bench: Bench, given: Given) -> Any:
    """Two answers judged, and one again by a second judge with the same settings: the scores, and what was asked."""
    settings = {"base_url": "/v1", "model": "m", "rubric": "Polite."}
    settings |= {key.removeprefix("rewards.judge."): value for key, value in given.items()}
    scores: list[Any] = []
    async with endpoint(delay=0.3 if "timeout" in settings else 0.0) as (url, asked):
        settings["base_url"] = f"{url}{settings['base_url']}"
        if "cache" in settings:
            settings["cache"] = str(bench.folder / settings["cache"])
        loaded = bench.load({"rewards": {"judge": settings}})
        with mock.patch.dict("os.environ", {"JUDGE_KEY": "secret"}):
            for results in (("yes", "no"), ("yes",)):
                judge = loaded.rewards["judge"].build()
                for result in results:
                    try:
                        scores.append(await value_of(judge, episode(result)))
                    except JudgeError as error:
                        scores.append(type(error).__name__)
    return scores, asked


async def judged_at_once(bench: Bench, given: Given) -> list[bool]:
    """Two answers judged at once: whether the judge asks for the second while the first has no reply."""
    came, both = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal came
        came += 1
        if came == 2:
            both.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(both.wait(), 1.0)
        found.append(came == 2)
        return web.json_response({"choices": [{"message": {"content": '{"score": 7}'}}]})

    found: list[bool] = []
    async with answering(answer) as url:
        settings = {key.removeprefix("rewards.judge."): value for key, value in given.items()}
        settings |= {"base_url": url, "model": "m", "rubric": "Polite."}
        judge = bench.load({"rewards": {"judge": settings}}).rewards["judge"].build()
        await asyncio.gather(*(value_of(judge, episode(result)) for result in ("yes", "no")))
    return found


def _table(name: str, **settings: Any) -> Given:
    """The only reward rule is this one."""
    return {"rewards": {name: settings}}


def mean_rewards(run: Ran) -> list[float]:
    found: list[float] = run.summary.state.train_rewards
    return found


def values(run: Ran) -> list[list[float]]:
    return [update["values"] for update in run.updates]


def lenient(tool_result: ToolResult) -> float:
    """A rule of the user's for one tool."""
    return 0.125


def table_tasks(bench: Bench, given: Given) -> list[Any]:
    """The tasks of a table, which is made in each format; there are two of them."""
    for name, answers in {"table": "56", "more": "78"}.items():
        rows = [
            {"input": f"{name} {n}", "id": f"{name}-{n}", "number": f"n{n}", "answer": answer}
            for n, answer in enumerate(answers)
        ]
        table = pyarrow.Table.from_pylist(rows)
        pyarrow.parquet.write_table(table, bench.folder / f"{name}.parquet")
        pyarrow.csv.write_csv(table, bench.folder / f"{name}.csv")
        for subset in ("first", "second"):
            folder = bench.folder / f"{name}-dataset" / subset
            folder.mkdir(parents=True, exist_ok=True)
            for split, part in {"train": table[:1], "eval": table[1:] if subset == "first" else table}.items():
                pyarrow.parquet.write_table(part, folder / f"{split}-0.parquet")
        configs = "".join(
            f"- config_name: {subset}\n  data_files:\n"
            + "".join(f"  - split: {split}\n    path: {subset}/{split}-0.parquet\n" for split in ("train", "eval"))
            for subset in ("first", "second")
        )
        (bench.folder / f"{name}-dataset" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    loaded = bench.load(given)
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", bench.folder / "cache"):
        source = loaded.tasks["train"].build(loaded.folder, 0)
    return [[task.id, task.input, task.metadata] for task in map(source.task, range(source.size))]


def _of_table(source: str, **settings: Any) -> Given:
    place = {"dataset": "table-dataset", "subset": "first"} if source == "hf" else {"path": f"table.{source}"}
    return {"tasks.train": {"source": source, **place, **settings}}


def gym_tasks(bench: Bench, given: Given) -> list[str]:
    """The inputs of tasks of reasoning-gym."""
    loaded = bench.load(given)
    source = loaded.tasks["train"].build(loaded.folder, 0)
    return [source.task(index).input for index in range(source.size)]


async def recorded_tasks(bench: Bench, given: Given) -> list[list[str]]:
    """The tasks of a recorded run, and how many of its calls are trained on without log-probabilities."""
    for name in ("first", "second"):
        await _record_use(bench.folder / name, name)
    ran = await bench.run({"train.group_size": 1, "algorithm.name": "reinforce++", **given})
    counted = [str(line["transitions/without_logprobs"]) for line in ran.metrics if line["kind"] == "train"]
    return [train_tasks(bench, given), counted]


async def _record_use(folder: Path, task: str) -> None:
    """Two sessions, of tasks of two splits: the log-probabilities of real use need not be the policy's own."""
    make_run_dir(folder, lambda folder: None)
    (folder / "config.toml").write_text("config_version = 1\n[capture]\n")
    async with SqliteStore(folder / "store.sqlite") as store:
        await store.put(Run(task, 0, 0.0, {}))
        for split in ("train", "other"):
            name = f"{task}-{split}"
            done = {"state": RolloutState.DONE, "counted_attempt": 0, "ending": Ending.FINISHED}
            rollout = make.rollout(
                name, group=name, mode=Mode.USE, task=Task(name, name, split, {"result": "56"}), **done
            )
            call = make.call(0, make.choice(tokens=3), rollout=name, prompt_ids=np.arange(3, dtype=np.int32))
            await store.put(rollout, make.attempt(name), call)


TOOL_RESULTS = _table("tool_results")
SQL = _table("sql_match", database="{folder}/pets3.sqlite")
TASKS: Given = {"tasks.train": {"source": "jsonl", "path": "tasks.jsonl"}}
RENAMED: Given = {"tasks.train": {"source": "jsonl", "path": "renamed.jsonl"}}

EFFECTS: Mapping[str, Effect] = {
    "rewards.NAME.rule": Effect(
        ran(mean_rewards), {"rewards": {"it": {"rule": "token_f1"}}}, {"rewards": {"it": {"rule": "exact_match"}}}
    ),
    "rewards.NAME.weight": Effect(ran(mean_rewards), {"rewards.exact_match.weight": 0.5}),
    "rewards.NAME.time_limit": Effect(
        limited, {"rewards.regex_format.time_limit": 1e-6}, _table("regex_format", pattern="(a|a)*b", time_limit=600)
    ),
    "reward.exact_match.field": Effect(reward("exact_match", "nothing"), {"rewards.exact_match.field": "also"}),
    "reward.exact_match.ignore_case": Effect(
        reward("exact_match", "ann 5.001"), {"rewards.exact_match.ignore_case": True}
    ),
    "reward.numeric_match.field": Effect(
        ran(mean_rewards), {"rewards.numeric_match.field": "also"}, _table("numeric_match")
    ),
    "reward.numeric_match.tolerance": Effect(
        reward("numeric_match"), {"rewards.numeric_match.tolerance": 0.1}, _table("numeric_match")
    ),
    "reward.regex_format.pattern": Effect(
        reward("regex_format"), {"rewards.regex_format.pattern": "^5"}, _table("regex_format", pattern="5$")
    ),
    "reward.token_f1.field": Effect(
        reward("token_f1", "nothing"), {"rewards.token_f1.field": "also"}, _table("token_f1")
    ),
    "reward.sql_match.field": Effect(queried, {"rewards.sql_match.field": "also"}, SQL),
    "reward.sql_match.database": Effect(
        queried,
        _table("sql_match", field="also", database="{folder}/pets1.sqlite"),
        _table("sql_match", field="also", database="{folder}/pets3.sqlite"),
    ),
    "reward.sql_match.timeout": Effect(
        queried,
        _table("sql_match", field="last", database="{folder}/pets3.sqlite", timeout=0.002),
        _table("sql_match", field="last", database="{folder}/pets3.sqlite", timeout=60.0),
    ),
    "reward.sql_match.max_rows": Effect(
        queried, _table("sql_match", database="{folder}/pets3.sqlite", max_rows=2), SQL
    ),
    "reward.sql_match.max_bytes": Effect(
        queried, _table("sql_match", database="{folder}/pets3.sqlite", max_bytes=2), SQL
    ),
    "reward.tool_results.default_weight": Effect(
        reward("tool_results"), _table("tool_results", default_weight=0.3), TOOL_RESULTS
    ),
    "reward.tool_results.weights": Effect(
        reward("tool_results"), _table("tool_results", weights={"search": 0.5}), TOOL_RESULTS
    ),
    "reward.tool_results.rules": Effect(
        reward("tool_results"), _table("tool_results", rules={"search": f"{__name__}:lenient"}), TOOL_RESULTS
    ),
    **{
        f"reward.judge.{name}": Effect(judged, {f"rewards.judge.{name}": value})
        for name, value in {
            "base_url": "/another/v1",
            "model": "another",
            "rubric": "Short.",
            "field": "result",
            "api_key_env": "JUDGE_KEY",
            "max_calls": 1,
            "cache": "judgements",
        }.items()
    },
    "reward.judge.max_concurrent": Effect(judged_at_once, {"rewards.judge.max_concurrent": 1}),
    "reward.judge.timeout": Effect(judged, {"rewards.judge.timeout": 0.05}, {"rewards.judge.timeout": 60.0}),
    "policies.NAME.credit.name": Effect(
        ran(values), {"policies.default.credit": {"name": "discounted", "discounted": {"gamma": 0.0}}}
    ),
    "credit.name": Effect(ran(values), {"credit.name": "discounted", "credit.discounted.gamma": 0.0}),
    "credit.discounted.gamma": Effect(credit, {"credit.discounted.gamma": 0.5}, {"credit.name": "discounted"}),
    "credit.stepwise.gamma": Effect(credit, {"credit.stepwise.gamma": 0.5}, {"credit.name": "stepwise"}),
    "credit.air.reward": Effect(credit, {"credit.air.reward": "return"}, {"credit.name": "air"}),
    "credit.air.alpha": Effect(credit, {"credit.air.alpha": 0.7}, {"credit.name": "air"}),
    "task_source.jsonl.path": Effect(train_tasks, {"tasks.train.path": "other.jsonl"}, TASKS),
    "task_source.jsonl.id_field": Effect(train_tasks, {"tasks.train.id_field": "name"}, RENAMED),
    "task_source.jsonl.input_field": Effect(
        lambda bench, given: [bench.load(given).tasks["train"].build(bench.folder, 0).task(0).input],
        {"tasks.train.input_field": "question"},
        RENAMED,
    ),
    **{
        f"task_source.{source}.{name}": Effect(table_tasks, {f"tasks.train.{name}": value}, _of_table(source))
        for source in ("csv", "parquet", "hf")
        for name, value in {
            "input_field": ["input", "answer"],
            "id_field": "number",
            "columns": {"result": "answer"},
        }.items()
    },
    "task_source.csv.path": Effect(table_tasks, {"tasks.train.path": "more.csv"}, _of_table("csv")),
    "task_source.parquet.path": Effect(table_tasks, {"tasks.train.path": "more.parquet"}, _of_table("parquet")),
    "task_source.hf.dataset": Effect(table_tasks, {"tasks.train.dataset": "more-dataset"}, _of_table("hf")),
    **{
        f"task_source.reasoning_gym.{name}": Effect(
            gym_tasks,
            {f"tasks.train.{name}": value},
            {"tasks.train": {"source": "reasoning_gym", "dataset": "chain_sum", "size": 3}},
        )
        for name, value in {
            "dataset": "basic_arithmetic",
            "split": "eval",
            "size": 2,
            "settings": {"max_terms": 2},
        }.items()
    },
    **{
        f"task_source.recorded.{name}": Effect(
            recorded_tasks, {f"tasks.train.{name}": value}, {"tasks.train": {"source": "recorded", "run": "first"}}
        )
        for name, value in {"run": "second", "split": "other", "without_logprobs": True}.items()
    },
    "task_source.hf.split": Effect(table_tasks, {"tasks.train.split": "eval"}, _of_table("hf")),
    "task_source.hf.subset": Effect(table_tasks, {"tasks.train.subset": "second"}, _of_table("hf", split="eval")),
}
