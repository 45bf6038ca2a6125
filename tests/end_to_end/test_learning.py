"""A deployed policy gets better from use: real users' clients, real processes, and each of them is killed."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
from agl_command import Command
from anyio.from_thread import start_blocking_portal

from agl_core.config.load import load
from agl_core.types import AttemptKey, Mode, RolloutState
from agl_online.config import learn_section
from agl_server.store.sqlite import SqliteStore

from .conftest import CALC, Agl

USERS, MOST_CALLS = 16, 4
PAGE = (Path(__file__).parents[2] / "docs" / "deploy-and-learn.md").read_text()
TABLES = "\n".join(table for table in re.findall(r"^```toml\n(.*?)^```$", PAGE, re.M | re.S) if "[learn" in table)
"""The tables that the page appends to the example's configuration."""
LEARN = re.findall(r"--set (\S+)", PAGE)
"""The settings of its command."""


def configuration(folder: Path) -> Path:
    """The calc example, deployed."""
    text = re.sub(r"^name = .*$", f'name = "online"\nfolder = "{CALC.parent}"', CALC.read_text(), flags=re.M, count=1)
    text = text.replace('plugins = ["tasks.py"]', f'plugins = ["{CALC.parent / "tasks.py"}"]')
    text = re.sub(r"\[tasks.eval_templates\].*?\n\n", "", text, flags=re.S)
    file = folder / "online.toml"
    file.write_text(f"{text}\n{TABLES}")
    return file


def test_the_page_makes_a_learner_of_the_example(tmp_path: Path) -> None:
    loaded = load(configuration(tmp_path), LEARN)
    learn = learn_section(loaded)
    assert (learn.sessions_per_step, learn.propose_every, learn.canary.share) == (32, 4, 0.5)
    assert f"/{loaded.config.train.steps}  reward 0.281  {learn.sessions_per_step} sessions" in PAGE
    assert f"It answers {learn.canary.share:.0%} of the sessions" in PAGE


class Deployed:
    """The learner, and simulated users of it, by the official client in a thread of their own.

    They ask the problems of the example's training split, run the calculator when the model asks for it, and give a
    thumbs up if the answer is right. While the server is away they try again.
    """

    def __init__(self, agl: Agl) -> None:
        self.agl, self.folder = agl, agl.folder
        self.run = agl.folder / "runs" / "online"
        self.file = configuration(agl.folder)
        self.address: dict[str, str] = {}
        self.talks: list[dict[str, Any]] = []
        """Each finished session."""

    def learn(self) -> Command:
        """Start the command, and tell the users where it is."""
        command = self.agl.start("learn", self.file, *(f"--set={setting}" for setting in LEARN))
        command.until(lambda: "use: " in command.output())
        [url] = re.findall(r"use: (\S+)/v1", command.output())
        self.address = {"url": url, "key": self.key(), "feedback": self.key("--feedback")}
        return command

    def key(self, *options: str) -> str:
        return self.agl.run("sessions", "key", self.run, "support", *options).strip()

    @property
    def decisions(self) -> list[dict[str, Any]]:
        file = self.run / "versions.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def became(self, state: str) -> bool:
        return any(decision["state"] == state and decision["step"] for decision in self.decisions)

    @property
    def steps(self) -> int:
        return max((line["step"] for line in self.agl.metrics("online") if line["kind"] == "train"), default=0)

    async def use(self) -> None:
        numbers = itertools.count()

        async def user() -> None:
            for number in numbers:
                while not self.address or not await self.talk(http, self.address, number):  # noqa: ASYNC110  of another thread
                    await asyncio.sleep(0.2)

        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await asyncio.gather(*(user() for _ in range(USERS)))

    async def talk(self, http: httpx.AsyncClient, at: dict[str, str], number: int) -> bool:
        """One session, and what was said of it; whether the server was there for all of it."""
        from calculator import SYSTEM_PROMPT, calculator
        from langchain_core.utils.function_calling import convert_to_openai_tool
        from problems import Split, problem

        from agl_rewards import last_number

        async def post(route: str, key: str, **body: Any) -> Any:
            headers = {"Authorization": f"Bearer {key}"}
            return (await http.post(f"{at['url']}/agl/v1/{route}", json=body, headers=headers)).raise_for_status()

        sum_, name, headers = problem(Split.TRAIN, 7, number), f"talk-{number}", {"x-agl-session": f"talk-{number}"}
        client = openai.AsyncOpenAI(
            api_key=at["key"], base_url=f"{at['url']}/v1", http_client=http, max_retries=0, default_headers=headers
        )
        tools: Any = [convert_to_openai_tool(calculator)]
        messages: list[Any] = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": sum_.question},
        ]
        try:
            for _ in range(MOST_CALLS):
                reply = await client.chat.completions.create(model="default", messages=messages, tools=tools)
                message: Any = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                for call in message.tool_calls:
                    try:
                        result = calculator.invoke(json.loads(call.function.arguments))
                    except Exception as error:
                        result = f"Error: {error}"
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            right = last_number(message.content) == float(sum_.result)
            await post("sessions/end", at["key"], session=name)
            feedback = {"session": name, "rewards": {"thumbs": float(right)}, "id": f"said-{number}"}
            recorded = (await post("feedback", at["feedback"], **feedback)).json()
        except (openai.APIError, httpx.HTTPError):
            return False
        self.talks.append({"session": recorded["session"], "name": name, "right": right})
        return True


@pytest.fixture
def deployed(agl: Agl, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    monkeypatch.syspath_prepend(str(CALC.parent))
    return Deployed(agl)


@pytest.fixture
def users(deployed: Deployed) -> Iterator[Any]:
    """Until they are cancelled."""
    with start_blocking_portal() as portal:
        using = portal.start_task_soon(deployed.use)
        yield using
        using.cancel()


@pytest.mark.storm
def test_a_policy_that_is_used_gets_better_though_its_processes_are_killed(deployed: Deployed, users: Any) -> None:
    first = deployed.learn()
    first.until(lambda: deployed.steps >= 1)
    children = psutil.Process(first.process.pid).children()
    engines = [child for child in children if "agl_torch" in child.cmdline()]
    assert len(engines) == 2, "one trains, and one answers sessions"
    for engine in engines:
        known, steps = len(deployed.talks), deployed.steps
        engine.kill()
        first.until(lambda known=known, steps=steps: len(deployed.talks) >= known + 20 and deployed.steps > steps)
    second = deployed.agl.start("learn", deployed.file, *(f"--set={setting}" for setting in LEARN))
    assert second.wait() == 2
    assert "Another process has the run" in second.output()
    first.until(lambda: deployed.steps >= 7 and deployed.became("passed"))
    first.kill()

    again = deployed.learn()
    again.until(lambda: deployed.became("stable") and deployed.steps >= 10)
    known = len(deployed.talks)
    again.until(lambda: len(deployed.talks) >= known + 200)
    users.cancel()
    again.process.send_signal(signal.SIGINT)
    assert again.wait() == 130, again.output()
    assert "agl learn" in again.output().splitlines()[-1]

    rights = [talk["right"] for talk in deployed.talks]
    assert sum(rights[-200:]) - sum(rights[:200]) > 20, "users are better served than in the beginning"
    asyncio.run(check_records(deployed))


async def check_records(deployed: Deployed) -> None:
    """Every session that a user finished is there, once, and was trained on in one step at most."""
    async with SqliteStore(deployed.run / "store.sqlite", read_only=True) as store:
        sessions = {session.id: session for session in await store.rollouts(mode=Mode.USE)}
        keys = [AttemptKey(id, 0) for id in sessions]
        judged = Counter(annotation.rollout for annotation in await store.annotations(keys))
        records = await store.training_records(keys)
    names = Counter(session.task.metadata["session"] for session in sessions.values() if judged[session.id])
    for talk in deployed.talks:
        assert names[talk["name"]] == 1
        assert judged[talk["session"]] == 1
        assert sessions[talk["session"]].state is RolloutState.DONE
    used: dict[str, set[int]] = {}
    for record in records:
        used.setdefault(record.rollout, set()).add(record.step)
    assert used
    assert all(steps == {sessions[id].step} for id, steps in used.items())
    per_step = Counter(sessions[id].step for id in used if judged[id])
    assert all(per_step[step] >= 32 for step in range(1, deployed.steps + 1)), per_step
