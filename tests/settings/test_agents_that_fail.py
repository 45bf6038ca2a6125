"""An agent that cannot be trained is found out at once, or soon, and the run says what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agl_core.cli import app
from agl_core.errors import AgentError, AglError, ConfigError, TrainingError
from agl_server.reading.runs import read_entry
from agl_server.training.run import new_run_dir, train

from ..support.scripted_run import Lines
from . import scripted_parts
from .conftest import Bench


def agl(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(app, [str(argument) for argument in arguments])


def refused(bench: Bench, agent: str, **given: object) -> tuple[AglError, list[str]]:
    """The error of a training of this agent's code, and the lines before it."""
    loaded = bench.load_agent(f"failing_{abs(hash(agent))}", agent, {"train.steps": 4, **given})
    observer = Lines()
    run_dir = new_run_dir(loaded)
    with pytest.raises(AglError) as raised:
        asyncio.run(train(loaded, run_dir, observer))
    assert not run_dir.exists() or read_entry(run_dir).state == "failed"
    return raised.value, observer.lines


def test_one_that_always_raises(bench: Bench) -> None:
    agent = "def look_up(city):\n    return {}[city]\n\nasync def solve(task):\n    return look_up('Ghent')\n"
    error, lines = refused(bench, agent)
    assert isinstance(error, TrainingError)
    assert "steps 1 to 2: 8 crashed" in str(error)
    [evaluated] = [line for line in lines if "step 0, evaluation" in line]
    assert "2 of 2 rollouts ended as crashed" in evaluated
    assert "KeyError: 'Ghent'" in evaluated
    assert "in solve\n    return look_up('Ghent')" in evaluated
    assert "in look_up\n    return {}[city]" in evaluated
    assert sum("4 of 4 rollouts ended as crashed" in line for line in lines) == 1, "it goes on, and is told once"


@pytest.mark.parametrize(
    ("agent", "text"),
    [
        ("import no_such_module_of_mine\n", r"(?s)no_such_module_of_mine'\).*line 1, in <module>\n    import no_such"),
        ("raise SystemExit('usage: agent.py')\n", "SystemExit: usage: agent.py"),
        ("def solve(task, tools):\n    return 1\n", r"missing a required argument: 'tools'.*\(task, tools\)"),
        ("def solve():\n    return 1\n", "too many positional arguments"),
        ("def sovle(task):\n    return 1\n", r"has no 'solve'\. Did you mean 'sovle'\? Known: sovle\."),
    ],
    ids=["an import", "an exit", "more parameters", "no parameter", "another name"],
)
def test_one_that_cannot_be_called_is_found_out_before_the_engine_starts(bench: Bench, agent: str, text: str) -> None:
    error, lines = refused(bench, agent)
    assert isinstance(error, AgentError)
    with pytest.raises(AgentError, match=text):
        raise error
    assert "starting the engine" not in lines


def test_tasks_that_cannot_be_made_are_found_out_before_the_engine_starts(bench: Bench) -> None:
    plugin = bench.folder / "broken_tasks.py"
    plugin.write_text(
        "import agl_core\n"
        "class Broken:\n"
        "    size = 3\n"
        "    def task(self, index):\n"
        "        return [][index]\n"
        "@agl_core.hookimpl\n"
        "def register_components(register):\n"
        "    register(agl_core.kinds.TASK_SOURCE, 'broken', lambda options, folder, seed: Broken())\n"
    )
    error, lines = refused(
        bench,
        "async def solve(task):\n    return 1.0\n",
        **{"plugins": [scripted_parts.__file__, str(plugin)], "tasks.train": {"source": "broken"}},
    )
    assert isinstance(error, ConfigError)
    assert "[tasks.train]: the first task cannot be made (IndexError" in str(error)
    assert "starting the engine" not in lines


CALLING = """
import httpx

async def solve(task, context):
    async with httpx.AsyncClient(base_url=context.base_url, trust_env=False, timeout=60) as client:
        asked = {"model": "default", "messages": [{"role": "user", "content": str(task)}]}
        headers = {"Authorization": f"Bearer {context.api_key}"}
        (await client.post("chat/completions", json=asked, headers=headers)).raise_for_status()
"""


@pytest.mark.parametrize(
    ("end", "rewards", "status", "reason"),
    [
        (
            "if '-look-' not in context.rollout: raise KeyError('Ghent')",
            {"exact_match": {}},
            1,
            "no rollout finished; all 8 ended as crashed.",
        ),
        ("return 'ten'", {"exact_match": {}}, 0, "no group had contrast: every advantage was 0."),
        (
            "return 10",
            {},
            0,
            "no rollout got a reward. Name a rule in [rewards], or have the agent call agl_core.reward(",
        ),
        ("pass", {"exact_match": {}}, 0, "the result was null in all rollouts. Let the agent's function return"),
    ],
    ids=["crashed", "equal", "unrewarded", "null"],
)
def test_a_run_that_learned_nothing_says_so_and_why(
    bench: Bench, end: str, rewards: dict[str, Any], status: int, reason: str
) -> None:
    """Also where the engine says that it trained on every transition, each with an advantage of 0."""
    folder, state, name = bench.folder, "failed" if status else "finished", f"ending_{len(reason)}"
    bench.load_agent(name, f"{CALLING}    {end}\n", {"eval.every": 0, "rewards": rewards})

    ended = agl("train", folder / "train.toml")

    assert ended.exit_code == status, ended.output
    assert f"verdict: cannot: {reason}" in ended.output
    assert "8 trained on (8 of them with an advantage of 0)" in ended.output
    summary = json.loads((folder / "runs" / name / "summary.json").read_text())
    assert summary["verdict"]["word"] == "cannot"
    listed = json.loads(agl("runs", "list", folder / "runs", "--json").output)
    [entry] = [run for run in listed if run["folder"].endswith(f"/{name}")]
    assert (entry["state"], entry["verdict"]) == (state, summary["verdict"])
    seen = agl("doctor", folder / "runs" / name)
    assert f"verdict: cannot: {reason.partition('.')[0]}" in seen.output
    assert seen.exit_code == status


def test_an_agent_that_fails_without_a_reply_leaves_nothing(bench: Bench) -> None:
    bench.load_agent("alone", "async def solve(task):\n    return {}[0]\n", {"eval.every": 0})

    refused = agl("train", bench.folder / "train.toml")

    assert "does not work yet, so training did not begin: 3 of 3 rollouts ended as crashed. " in str(refused.exception)
    assert "KeyError: 0" in str(refused.exception)
    assert "view:" not in refused.output, "there is nothing to see"
    assert not (bench.folder / "runs" / "alone").exists()


def test_a_reply_that_makes_the_agent_raise_is_shown_and_training_begins_once_it_ends_well(bench: Bench) -> None:
    """A policy that is still weak calls a tool that does not exist, say, and the framework raises."""
    folder, run = bench.folder, bench.folder / "runs" / "weak"
    raising = "    NUMBER[0] += 1\n    if NUMBER[0] < 9:\n        raise KeyError('no such tool')\n"
    bench.load_agent("weak", f"NUMBER = [0]\n{CALLING}{raising}", {"eval.every": 0})

    refused = agl("train", folder / "train.toml")

    assert isinstance(refused.exception, TrainingError)
    said = str(refused.exception)
    assert "Training did not begin: 8 of 8 rollouts ended as crashed, each after a reply of the model. " in said
    assert "the agent is not broken" in said
    assert "KeyError: 'no such tool'" in said
    assert "The model had replied: You said: {" in said
    assert refused.output.count("first look: task ") == 8
    assert len(json.loads(agl("rollouts", run, "--json").output)) == 8
    began = agl("train", "--resume", run)
    assert began.exit_code == 0, began.output

    sys.modules["weak"].NUMBER[0] = 4
    began = agl("train", folder / "train.toml", "--set=name=later")
    assert began.exit_code == 0, began.output
    looks = re.findall(
        r"first look: task \w+: (\w+), 1 calls by an unnamed agent; tools: none; reward: [01]", began.output
    )
    assert "\nview:   http" in began.output
    assert sorted(looks) == ["crashed"] * 4 + ["finished"] * 4
    summary = json.loads((folder / "runs" / "later" / "summary.json").read_text())
    assert summary["rollouts"] == {"finished": 8}, "it is not trained on"
