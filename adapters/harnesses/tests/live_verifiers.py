"""Environments for verifiers as PyPI has them, in an environment of their own: `make test-harnesses`.

Each row becomes a task, and the reward of a recorded conversation is that of the environment's own function. No package
of PyPI has plain tools: `ledger_environment` beside this file does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.config.models import UntrainedConfig

from .live_programs import check, running
from .live_programs import program as program
from .matrix import TOOLS, Shop

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(900)  # The first test installs the packages.
FOLDER = ROOT / ".venv-harnesses" / "verifiers"
PACKAGES = ("verifiers==0.1.14", "sophistry-bench-sprint==0.1.6", "staros-stardata[env]==0.1.1")
SCRIPT = """
import asyncio, json, sys
from dataclasses import replace
from agl_core.kinds import REWARD, TASK_SOURCE
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make

package, arguments, answers = json.loads(sys.argv[1])
plugins = Plugins.load()
source = plugins.component(TASK_SOURCE, "verifiers", "the test")
tasks = source.build(source.options(package=package, arguments=arguments, split="train"), None, 0)
rule = plugins.component(REWARD, "verifiers", "the test")
rule = rule.build(rule.options(), None)
task = tasks.task(0)

def reward(answer):
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": task.input["prompt"]}]
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    transition = replace(make.transition(), messages=(*prompt, *said[:-1]), response=said[-1])
    return asyncio.run(rule(make.episode(transition, task=task)))

print(json.dumps({
    "size": tasks.size, "task": [task.id, task.input, task.metadata], "rewards": [reward(text) for text in answers]
}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    """The Python of an environment with verifiers and this tree's packages."""
    python = FOLDER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    own = [ROOT / "core", f"{ROOT / 'adapters' / 'harnesses'}[verifiers]"]
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES, *own], check=True)
    [packages] = FOLDER.glob("lib/python*/site-packages")
    shutil.copy(Path(__file__).with_name("ledger_environment.py"), packages)
    return python


def ran(python: Path, package: str, arguments: dict[str, Any], answers: list[Any]) -> dict[str, Any]:
    command = [python, "-c", SCRIPT, json.dumps([package, arguments, answers])]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def judged(python: Path, statement: str) -> Any:
    """The value of an expression of the package, without agl."""
    command = [python, "-c", f"import json\n{statement}"]
    return json.loads(subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=True).stdout)


def test_sophistry_bench_scores_arguments(python: Path) -> None:
    answers = ["", '<claim>The "one" reason.</claim> It is so. <cite>one</cite>']
    result = ran(python, "sophistry_bench_sprint", {"n_items": 3}, answers)
    row = result["task"][2]["verifiers"]["row"]
    assert result["task"][0] == "sophistry_bench_sprint-train-0"
    assert result["task"][1]["prompt"].startswith(row["prompt"][0]["content"])
    expected = judged(
        python,
        "import asyncio, sophistry_bench_sprint as b\n"
        f"answers = {answers!r}\nenvironment = b.load_environment(n_items=3)\nrow = environment.get_dataset()[0]\n"
        "info = json.loads(row['info']) if isinstance(row['info'], str) else row['info']\n"
        "function = b._build_reward_funcs()[0]\n"
        "async def scores():\n"
        "    said = [[{'role': 'assistant', 'content': answer}] for answer in answers]\n"
        "    return [await function(row['prompt'], each, row['answer'], {'info': info}) for each in said]\n"
        "print(json.dumps(asyncio.run(scores())))",
    )
    assert result["rewards"] == expected


def test_stardata_scores_verse(python: Path) -> None:
    answers = ["", "An old silent pond\nA frog jumps into the pond\nSplash! Silence again"]
    result = ran(python, "stardata.envs.constraint_gym", {"topics_per_form": 1}, answers)
    row = result["task"][2]["verifiers"]["row"]
    expected = judged(
        python,
        "from stardata.envs import constraint_gym as gym\n"
        "row = gym.build_dataset(topics_per_form=1)[0]\n"
        f"print(json.dumps([gym.prosody_reward(completion=a, info=row['info']) for a in {answers!r}]))",
    )
    assert result["rewards"] == expected
    assert expected[0] < expected[1]
    assert result["size"] > 1
    assert row["prompt"]


def test_a_package_that_is_missing_is_named(python: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        ran(python, "no_such_environment", {}, [])
    assert "needs the package no_such_environment, which is not installed: pip install" in caught.value.stderr


REFUSED = {
    "group": "rewards by comparing the rollouts of a row",
    "stateful": "is a Stateful with turns or states of its own",
    "talks": "is a Talks with turns or states of its own",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_an_environment_that_needs_more_is_refused(python: Path, kind: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        ran(python, "ledger_environment", {"kind": kind}, [])
    assert re.search(f"ConfigError: 'ledger_environment' .*{REFUSED[kind]}", caught.value.stderr)


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="the package bubblewrap is missing")
@pytest.mark.parametrize(
    "program",
    [name for name, tools in TOOLS.items() if tools.mcp and os.environ.get("HARNESS", name) == name],
    indirect=True,
)
async def test_a_program_calls_the_tools_of_an_environment(
    program: str, python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With a model that it knows, Codex has a tool that searches for tools instead.
    tools = replace(TOOLS[program], model="agl")
    monkeypatch.setitem(TOOLS, program, tools)
    task = ran(python, "ledger_environment", {"kind": "plain"}, [])["task"][1]
    [server] = task["mcp_servers"].values()
    # The worker's Python is that of the packages, but here.
    server["command"] = str(python)
    tables: Any = {"workspace": {"runner": "bubblewrap", "reads": [FOLDER]}}
    config = UntrainedConfig.model_validate({"config_version": 1, "folder": tmp_path, **tables})
    play = Shop(tools, f"shop{os.getpid()}", (), final="7", task=task)
    async with running(program, {"shop": play}, 400, config, variables=tools.variables) as (stack, server_log):
        await stack.server.queue.done(["shop"])
        attempt = await check(stack, server_log, "shop", play)
        episode = await stack.episode(attempt.key)
    last = episode.transitions[-1]
    said = [*last.messages, last.response]
    said = said[next(n for n, message in enumerate(said) if message["role"] == "assistant") :]
    # Without the lookups, with them, and with another answer.
    other = [*said[:-1], {"role": "assistant", "content": "8"}]
    rewards = ran(python, "ledger_environment", {}, ["7", said, other])["rewards"]
    assert rewards == [1.0, 1.5, 0.5]
