"""`agl run`: a command in its environment, its recording, and the messages about it; `agl worker` by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from agl_command import Agl
from running_servers import run_worker
from testing_aids import read_store
from typer.testing import CliRunner

from agl_core.capture.attaching import SITE
from agl_core.cli import app
from agl_core.errors import AglError
from agl_core.testing import episodes as make
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Ending, Mode, Task
from agl_core.wire import WORKER_KEY
from agl_server.testing import running_stack

from .conftest import Bench

PARENT = """
import subprocess, sys, agl_core, sitecustomize
assert sitecustomize.mine == "the user's own"
agl_core.reward(0.25)
agl_core.state(plan=["ask"])
sys.exit(subprocess.run([sys.executable, "child.py", *sys.argv[1:]]).returncode)
"""

CHILD = """
import sys, threading, agl_core, httpx2
from openai import OpenAI

@agl_core.tool
def search(query):
    raise TimeoutError("too slow")

def work():
    with agl_core.agent("seeker"):
        agl_core.state(plan=["ask", "search"])
        OpenAI().chat.completions.create(
            model="any", temperature=0.25, top_p=0.5, messages=[{"role": "user", "content": "hello"}])
        try:
            search("x")
        except TimeoutError:
            agl_core.reward(0.5)

thread = threading.Thread(target=work)
thread.start()
thread.join()
elsewhere = httpx2.post(sys.argv[1] + "/chat/completions", json={"messages": [{"role": "user", "content": "direct"}]})
print("done")
sys.exit(3)
"""


ASKING = """
import os, httpx2

HELLO = {"role": "user", "content": "1 + 2?"}

def ask(model, *messages):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    return httpx2.post(url, headers=headers, json={"model": model, "messages": messages}).json()
"""
"""What an agent begins with whose client is imported at once."""

TOOLS = """
reply = ask("any", HELLO)["choices"][0]["message"]
ask("any", HELLO, reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "3"})
"""


PROGRAM = """
import sys

[file] = [word.partition("=")[2] for word in sys.argv if word.startswith("--message-file=")]
ask("any", {"role": "user", "content": open(file).read()})
print(os.getcwd())
"""


def test_a_program_known_by_name_starts_in_this_folder(running: Bench) -> None:
    running.script("aider", f"#!{sys.executable}\n{ASKING}{PROGRAM}").chmod(0o755)
    path = f"{running.folder}{os.pathsep}{os.environ['PATH']}"
    upstream = ("--upstream", running.upstream.url)

    done = running.agl("run", *upstream, "--harness", "aider", "--", "Fix", "it.", PATH=path)
    refused = running.agl("run", *upstream, "--harness", "command", "--", "aider", PATH=path)

    assert (done.returncode, done.stdout) == (0, f"{running.folder}\n"), done.stderr
    rollout, _, episode = running.recorded()
    assert rollout.task.input == "Fix it."
    [call] = episode.transitions
    assert call.messages == ({"role": "user", "content": "Fix it."},)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--harness command needs settings (command). Run it itself: agl run -- COMMAND" in refused.stderr


def test_all_of_its_processes_are_seen_and_nobody_else_is_told(running: Bench, agl: Agl) -> None:
    running.script("agent.py", PARENT)
    running.script("child.py", CHILD)
    mine = running.folder / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text('mine = "the user\'s own"\n')

    result = running.run(sys.executable, "agent.py", running.upstream.url, PYTHONPATH=str(mine))

    assert (result.returncode, result.stdout) == (3, "done\n"), result.stderr
    rollout, attempt, episode = running.recorded()
    assert (attempt.ending, rollout.mode) == (Ending.CRASHED, Mode.EVAL_SAMPLED)
    assert attempt.error == "the command ended with status 3"
    [transition] = episode.transitions
    assert (transition.agent, transition.state) == ("seeker", {"plan": ["ask", "search"]})
    assert [(o.tool, o.status.value, o.arguments) for o in transition.tool_results] == [
        ("search", "timeout", {"query": "x"})
    ]
    assert [(r.name, r.value, r.source) for r in episode.rewards] == [("reward", 0.75, "agent")]
    probe, *_, forwarded, elsewhere = running.upstream.received
    assert probe.body["messages"][-1]["content"] == "Say OK."
    names = ("temperature", "top_p", "max_tokens", "seed", "model")
    assert [forwarded.body.get(name) for name in names] == [0.25, 0.5, None, None, "served"]
    assert [name for name in elsewhere.headers if name.lower().startswith("x-agl") or "auth" in name.lower()] == []
    assert "crashed: 1 LLM call by seeker, 1 tool result\n" in result.stderr
    assert "the model server tokenises each turn anew" in result.stderr
    message = f"past agl, and not recorded: 1 call to {running.upstream.url}/chat/completions"
    assert message in result.stderr.replace("localhost", "127.0.0.1")
    assert 'state {"plan": ["ask", "search"]}' in agl("show", rollout.id).stdout


REWARDING = """
import agl_core
from openai import OpenAI

for turn in range(2):
    reply = OpenAI().chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
    agl_core.reward(turn - 0.5, name="step", call=reply)
agl_core.reward(9, name="lost", call="nobody's")
"""


def test_a_reward_of_each_turn_is_shown_beside_its_call_and_one_of_no_call_is_told(running: Bench, agl: Agl) -> None:
    running.script("agent.py", REWARDING)

    result = running.run(sys.executable, "agent.py")

    rollout, attempt, episode = running.recorded()
    first, second = [t.key.call for t in episode.transitions]
    said = [(r.name, r.value, r.call, r.source) for r in episode.rewards]
    assert sorted(said) == [
        ("lost", 9.0, "nobody's", "agent"), ("step", -0.5, first, "agent"), ("step", 0.5, second, "agent"),
    ]  # fmt: skip
    problem = "agl: problem: agl_core.reward(call=…) named calls that the attempt does not have"
    assert (result.stderr.count(problem), attempt.error) == (1, None), result.stderr
    shown = agl("show", rollout.id).stdout
    turns = shown[shown.index("turn 0") : shown.index("terminal reward")].split("turn 1")
    for turn, call, value in zip(turns, (first, second), ("-0.5", "0.5"), strict=True):
        assert f"the agent reported step {value} (by agent, for call {call})" in turn
    assert "reward lost 9 (by agent, for call nobody's, which does not count)" in shown
    assert "terminal reward: none\n" in shown


def test_without_a_call_and_without_ids_it_says_so(running: Bench, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> None:
    running.upstream.returns_ids = False
    # Some of Anthropic's clients refuse, or warn of, a second key.
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "the user's own")
    running.script("silent", '#!/bin/sh\nexit "${#ANTHROPIC_AUTH_TOKEN}"').chmod(0o700)

    result = agl("run", "--upstream", running.upstream.url, "--", "./silent")

    assert result.returncode == 0
    assert running.recorded()[1].ending is Ending.NO_CALL
    assert "no_call: 0 LLM calls" in result.stderr
    assert "OPENAI_BASE_URL" in result.stderr
    assert "start them by harness" in result.stderr
    start, _, _ = result.stderr.partition("recording to")
    assert "its replies lack prompt_token_ids, token_ids, logprobs" in start
    assert "not trained on" in start


def test_a_python_without_agl_is_recorded_and_the_loss_is_told(running: Bench) -> None:
    broken = running.folder / "broken" / "agl_core"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not for this Python')\n")
    running.script("agent.py", ASKING + TOOLS)
    running.upstream.script(*[CallTools([("add", {"a": 1})])] * 6)

    result = running.run("env", f"PYTHONPATH={SITE}{os.pathsep}{broken.parent}", sys.executable, "agent.py")

    assert result.returncode == 0, result.stderr
    assert "agl could not attach to" in result.stderr
    assert "ImportError: not for this Python" in result.stderr
    assert "finished: 2 LLM calls, 1 tool result\n" in result.stderr, "as the conversation shows"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, 128 + signal.SIGTERM)], ids=["ctrl-c", "sigterm"]
)
def test_signals_are_passed_on_and_so_is_the_status(running: Bench, number: signal.Signals, code: int) -> None:
    running.script(
        "agent.py",
        """
        import signal, sys, time
        signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    command = running.command("run", "--upstream", running.upstream.url, "--", sys.executable, "agent.py")
    process = subprocess.Popen(
        command,
        cwd=running.folder,
        env=running.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # no terminal, whoever runs the tests
    )
    with process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.wait(60) == code
    assert running.recorded()[1].ending is Ending.CANCELLED


def test_answers_are_those_of_the_model_that_was_chosen(running: Bench, agl: Agl) -> None:
    running.upstream.models = ["large", "small"]
    running.upstream.script(Say("OK"))
    asking = 'ask("small", HELLO)\nopen("reply", "w").write(str(ask("tiny", HELLO)))'
    running.script("agent.py", ASKING + asking)
    arguments = ("--upstream", running.upstream.url, "--", sys.executable, "agent.py")

    assert "name one with --model" in agl("run", *arguments).stderr
    assert "lists no model 'tiny'" in (running.folder / "reply").read_text()
    agl("run", "--model", "large", *arguments)

    assert [request.body["model"] for request in running.upstream.received] == ["small", *["large"] * 4]
    assert [t.policy for t in running.recorded()[2].transitions] == ["small"]
    assert [t.policy for t in running.recorded("capture-2")[2].transitions] == ["default", "default"]


def test_a_name_collects_recordings(running: Bench, agl: Agl) -> None:
    def record(name: str, word: str) -> str:
        code = f'{ASKING}\nask("any", HELLO | dict(content="{word}"))'
        return agl("run", "--upstream", running.upstream.url, "--name", name, "--", sys.executable, "-c", code).stderr

    for word in ("first", "second"):
        record("up", word)
    recorded = read_store(running.folder / "runs" / "up" / "store.sqlite")
    assert [rollout.restart for rollout in recorded.rollouts] == [0, 1]
    assert [call.request["messages"][0]["content"] for call in recorded.calls] == ["first", "second"]
    assert [path.name for path in (running.folder / "runs").iterdir()] == ["up"]

    (running.folder / "runs" / "trained").mkdir()
    (running.folder / "runs" / "trained" / "config.toml").write_text("config_version = 1\n")
    assert "recording to runs/trained-2" in record("trained", "third")


# `agl worker` where there is nothing but the agent: no engine, no algorithm, no rewards, no weights.


AGENT = f"""{ASKING}
import json

def solve(task):
    return ask("m", HELLO | dict(content=task["question"]))["choices"][0]["message"]["content"]

if __name__ == "__main__":
    print(json.dumps(solve(json.loads(os.environ["AGL_TASK"]))))
"""

CONFIG: dict[str, Any] = {
    "config_version": 1,
    "agent": {"entry": "an_agent:solve"},
    "tasks": {"train": {"source": "absent"}},
    "policies": {"default": {"model": {"path": "./absent"}}},
    "rewards": {"absent": {"weight": 1.0}},
    "credit": {"name": "absent"},
    "algorithm": {"name": "absent", "absent": {"epochs": 2}},
    "engine": {"name": "absent"},
    "trackers": {"absent": {}},
}
"""A run whose plugins and weights are on the trainer's machine alone."""


@pytest.mark.parametrize(
    "arguments", [(), ("--set", f"agent={{command = '{sys.executable} an_agent.py'}}")], ids=["entry", "command"]
)
async def test_a_worker_needs_the_agent_and_nothing_that_trains(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "an_agent.py").write_text(AGENT)
    (tmp_path / "train.toml").write_text(tomli_w.dumps(CONFIG))
    async with running_stack() as stack:
        stack.upstream.script(Say("four"))
        rollout = make.rollout("r", task=Task("t", {"question": "2 + 2?"}))
        key = {WORKER_KEY: stack.server.worker_key}
        attempt = await run_worker(stack, rollout, tmp_path, "train.toml", *arguments, **key)
        [call] = await stack.calls(attempt.key)
    assert (attempt.ending, attempt.result) == (Ending.FINISHED, "four")
    assert call.request["messages"][0]["content"] == "2 + 2?"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("run -- pythn agent.py", "no command 'pythn'"),
        ("run -- true", "no model server to forward to. Name one with --upstream"),
        ("run --upstream localhost:8000 -- true", "'localhost:8000' is not a URL"),
        ("run --upstream http://127.0.0.1:9/v1 -- true", "cannot be reached"),
        ("run --upstream http://h/v1 --upstream-key-env NO_SUCH_KEY -- true", "variable NO_SUCH_KEY"),
        ("run --config a.toml --model m -- true", "leave out --upstream"),
        ("worker", "Name the run's configuration, which names the agent, or its folder"),
        ("worker --server http://127.0.0.1:1", "--set agent.entry=MODULE:FUNCTION"),
        ("worker --set agent.entry=a:b", "with --server"),
        ("worker --server http://127.0.0.1:1 --set agent.entry=ab", "--set.*'module:function'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_recorded(
    arguments: str, problem: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AglError, match=problem):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert list(working_folder.iterdir()) == []
