"""`agl serve`, `agl sessions` and their configuration: what is checked; keys, kills and deletion in real processes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tomli_w
from agl_command import Agl, Command, agl_in_process  # noqa: F401

from agl_core.config.load import load
from agl_core.errors import CapabilityError, ConfigError
from agl_core.testing.upstream import ScriptedUpstream
from agl_online.config import learn_section, online_section

from .policies.saved_runs import make_deployed

PAGE = Path(__file__).parents[3] / "docs" / "deploy-and-learn.md"


@dataclass
class Place:
    """A folder with a configuration, and a model server for it."""

    folder: Path
    model: ScriptedUpstream
    agl: Agl
    """In this process; the server alone has one of its own."""

    def run(self, *arguments: str) -> str:
        """The output of a command, which has to succeed."""
        ended = self.agl(*arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def refusal(self, *arguments: str) -> str:
        """The words of a command that refuses."""
        ended = self.agl(*arguments)
        assert ended.returncode == 2, arguments
        return ended.stderr

    def key(self, *options: str) -> str:
        return self.run("sessions", "key", "support", "support", *options)

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple[Command, str]]:
        server = Command.start("serve", "support.toml", log=self.folder / "log.txt")
        try:
            server.until(lambda: re.search(r"^serving.*\n", server.output(), re.MULTILINE))
            yield server, re.findall(r"^serving.* (\S+)$", server.output(), re.MULTILINE)[0]
        finally:
            server.process.terminate()
            server.wait()

    def listed(self) -> list[dict[str, Any]]:
        return json.loads(self.run("sessions", "list", "support", "--json"))

    def say(self, url: str, call: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.key('--feedback')}"}
        body = {"call": call, "rewards": {"thumbs": 1}, "id": "f"}
        said: dict[str, Any] = (
            httpx.post(f"{url}/agl/v1/feedback", json=body, headers=headers).raise_for_status().json()
        )
        return said


@pytest.fixture
def deployment(tmp_path: Path, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """With the configuration with which the page begins: it names no tasks and no model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with ScriptedUpstream() as model:
        page = PAGE.read_text().partition("```toml\n")[2].partition("```")[0]
        (tmp_path / "support.toml").write_text(page.replace("http://127.0.0.1:8300/v1", model.url))
        yield Place(tmp_path, model, agl)


def ask(url: str, key: str, text: str, name: str, **headers: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, default_headers={"x-agl-session": name, **headers}) as client:
        return client.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])


def test_no_session_is_lost_or_counted_twice_when_the_server_is_killed_between_calls(deployment: Place) -> None:
    replies = []
    with deployment.serving() as (server, url):
        key = deployment.key()
        begun = httpx.post(f"{url}/agl/v1/sessions", json={}, headers={"Authorization": f"Bearer {key}"}).json()
        replies.append(ask(url, key, "one", "talk"))
        server.kill()
    with deployment.serving() as (server, url):
        replies.append(ask(url, key, "two", "talk"))
        with openai.OpenAI(base_url=f"{url}{begun['path']}/v1", api_key=begun["key"]) as agent:
            agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "begun before the kill"}])
        replies.append(ask(url, key, "three", "talk", **{"x-agl-session-end": "1"}))
        assert deployment.say(url, replies[0].id)["new"]
        server.kill()
    with deployment.serving() as (server, url):
        assert not deployment.say(url, replies[0].id)["new"]
    by_name = {s["name"]: s for s in deployment.listed()}
    assert len(deployment.listed()) == 2
    assert by_name["talk"]["calls"] == 3
    assert [f["rewards"] for f in by_name["talk"]["feedback"]] == [{"thumbs": 1.0}]
    assert [s["calls"] for name, s in by_name.items() if name != "talk"] == [1]
    shown = deployment.run("show", "support", by_name["talk"]["id"])
    assert all(text in shown for text in ("one", "two", "three"))
    assert by_name["talk"]["id"] in deployment.run("rollouts", "support", "--mode", "use")


def test_sessions_are_deleted_by_the_server_or_without_one(deployment: Place) -> None:
    def raw() -> bytes:
        return b"".join(f.read_bytes() for f in (deployment.folder / "runs" / "support").glob("store.sqlite*"))

    with deployment.serving() as (_, url):
        key = deployment.key()
        for name in ("Rapunzel", "Aschenputtel", "Dornröschen"):
            ask(url, key, name, f"talk-{name[0]}")
        first, second, third = [s["id"] for s in deployment.listed()]
        deployment.run("sessions", "delete", "support", first)
        assert [s["id"] for s in deployment.listed()] == [second, third]
        assert b"Rapunzel" not in raw()
        unknown = f"use-{'0' * 24}-{'0' * 12}"
        assert "There is no session" in deployment.refusal("sessions", "delete", "support", unknown)
    deployment.run("sessions", "delete", "support", second)
    assert [s["id"] for s in deployment.listed()] == [third]
    assert b"Aschenputtel" not in raw()
    assert "nothing was deleted" in deployment.refusal("sessions", "delete", "support", "use-nothing")


def test_what_is_wrong_is_said(deployment: Place) -> None:
    assert "not a run's folder" in deployment.refusal("sessions", "key", "support", "support")
    for change, says in (
        ("online.applications={}", "[online] applications"),
        ("online.redact=['(']", "no regular expression"),
        ("online.redact=['x*']", "matches an empty text"),
        ("online.applications={'a/b'=1}", "[online.applications] a/b"),
        ("online.upstream='nowhere'", "[online] upstream"),
        ("online.upstream_key_env='NO_SUCH_KEY'", "NO_SUCH_KEY is not set"),
        ("online.upstream='http://127.0.0.1:9/v1'", "cannot be reached"),
    ):
        assert says in deployment.refusal("serve", "support.toml", "--set", change), change
    assert not (deployment.folder / "runs" / "support").exists()
    with deployment.serving():
        assert "no application 'nobody'. Known: support" in deployment.refusal("sessions", "key", "support", "nobody")
    assert "nothing to train" in deployment.refusal("train", "support.toml")


PLUGIN = """
from pathlib import Path
Path(__file__).with_name("it-ran").touch()
"""


@pytest.mark.parametrize(
    "command",
    [
        *("sessions list calc", "sessions delete calc s1", "sessions key calc shop", "versions list calc"),
        "policy export calc@10 --out policy",
    ],
)
def test_no_code_of_the_run_runs(tmp_path: Path, agl: Agl, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_deployed(tmp_path / "runs" / "calc", 10).run
    (run / "plugin.py").write_text(PLUGIN)
    config = run / "config.toml"
    config.write_text('plugins = ["plugin.py"]\n' + config.read_text())
    agl(*command.split())
    assert not (run / "it-ran").exists()


RULES = """
import agl_core
from agl_core import Capability, kinds

@agl_core.hookimpl
def register_components(register):
    built = lambda options, *context: options
    provides = {Capability.TOKEN_IDS, Capability.REFERENCE}
    register(kinds.ENGINE, "poor", built, provides=provides)
    register(kinds.ENGINE, "rich", built, provides=provides | {Capability.RECORDED_TEXTS})
    register(kinds.ALGORITHM, "easy", built)
    register(kinds.ALGORITHM, "comparing", built, needs={Capability.GROUPS})
"""
LEARNING: dict[str, Any] = {
    "config_version": 1,
    "plugins": ["parts.py"],
    "agent": {"entry": "an_agent:solve"},
    "tasks": {name: {"source": "jsonl", "path": "tasks.jsonl"} for name in ("train", "eval")},
    "policies": {"default": {"model": {"path": "."}}},
    "rewards": {"users": {"rule": "feedback", "modes": ["use"]}},
    "algorithm": {"name": "easy"},
    "engine": {"name": "rich"},
    "online": {"applications": {"shop": 1}},
    "learn": {"sessions_per_step": 4},
}
TWO_POLICIES = {"a": {"model": {"path": "."}, "agents": ["a"]}, "b": {"model": {"path": "."}}}


def loaded(folder: Path, *overrides: str, **tables: Any) -> Any:
    (folder / "parts.py").write_text(RULES)
    config = {**LEARNING, **tables}
    (folder / "train.toml").write_text(tomli_w.dumps({name: part for name, part in config.items() if part is not None}))
    return load(folder / "train.toml", overrides)


@pytest.mark.parametrize(
    ("section", "changes", "parts"),
    [
        (learn_section, {"algorithm": {"name": "comparing"}}, ("only one of its kind", "reinforce++ or ppo")),
        (learn_section, {"algorithm": {"name": "grpo"}}, ("earlier versions answered", "Set its importance_cap")),
        (learn_section, {"async": {"max_staleness": 2}}, ("[async] has no place beside [learn]", "Leave [async] out")),
        (learn_section, {"tasks": {"train": LEARNING["tasks"]["train"]}}, ("on held-out tasks", "[tasks.eval]")),
        (learn_section, {"eval": {"modes": ["eval-greedy"]}}, ("sampled replies", "'eval-sampled' to eval.modes")),
        (learn_section, {"policies": TWO_POLICIES}, ("one policy, and there are 2",)),
        (learn_section, {"engine": {"name": "poor"}}, ("'poor'", "cannot measure", "Use the engine torch")),
        (learn_section, {"rewards": {}}, ("no rule scores any", '[rewards.users] rule = "feedback"')),
        (online_section, {"online": None}, ("There is no [online]",)),
        (online_section, {"online": {**LEARNING["online"], "upstream": "http://a/v1"}}, ("leave out online.upstream",)),
        (online_section, {"learn": None}, ("[online] needs `upstream`",)),
    ],
)
def test_what_does_not_go_together_is_said(
    tmp_path: Path, section: Callable[[Any], object], changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    with pytest.raises((CapabilityError, ConfigError)) as raised:
        section(loaded(tmp_path, **changes))
    assert all(text in str(raised.value) for text in parts), raised.value
