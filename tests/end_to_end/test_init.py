"""`agl init` and then `agl train`, as a new user does it: a folder with an agent of one's own, and two commands."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from agl_command import Agl, agl_in_process, core_and_server_alone  # noqa: F401
from testing_aids import run_command

from agl_core.config.load import load
from agl_core.errors import AgentError, ConfigError
from agl_core.testing import episodes as make
from agl_server.commands.init import read_agent_file, write_files

AGENT = '''
"""A LangChain agent that knows nothing of agl."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def calculator(expression: str) -> str:
    """Work out a sum."""
    return str(sum(map(int, expression.split("+"))))


agent = create_agent(ChatOpenAI(model="gpt-4o-mini"), [calculator], name="adder")


def ask(question: str) -> list:
    return [{"role": "user", "content": question}]


async def solve(task: dict) -> str:
    try:
        state = await agent.ainvoke({"messages": ask(task["question"])}, {"recursion_limit": 5})
    except Exception as error:
        return f"failed: {error}"
    return str(state["messages"][-1].text)
'''


def run_agl(folder: Path, *arguments: str) -> str:
    """The output of the command, in a process of its own."""
    return run_command(Path(sys.executable).with_name("agl"), *arguments, cwd=folder)


PLAIN = "def helper(a, b): ...\ndef work(text, context, depth=1):\n    other = {}\n    return other['x'] + text\n"
"""Without a framework, which takes seconds to import."""


@pytest.fixture
def folder(working_folder: Path) -> Path:
    """A user's, with two agents."""
    (working_folder / "my_agent.py").write_text(AGENT)
    (working_folder / "plain.py").write_text(PLAIN)
    return working_folder


@pytest.fixture
def policy(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.rootpath / "examples" / "calc" / "policy")


@pytest.mark.storm
def test_from_an_agent_file_to_a_trained_agent(folder: Path, policy: str) -> None:
    said = run_agl(folder, "init", "my_agent.py", "--model", policy)
    assert "agent: async def solve in my_agent.py, which takes an object with question" in said
    assert "framework: langchain_core" in said

    # The tiny policy hardly ever hits a sum; near ones count here, so that groups differ.
    run_agl(folder, "train", "train.toml", "--set=rewards.numeric_match.tolerance=0.5")

    lines = [json.loads(line) for line in (folder / "runs" / "my_agent" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["rollouts"] for line in steps] == [16.0] * 3
    assert all("reward/numeric_match" in line for line in steps)
    assert sum(line.get("update/transitions_trained", 0) for line in steps) > 0
    rollouts = json.loads(run_agl(folder, "rollouts", "--json"))
    assert {rollout["ending"] for rollout in rollouts} == {"finished"}


def test_nothing_is_overwritten_without_force(folder: Path, policy: str, agl: Agl) -> None:
    (folder / "reward.py").write_text("# mine")
    refused = agl("init", "plain.py", "--model", policy)
    assert refused.returncode == 2
    assert "reward.py: there already. Nothing was written" in refused.stderr
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"my_agent.py", "plain.py", "reward.py"}
    assert (folder / "reward.py").read_text() == "# mine"

    written = agl("init", "plain.py", "--model", policy, "--force")
    assert written.returncode == 0
    assert "agent: def work in plain.py, which takes a text" in written.stdout
    assert "none that an installed adapter knows" in written.stdout
    assert tomllib.loads((folder / "train.toml").read_text())["agent"]["entry"] == "plain:work"
    assert isinstance(json.loads((folder / "tasks.jsonl").read_text().splitlines()[0])["input"], str)
    assert "agl_core.reward_rule" in (folder / "reward.py").read_text()


def test_a_model_that_is_not_there_leaves_no_file(folder: Path, agl: Agl) -> None:
    before = {path.name for path in folder.iterdir()}
    refused = agl("init", "plain.py", "--model", "./nowhere")
    assert refused.returncode == 2
    assert "there is no folder" in refused.stderr
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["", "--force"])
@pytest.mark.parametrize(
    ("agent", "task", "right", "wrong"),
    [
        ("plain.py", {"input": "1 + 2?", "result": 3}, "It is 3.", "32864422"),
        ("plain.py", {"input": "Count.", "answer": "3 apples"}, "3 apples", "13 apples, -3 apples, 2.3 apples"),
        ("plain.py", {"question": "The capital?", "answer": "Paris"}, "It is paris.", "Parisian"),
        ("keys.py", {"where": "France", "what": "the capital", "gold": "Paris"}, "Paris", "Pari"),
    ],
    ids=["a number", "a number in words", "a word", "keys that the agent reads"],
)
def test_tasks_that_are_there_are_kept_and_used(
    folder: Path, policy: str, agl: Agl, force: list[str], agent: str, task: dict[str, Any], right: str, wrong: str
) -> None:
    (folder / "keys.py").write_text("def solve(task):\n    return task['what'] + task['where']\n")
    (folder / "tasks.jsonl").write_text(json.dumps(task))

    ended = agl("init", agent, "--model", policy, *force)

    assert ended.returncode == 0, ended.stderr
    assert "tasks: tasks.jsonl was there, and is used as it is" in ended.stdout
    assert json.loads((folder / "tasks.jsonl").read_text()) == task
    loaded = load(folder / "train.toml")
    asked = loaded.tasks["train"].build(folder, 0).task(0)
    assert asked.input == task.get("input", task.get("question", {"where": "France", "what": "the capital"}))
    [rule] = [chosen.build(None) for chosen in loaded.rewards.values()]
    scores = [rule(make.episode(task=asked, result=result)) for result in (right, wrong)]
    assert scores == [1.0, 0.0]


def test_without_a_model_one_to_start_with_is_offered_and_tasks_with_verifiers(folder: Path, agl: Agl) -> None:
    ended = agl("init", "plain.py")
    assert ended.returncode == 0, ended.stderr
    assert "model: Qwen/Qwen2.5-0.5B-Instruct" in ended.stdout
    assert 'source = "reasoning_gym"' in ended.stdout
    model = tomllib.loads((folder / "train.toml").read_text())["policies"]["default"]["model"]
    assert model == {"path": "Qwen/Qwen2.5-0.5B-Instruct"}


@pytest.mark.usefixtures("folder", "core_and_server_alone")
def test_files_are_written_without_an_engine(agl: Agl) -> None:
    ended = agl("init", "plain.py")
    assert ended.returncode == 0, ended.stderr
    assert "next: agl doctor train.toml" in ended.stdout


def test_an_agent_file_that_is_not_there_is_named(folder: Path, agl: Agl) -> None:
    assert f"There is no file my_agnt.py (looked in {folder})" in agl("init", "my_agnt.py").stderr


def test_an_agent_is_found_beside_its_tools(folder: Path) -> None:
    code = "tool = lambda f: f\n@tool\ndef search(query): ...\ndef add(a, b): ...\ndef ask_it(task): ...\n"
    (folder / "both.py").write_text(code)
    assert read_agent_file(folder / "both.py", None).function == "ask_it"


@pytest.mark.parametrize(
    ("name", "code", "what"),
    [
        ("broken.py", "def solve(:\n", "SyntaxError: "),
        ("raising.py", "import nowhere_at_all\ndef solve(task): ...\n", "No module named 'nowhere_at_all'"),
        ("empty.py", "x = 1\n", "(there is none). Name it: --entry"),
        ("unsure.py", "def one(task): ...\ndef two(task): ...\n", "(one, two). Name it: --entry"),
        ("my-agent.py", "def solve(task): ...\n", "(its name would be 'my-agent')"),
        ("reward.py", "def solve(task): ...\n", "Rename your agent's file"),
    ],
)
def test_an_agent_file_that_cannot_be_used(folder: Path, policy: str, name: str, code: str, what: str) -> None:
    (folder / name).write_text(code)
    with pytest.raises((AgentError, ConfigError)) as error:
        write_files(read_agent_file(folder / name, None), policy, force=False)
    assert what in str(error.value)
    assert not (folder / "train.toml").exists()
