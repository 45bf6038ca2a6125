"""No silent no-ops: a test changes every setting that agl accepts, and sees what that changes."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from running_servers import free_port

from agl_core import kinds
from agl_core.capture import attach
from agl_core.errors import ConfigError, TrainingError
from agl_core.learning.rewards import score
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import Ending, Mode
from agl_core.wire import SERVER_FILE
from agl_server.commands.screen import show_in_browser
from agl_server.training.rollouts import scoring_rules
from agl_server.training.run import new_run_dir, passthrough_key
from agl_server.training.session import engine_context

from .conftest import HERE, Bench, Effect, Given, Ran, ran
from .settings_found import every_setting


def refusal(bench: Bench, given: Given) -> bool:
    try:
        bench.load(given)
    except ConfigError:
        return True
    return False


def run_folder(bench: Bench, given: Given) -> tuple[str, str]:
    """Where a new run goes: the folder above, and its own name without the number that makes it unique."""
    with contextlib.chdir(bench.folder):
        created = new_run_dir(bench.load(given))
    return created.parent.name, created.name.split("-")[0]


def train_tasks(bench: Bench, given: Given) -> list[str]:
    loaded = bench.load(given)
    source = loaded.tasks["train"].build(loaded.config.folder, loaded.config.seed)
    return [f"{task.id}: {task.input}" for task in map(source.task, range(min(source.size or 3, 3)))]


def engines(bench: Bench, given: Given) -> list[str]:
    """The engines that can be chosen; our own is in a plugin file."""
    return sorted(bench.load(given).plugins.components(kinds.ENGINE))


def specs(bench: Bench, given: Given) -> dict[str, Any]:
    """The settings of each policy as the engine gets them; their effect is tested with the engine."""
    loaded = bench.load(given)
    return {name: asdict(spec) for name, spec in engine_context(loaded, bench.folder).policies.items()}


async def ended(ending: Ending, bench: Bench, given: Given) -> Any:
    """The fate of a rollout with this ending: its drop, and its terminal reward."""
    loaded = bench.load(given)
    scored, _ = await score(make.episode(ending=ending), scoring_rules(loaded), loaded.config.train.endings)
    return scored.dropped, scored.terminal


async def limited(bench: Bench, given: Given) -> Any:
    """True if an answer on which the search takes about a second is searched to the end."""
    rules = [rule for rule in scoring_rules(bench.load(given)) if rule.name == "regex_format"]
    _, errors = await score(make.episode(result="a" * 21), rules, dict.fromkeys(Ending, "score"))
    return errors == []


def who_is_scored(bench: Bench, given: Given) -> list[bool]:
    """True for a task's rollout and for a session, if the rule says anything of it."""
    [rule] = [rule for rule in scoring_rules(bench.load(given)) if rule.name == "exact_match"]
    return [mode in rule.modes for mode in (Mode.TRAIN, Mode.USE)]


async def endings_of_an_unaware_agent(bench: Bench, given: Given) -> set[str]:
    attach([]).detach()
    try:
        return {str(attempt.ending) for attempt in (await bench.run(given)).attempts}
    finally:
        attach([]).detach()


async def steps_made(bench: Bench, given: Given) -> int | str:
    """How many, or why a run was stopped."""
    try:
        return len((await bench.run(given)).summary.as_json()["train_rewards"])
    except TrainingError as error:
        return str(error).partition(":")[0]


async def passthrough(bench: Bench, given: Given) -> Any:
    """To whom the rest is passed on, and with which key."""
    with mock.patch.dict("os.environ", {"OTHER_KEY": "the-other-key"}):
        gateway = bench.load(given).config.gateway
        return gateway.passthrough.url, passthrough_key(gateway)


async def place(bench: Bench, given: Given) -> tuple[str | None, bool]:
    """The host of a run's server, and whether it has our port."""
    async with bench.serving(given) as (*_, run_dir):
        url = urlsplit(json.loads((run_dir / SERVER_FILE).read_text())["base_url"])
        return url.hostname, url.port == PORT


async def has_a_worker(bench: Bench, given: Given) -> bool:
    async with bench.serving(given) as (_, session, _):
        return session.workers is not None


async def shows_pages_there(bench: Bench, given: Given) -> bool:
    loaded = bench.load(given)
    async with show_in_browser(new_run_dir(loaded), loaded.config.server, None) as address:
        return urlsplit(str(address)).port == PORT


def files(run: Ran) -> list[str]:
    return sorted(path.name.split(".tfevents")[0] for path in run.folder.rglob("*") if path.suffix != ".log")


def groups_and_rollouts(run: Ran) -> list[tuple[int, int]]:
    """Of each update."""
    return [(len(set(update["group"])), len(set(update["rollout"]))) for update in run.updates]


def checkpoints(run: Ran) -> tuple[list[str], list[str]]:
    """Those that were written, and those that are there at the end."""
    return run.seen["saved"], sorted(path.name for path in (run.folder / "checkpoints").iterdir())


def evaluations(run: Ran) -> list[tuple[Any, ...]]:
    return [tuple(entry[key] for key in ("step", "set", "mode", "rollouts")) for entry in run.summary.state.evaluations]


def most_at_once(run: Ran) -> int:
    """How many attempts of the first training step were under way at the same time."""
    steps = [attempt for attempt in run.attempts if attempt.rollout.startswith("s1-g")]
    return max(sum(other.started <= step.started < (other.ended or 0) for other in steps) for step in steps)


def endings(run: Ran) -> list[tuple[str, int, Ending | None]]:
    return sorted((attempt.rollout, attempt.attempt, attempt.ending) for attempt in run.attempts)


def rewards(run: Ran) -> list[float]:
    return run.summary.as_json()["train_rewards"]


PORT = free_port()
RESULTS, VALUES = ran(lambda run: [a.result for a in run.attempts]), ran(lambda run: [u["values"] for u in run.updates])
IN_FLIGHT, KEPT = (
    ran(lambda run: run.metrics[1]["groups/in_flight"]),
    ran(lambda run: run.summary.as_json()["transitions"]["kept"]),
)
SYSTEM = ran(lambda run: sorted({request["messages"][0]["content"] for request in run.seen["requests"]}))
GROUPS, EVALUATIONS = ran(groups_and_rollouts), ran(evaluations)
CHECKPOINTS, REWARDS, FILES, ENDINGS = ran(checkpoints), ran(rewards), ran(files), ran(endings)
APART: Given = {"workers.processes": 0}
TORCH: Given = {"plugins": [], "engine.name": "torch"}
COMMAND = [sys.executable, str(HERE / "scripted_agent.py")]
HARNESS: Given = {
    "agent": {"harness": "command", "options": {"command": COMMAND}},
    "workspace": {"runner": "plain"},
}
SECOND: Given = {"policies.second.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}
LORA: Given = {"policies.default.model.lora": {"rank": 4}}
SLOW: Given = {"rewards": {"regex_format": {"pattern": "(a|a)*b", "time_limit": 600}}}
DISCOUNTED: Given = {"name": "discounted", "discounted": {"gamma": 0.0}}


def agent(function: str) -> Given:
    return {"agent.entry": f"scripted_agent:{function}", "train.steps": 1}


def tasks(name: str) -> Given:
    return {"tasks.train.path": f"{name}.jsonl"}


EFFECTS: Mapping[str, Effect] = {
    "config_version": Effect(refusal, {"config_version": 2}),
    "name": Effect(run_folder, {"name": "named"}),
    "runs": Effect(run_folder, {"runs": "elsewhere"}),
    "seed": Effect(ran(lambda run: run.requested("seed")), {"seed": 7}),
    "folder": Effect(train_tasks, {"folder": "below"}, TORCH),
    "plugins": Effect(engines, {"plugins": []}, {"engine.name": "torch"}),
    "agent.entry": Effect(RESULTS, {"agent.entry": "scripted_agent:solve_badly"}),
    "agent.command": Effect(RESULTS, {"agent": {"command": COMMAND}}),
    "agent.harness": Effect(RESULTS, HARNESS),
    "agent.options": Effect(RESULTS, {"agent.options.command": [*COMMAND, "with options"]}, HARNESS),
    "agent.attach": Effect(endings_of_an_unaware_agent, {"agent.attach": True}, agent("solve_unaware")),
    "tasks": Effect(EVALUATIONS, {"tasks.second": {"source": "jsonl", "path": "tasks.jsonl"}}),
    "tasks.NAME.source": Effect(train_tasks, {"tasks.train": {"source": "counting"}}),
    "sampling.temperature": Effect(ran(lambda run: run.requested("temperature")), {"sampling.temperature": 0.7}),
    "sampling.max_tokens": Effect(ran(lambda run: run.requested("max_tokens")), {"sampling.max_tokens": 32}),
    "rewards": Effect(REWARDS, {"rewards": {"token_f1": {}}}),
    "rewards.NAME.rule": Effect(
        REWARDS, {"rewards": {"it": {"rule": "token_f1"}}}, {"rewards": {"it": {"rule": "exact_match"}}}
    ),
    "rewards.NAME.weight": Effect(REWARDS, {"rewards.exact_match.weight": 0.5}),
    "rewards.NAME.time_limit": Effect(limited, {"rewards.regex_format.time_limit": 1e-6}, SLOW),
    "rewards.NAME.modes": Effect(who_is_scored, {"rewards.exact_match.modes": ["train", "use"]}),
    "credit.name": Effect(VALUES, {"credit": DISCOUNTED}),
    "algorithm.name": Effect(specs, {"algorithm.name": "reinforce++"}),
    "engine.name": Effect(ran(lambda run: run.seen["engine"]), {"engine.name": "scripted-too"}),
    "store.name": Effect(FILES, {"store.name": "another"}),
    "trackers": Effect(FILES, {"trackers": {}}),
    "policies": Effect(ran(lambda run: sorted(run.seen["policies"])), SECOND),
    "policies.NAME.agents": Effect(
        ran(lambda run: {update["policy"] for update in run.updates}), {"policies.second.agents": ["solv*"]}, SECOND
    ),
    "policies.NAME.algorithm.name": Effect(specs, {"policies.default.algorithm.name": "reinforce++"}),
    "policies.NAME.credit.name": Effect(VALUES, {"policies.default.credit": DISCOUNTED}),
    "policies.NAME.model.path": Effect(specs, {"policies.default.model.path": "Qwen/Qwen2.5-0.5B-Instruct"}),
    "policies.NAME.model.dtype": Effect(specs, {"policies.default.model.dtype": "bfloat16"}),
    "policies.NAME.model.trust_remote_code": Effect(specs, {"policies.default.model.trust_remote_code": True}),
    **{
        f"policies.NAME.model.lora.{name}": Effect(specs, {f"policies.default.model.lora.{name}": value}, LORA)
        for name, value in {"rank": 2, "alpha": 8.0, "targets": ["q_proj"]}.items()
    },
    **{
        f"policies.NAME.optimizer.{name}": Effect(specs, {f"policies.default.optimizer.{name}": value})
        for name, value in {
            "learning_rate": 0.001, "schedule": "cosine", "warmup_steps": 4, "weight_decay": 0.1, "max_grad_norm": 1e-4,
        }.items()
    },
    "server.host": Effect(place, {"server.host": "127.0.0.2"}, APART),
    "server.port": Effect(place, {"server.port": PORT}, APART),
    "server.view_port": Effect(shows_pages_there, {"server.view_port": PORT}),
    "gateway.passthrough.url": Effect(passthrough, {"gateway.passthrough.url": "http://127.0.0.1:1/v1"}),
    "gateway.passthrough.api_key_env": Effect(
        passthrough,
        {"gateway.passthrough.api_key_env": "OTHER_KEY"},
        {"gateway.passthrough.url": "http://127.0.0.1:1/v1"},
    ),
    "prompts": Effect(SYSTEM, {"prompts": {"system": {"text": "Be kind."}}}, agent("solve_prompted")),
    "prompts.NAME.text": Effect(
        SYSTEM, {"prompts.system.text": "Be long."}, {**agent("solve_prompted"), "prompts.system.text": "Be kind."}
    ),
    "prompts.NAME.replace": Effect(
        SYSTEM, {"prompts.other.replace": "brief"}, {**agent("solve_prompted"), "prompts.other.text": "long"}
    ),
    "prompts.NAME.agents": Effect(
        SYSTEM,
        {"prompts.other.agents": ["critic"]},
        {**agent("solve_prompted"), "prompts.other": {"text": "long", "replace": "brief"}},
    ),
    "train.steps": Effect(ran(lambda run: len(run.updates)), {"train.steps": 1}),
    "train.groups_per_step": Effect(GROUPS, {"train.groups_per_step": 1}),
    "train.group_size": Effect(GROUPS, {"train.group_size": 3}),
    "train.refill": Effect(ran(lambda run: run.metrics[1]["groups/replaced"]), {"train.refill": 1}),
    "train.truncated": Effect(KEPT, {"train.truncated": "drop"}, {"sampling.max_tokens": 1, "train.steps": 1}),
    "train.agents": Effect(KEPT, {"train.agents": ["planner"]}, {"train.steps": 1}),
    "train.housekeeping": Effect(KEPT, {"train.housekeeping": "keep"}, {**tasks("titled"), "train.steps": 1}),
    "train.checkpoint_every": Effect(CHECKPOINTS, {"train.checkpoint_every": 1}),
    "train.keep_checkpoints": Effect(CHECKPOINTS, {"train.keep_checkpoints": 1}, {"train.checkpoint_every": 1}),
    "train.stop.tokens": Effect(steps_made, {"train.stop.tokens": 1}),
    **{
        f"prices.{name}": Effect(ran(lambda run: run.summary.as_json()["cost"]), {f"prices.{name}": 2.0})
        for name in ("prefill", "sample", "train")
    },
    "train.deterministic": Effect(
        lambda bench, given: engine_context(bench.load(given), Path()).deterministic, {"train.deterministic": True}
    ),
    **{f"train.endings.{e}": Effect(partial(ended, e), {f"train.endings.{e}": 0.25}) for e in Ending},
    "async.max_staleness": Effect(IN_FLIGHT, {"async.max_staleness": 1}),
    "async.in_flight": Effect(IN_FLIGHT, {"async.in_flight": 3}, {"async.max_staleness": 1}),
    "eval.every": Effect(EVALUATIONS, {"eval.every": 1}),
    "eval.tasks": Effect(EVALUATIONS, {"eval.tasks": 3}),
    "eval.patience": Effect(steps_made, {"eval.patience": 1}, {"train.steps": 3, "eval.every": 1}),
    "eval.modes": Effect(EVALUATIONS, {"eval.modes": ["eval-sampled"]}),
    "workers.concurrency": Effect(ran(most_at_once), {"workers.concurrency": 1}),
    "workers.processes": Effect(has_a_worker, {"workers.processes": 0}),
    "workers.isolation": Effect(
        ran(lambda run: len({attempt.result for attempt in run.attempts})),
        {"workers.isolation": "process"},
        agent("solve_somewhere"),
    ),
    "workers.memory_mib": Effect(ENDINGS, {"workers.memory_mib": 1024}, agent("solve_big")),
    "workers.timeout": Effect(ENDINGS, {"workers.timeout": 0.2}, {**tasks("slow"), "train.steps": 1}),
    "workers.attempts": Effect(ENDINGS, {"workers.attempts": 2}, {**tasks("restarting"), "train.steps": 1}),
}  # fmt: skip
"""How changing a setting is seen in a run that has what is given."""

SEEN_BY: Mapping[str, tuple[str, ...]] = {
    "alarms.": ("core/agl_core/types", "server/tests/training"),
    "algorithm.": ("algorithms/policy/tests", "algorithms/torch/tests"),
    "engine.torch.": ("algorithms/torch/tests",),
    "reward.feedback.": ("apps/online/tests",),
    **dict.fromkeys(
        (
            *("harness.", "workspace.", "task_source.swe.", "task_source.harbor.", "task_source.verifiers."),
            *("reward.tests_pass.", "reward.diff_size.", "reward.untouched."),
        ),
        ("adapters/harnesses/tests",),
    ),
    "engine.tinker.": ("algorithms/tinker/tests",),
    "reward.": ("rewards/tests",),
    "credit.discounted.": ("core/tests/learning",),
    "credit.": ("rewards/tests",),
    "task_source.reasoning_gym.": ("rewards/tests",),
    "task_source.": ("core/tests/plugins", "server/tests/training"),
    "tracker.": ("server/tests/trackers",),
    "online.": ("apps/online/tests",),
    "learn.": ("apps/online/tests",),
    "optimize.": ("apps/prompts/tests",),
}
"""Where the effects of components' own settings are tested, by the first prefix that fits; tests there name each."""


SETTINGS = every_setting(Plugins.load())
PROCESSES = ("agent.command", "agent.harness", "agent.options", "workers.isolation", "workers.memory_mib")
"""To see these, a process is started for each attempt."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.storm if name in PROCESSES else ()) for name in EFFECTS]
)
async def test_it_has_an_effect(name: str, bench: Bench) -> None:
    effect = EFFECTS[name]
    before = await bench.observed(effect.observe, effect.given)
    assert await bench.observed(effect.observe, {**effect.given, **effect.change}) != before


def test_every_other_setting_is_changed_by_the_tests_of_its_component() -> None:
    """Which say its name, in code."""
    root, unseen = HERE.parents[1], []
    for setting in [setting for setting in SETTINGS if setting not in EFFECTS]:
        folders = next((folders for prefix, folders in SEEN_BY.items() if setting.startswith(prefix)), ())
        name = re.compile(rf"\b{setting.rpartition('.')[2]}\b")
        files = [file for folder in folders for file in (root / folder).rglob("*.py")]
        if not any(name.search(file.read_text()) for file in files):
            unseen.append(setting)
    assert unseen == [], "say in EFFECTS how changing it is seen, or change it in a test of its component"
    assert len(SETTINGS) == len(set(SETTINGS))
    assert EFFECTS.keys() - set(SETTINGS) == set(), "no such settings"
