"""`agl optimize` improves prompts: real rollouts over HTTP, by a scripted model and a scripted proposer.

The model answers a sum if its system prompt has enough of three words; the more terms, the more words. The proposer
adds one word to the prompt that it is shown.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from agl_command import Agl, Command, agl_in_process, working_folder  # noqa: F401
from testing_aids import Recorded, read_store

from agl_core.testing.scripts import Fail, Received, Say, Step
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Ending, Rollout

WORDS = ("carefully", "in", "digits")
SERVERS = ("proposer", "upstream")
AGENT = """
import os, httpx, agl_core

async def ask(system, task):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task["sum"]}]
    async with httpx.AsyncClient() as client:
        address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        reply = await client.post(address, json={"model": "any", "messages": messages}, headers=headers)
    return reply.json()["choices"][0]["message"]["content"]

async def solve(task):
    return await ask(agl_core.prompt("system", "the agent's own"), task)

def solve_in_a_process(task):
    import asyncio
    return asyncio.run(solve(task))

async def unaware(task):
    return await ask("Today is Monday. Answer. Be kind.", task)

async def broken(task):
    raise RuntimeError("no such tool")
"""
COMMAND = """
import os, json, urllib.request

text, task = json.loads(os.environ["AGL_PROMPTS"])["system"], json.loads(os.environ["AGL_TASK"])
messages = [{"role": "system", "content": text}, {"role": "user", "content": task["sum"]}]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "any", "messages": messages}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as reply:
    print(json.load(reply)["choices"][0]["message"]["content"])
"""


def model(received: Received) -> Step:
    """Adds if its prompt has enough words."""
    system = " ".join(str(item["content"]) for item in received.items if item["role"] == "system")
    terms = [int(number) for number in re.findall(r"\d+", received.said)]
    return Say(str(sum(terms)) if len(terms) - 1 <= sum(word in system.split() for word in WORDS) else "no idea")


def proposer(received: Received) -> Step:
    """The prompt that it is shown, with one word more."""
    shown = re.findall(r"```\n(.*?)\n```", received.said, re.DOTALL)[0]
    word = next((word for word in WORDS if word not in shown.split()), "please")
    return Say(f"```\n{shown} {word}\n```")


def given(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


@dataclass
class World:
    """A folder with an agent and its tasks, the model that answers it, and the one that proposes prompts."""

    folder: Path
    model: ScriptedUpstream
    proposer: ScriptedUpstream
    config: dict[str, Any]

    def write(self, **changes: Any) -> None:
        """The configuration, with these tables instead, of `[optimize]` these values; None: without."""
        config = {**self.config, **changes}
        if config["optimize"] is not None:
            config["optimize"] = given({**self.config["optimize"], **config["optimize"]})
        (self.folder / "better.toml").write_text(tomli_w.dumps(given(config)))

    def prompts(self) -> dict[str, Any]:
        """Those that the run found."""
        return tomllib.loads((self.folder / "runs" / "better" / "prompts.toml").read_text())["prompts"]

    def rollouts(self) -> list[Rollout]:
        """Those of the run that were not broken off."""
        return [r for r in self.recorded().rollouts if r.ending is Ending.FINISHED]

    def recorded(self) -> Recorded:
        return read_store(self.folder / "runs" / "better" / "store.sqlite")


@pytest.fixture
def world(working_folder: Path) -> Iterator[World]:  # noqa: F811
    (working_folder / "adder.py").write_text(AGENT)
    (working_folder / "command.py").write_text(COMMAND)
    for name, count in (("train", 16), ("eval", 4)):
        sums = [" + ".join("1" * (2 + n % 3)) for n in range(count)]
        lines = [json.dumps({"input": {"sum": terms}, "answer": str(len(terms) // 4 + 1)}) for terms in sums]
        (working_folder / f"{name}.jsonl").write_text("\n".join(lines))
    with ScriptedUpstream() as answering, ScriptedUpstream() as proposing:
        answering.answer, proposing.answer = model, proposer
        config = {
            "config_version": 1,
            "name": "better",
            "agent": {"entry": "adder:solve"},
            "tasks": {name: {"source": "jsonl", "path": f"{name}.jsonl"} for name in ("train", "eval")},
            "rewards": {"right": {"rule": "exact_match", "field": "answer"}},
            "prompts": {"system": {"text": "Answer."}},
            "optimize": {
                "proposer": {"base_url": f"{proposing.root}/v1", "model": "served"},
                "upstream": {"base_url": f"{answering.root}/v1", "model": "served"},
                "budget": 100,
            },
        }
        yield World(working_folder, answering, proposing, config)


def test_the_words_that_help_are_found(world: World, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {name: {**world.config["optimize"][name], "api_key_env": f"KEY_OF_{name}"} for name in SERVERS}
    world.write(optimize=servers)
    for name in SERVERS:
        monkeypatch.setenv(f"KEY_OF_{name}", f"for-{name}")

    done = agl("optimize", "better.toml")

    assert done.returncode == 0, done.stderr
    assert set(WORDS) <= set(world.prompts()["system"]["text"].split())
    [(before, after)] = re.findall(r"eval\W+([\d.]+)\W+([\d.]+)", done.stdout)
    assert (float(before), float(after)) == (0.0, 1.0)
    assert {r.headers["Authorization"] for r in world.proposer.received} == {"Bearer for-proposer"}
    assert {r.headers["Authorization"] for r in world.model.received} == {"Bearer for-upstream"}
    assert {r.body["model"] for r in (*world.model.received, *world.proposer.received)} == {"served"}


@pytest.mark.parametrize(
    ("agent", "prompt", "around"),
    [
        ({"entry": "adder:solve_in_a_process"}, {"text": "Answer."}, "{}"),
        ({"command": [sys.executable, "command.py"], "attach": False}, {"text": "Answer."}, "{}"),
        ({"entry": "adder:unaware"}, {"replace": "Answer."}, "Today is Monday. {} Be kind."),
    ],
    ids=["process", "command", "replaced by the gateway"],
)
def test_every_agent_gets_the_candidates_within_the_budget(
    world: World, agl: Agl, agent: Any, prompt: Any, around: str
) -> None:
    world.write(agent=agent, prompts={"system": prompt}, optimize={"budget": 16})

    done = agl("optimize", "better.toml")

    assert done.returncode == 0, done.stderr
    assert "the budget of 16 rollouts is spent" in done.stdout
    rollouts = world.rollouts()
    assert len([r for r in rollouts if "-train" in r.group]) <= 16
    sent = {str(r.items[0]["content"]) for r in world.model.received if r.items[0]["role"] == "system"}
    assert sent == {around.format(r.prompts["system"]) for r in rollouts} > {around.format("Answer. carefully")}
    assert sent == {call.request["messages"][0]["content"] for call in world.recorded().calls}
    shown = agl("show", "better", next(r.id for r in rollouts if r.prompts["system"] == "Answer. carefully"))
    assert "prompt system: Answer. carefully" in shown.stdout


def test_nothing_is_asked_of_the_proposer_that_no_rollout_could_try(world: World, agl: Agl) -> None:
    """A new prompt needs 3 rollouts for its minibatch and 1 for a score."""
    world.write(optimize={"budget": 7})

    done = agl("optimize", "better.toml")

    assert "the budget of 7 rollouts is spent but for 3, too few to go on\n" in done.stdout
    assert "rollouts     4, for 1 candidates" in done.stdout
    assert world.proposer.received == []


def test_a_search_that_finds_nothing_better_keeps_the_prompt(world: World, agl: Agl) -> None:
    count = iter(range(1000))
    world.proposer.answer = lambda received: Say(f"```\nuseless \ud800 {next(count)}\n```")
    world.write(optimize={"budget": 20})

    assert agl("optimize", "better.toml").returncode == 0

    assert world.prompts()["system"]["text"] == "Answer."


def begun(world: World, requests: int) -> Command:
    """A search in a process of its own, once the model has had so many requests."""
    command = Command.start("optimize", "better.toml", log=world.folder / "log.txt")
    command.until(lambda: len(world.model.received) >= requests)
    return command


def test_a_killed_search_goes_on_without_repeating_a_rollout(world: World, agl: Agl) -> None:
    world.write(optimize={"budget": 24})
    begun(world, 14).kill()
    before, asked = {r.id for r in world.rollouts()}, len(world.proposer.received)
    assert before

    done = agl("optimize", "--resume", "better")

    assert done.returncode == 0, done.stderr
    tried = Counter((r.prompts["system"], r.position, r.task.split, r.group.split("-")[2]) for r in world.rollouts())
    assert before < {r.id for r in world.rollouts()}
    assert set(tried.values()) == {1}
    assert len({str(r.body) for r in world.proposer.received}) >= len(world.proposer.received) - 1
    assert len(world.proposer.received) > asked
    resumed = world.prompts()
    world.write(name="whole", optimize={"budget": 24})
    assert agl("optimize", "better.toml").returncode == 0
    assert tomllib.loads((world.folder / "runs" / "whole" / "prompts.toml").read_text())["prompts"] == resumed


def test_ctrl_c_keeps_what_was_found(world: World, agl: Agl) -> None:
    world.write(optimize={"budget": 40})
    command = begun(world, 20)
    command.process.send_signal(signal.SIGINT)

    assert command.wait(60) == 130, command.output()
    assert "(chosen)" in command.output()
    assert agl("optimize", "--resume", "better").returncode == 0


POLICIES = {"default": {"model": {"path": "weights"}}}
PLUGIN = """
import agl_core
from agl_core import kinds
from agl_prompts.config import ModelServer, ServedModel

@agl_core.hookimpl
def register_components(register):
    server = ModelServer(base_url="URL", model="served")
    register(kinds.ENGINE, "other", lambda options, context: ServedModel(server, "none", context.policies))
    register(kinds.ALGORITHM, "none", lambda options: options)
"""


def test_the_engine_of_the_run_answers_unless_an_upstream_is_named(world: World, agl: Agl) -> None:
    (world.folder / "engine.py").write_text(PLUGIN.replace("URL", f"{world.model.root}/v1"))
    (world.folder / "weights").mkdir()
    parts = {"engine": {"name": "other"}, "algorithm": {"name": "none"}, "plugins": ["engine.py"]}
    world.write(**parts, policies=POLICIES, optimize={"upstream": None, "budget": 30})

    done = agl("optimize", "better.toml")

    assert done.returncode == 0, done.stderr
    assert "carefully" in world.prompts()["system"]["text"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"optimize": None, "policies": POLICIES}, "add the table [optimize]"),
        ({"prompts": None}, "a table [prompts.NAME] for each prompt"),
        ({"prompts": {"system": {"replace": "Not there."}}, "agent": {"entry": "adder:unaware"}}, "nothing to replace"),
        ({"prompts": {"system": {"text": "Answer.", "agents": ["adder"]}}}, "there is no `replace`"),
        ({"prompts": {"system": {}}}, "needs a text, or what it is to replace"),
        ({"agent": {"entry": "adder:broken"}}, "The search cannot begin: "),
        ({"prompts": "nowhere.toml"}, "nowhere.toml does not exist"),
        ({"optimize": {"budgets": 3}}, "budget"),
    ],
)
def test_mistakes_are_named(world: World, agl: Agl, changes: dict[str, Any], says: str) -> None:
    world.write(**changes)

    done = agl("optimize", "better.toml")

    assert done.returncode == 2
    assert says in done.stderr


def test_a_proposer_that_refuses_is_named_and_its_failures_are_tried_again(
    world: World, agl: Agl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agl_prompts.config.RETRY_WAITS", (0.01,) * 3)
    world.write()
    world.proposer.script(Fail(503), Fail(429), Fail(401))

    done = agl("optimize", "better.toml")

    assert done.returncode == 2
    assert "[optimize.proposer]: the model 'served'" in done.stderr
    assert "401" in done.stderr
    assert world.prompts() == world.config["prompts"], "the best so far"
    assert agl("optimize", "--resume", "better").returncode == 0
    assert set(WORDS) <= set(world.prompts()["system"]["text"].split())
