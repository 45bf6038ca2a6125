"""Environments for verifiers as PyPI has them, in an environment of their own: `make test-harnesses`.

Each row becomes a task, and the reward of a recorded conversation is that of the environment's own function.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
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
tasks = source.build(source.options(package=package, arguments=arguments, split="eval"), None, 0)
rule = plugins.component(REWARD, "verifiers", "the test")
rule = rule.build(rule.options(), None)
task = tasks.task(0)

def reward(answer):
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": task.input["prompt"]})
    transition = replace(make.transition(), messages=messages, response={"role": "assistant", "content": answer})
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
    own = [ROOT / "core", ROOT / "adapters" / "harnesses"]
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES, *own], check=True)
    return python


def ran(python: Path, package: str, arguments: dict[str, Any], answers: list[str]) -> dict[str, Any]:
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
    assert result["task"][0] == "sophistry_bench_sprint-eval-0"
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
