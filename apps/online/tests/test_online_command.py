"""`agl serve`, `agl sessions` and their configuration: what is checked; keys, kills and deletion in real processes."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tomli_w
from agl_command import Agl, agl_in_process  # noqa: F401

from agl_core.config.load import load
from agl_core.errors import CapabilityError, ConfigError
from agl_core.testing.upstream import ScriptedUpstream
from agl_online.config import learn_section, online_section

from .policies.saved_runs import make_deployed

PAGE = Path(__file__).parents[3] / "docs" / "deploy-and-learn.md"
AGL = (sys.executable, "-c", "from agl_core.cli import main; main()")


@dataclass
class Place:
    """A folder with a configuration, and a model server for it."""

    folder: Path
    model: ScriptedUpstream
    agl: Agl
    """In this process; the server alone has one of its own."""

    def key(self, *arguments: str) -> str:
        ended = self.agl("sessions", "key", "support", "support", *arguments)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    @contextlib.contextmanager
    def serving(self) -> Iterator[tuple[subprocess.Popen[str], str]]:
        with subprocess.Popen(
            [*AGL, "serve", "support.toml"], cwd=self.folder, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None
                url = next(line for line in server.stdout if line.startswith("serving")).split()[-1]
                yield server, url
            finally:
                server.send_signal(signal.SIGTERM)
                server.communicate()

    def listed(self) -> list[dict[str, Any]]:
        ended = self.agl("sessions", "list", "support", "--json")
        assert ended.returncode == 0, ended.stderr
        sessions: list[dict[str, Any]] = json.loads(ended.stdout)
        return sessions


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
        answer = httpx.post(
            f"{url}/agl/v1/feedback",
            json={"call": replies[0].id, "rewards": {"thumbs": 1}, "id": "f"},
            headers={"Authorization": f"Bearer {deployment.key('--feedback')}"},
        )
        assert answer.status_code == 200, answer.text
        server.kill()
    with deployment.serving() as (server, url):
        again = httpx.post(
            f"{url}/agl/v1/feedback",
            json={"call": replies[0].id, "rewards": {"thumbs": 1}, "id": "f"},
            headers={"Authorization": f"Bearer {deployment.key('--feedback')}"},
        )
        assert again.json()["new"] is False
    by_name = {s["name"]: s for s in deployment.listed()}
    assert len(deployment.listed()) == 2
    assert by_name["talk"]["calls"] == 3
    assert [f["rewards"] for f in by_name["talk"]["feedback"]] == [{"thumbs": 1.0}]
    assert [s["calls"] for name, s in by_name.items() if name != "talk"] == [1]
    shown = deployment.agl("show", "support", by_name["talk"]["id"])
    assert shown.returncode == 0, shown.stderr
    assert all(text in shown.stdout for text in ("one", "two", "three"))
    listed = deployment.agl("rollouts", "support", "--mode", "use")
    assert by_name["talk"]["id"] in listed.stdout


def test_sessions_are_deleted_by_the_server_or_without_one(deployment: Place) -> None:
    def raw() -> bytes:
        return b"".join(f.read_bytes() for f in (deployment.folder / "runs" / "support").glob("store.sqlite*"))

    with deployment.serving() as (_, url):
        key = deployment.key()
        for name in ("Rapunzel", "Aschenputtel", "Dornröschen"):
            ask(url, key, name, f"talk-{name[0]}")
        first, second, third = [s["id"] for s in deployment.listed()]
        done = deployment.agl("sessions", "delete", "support", first)
        assert done.returncode == 0, done.stderr
        assert [s["id"] for s in deployment.listed()] == [second, third]
        assert b"Rapunzel" not in raw()
        unknown = deployment.agl("sessions", "delete", "support", f"use-{'0' * 24}-{'0' * 12}")
        assert unknown.returncode == 2
        assert "There is no session" in unknown.stderr
    done = deployment.agl("sessions", "delete", "support", second)
    assert done.returncode == 0, done.stderr
    assert [s["id"] for s in deployment.listed()] == [third]
    assert b"Aschenputtel" not in raw()
    unknown = deployment.agl("sessions", "delete", "support", "use-nothing")
    assert unknown.returncode == 2
    assert "nothing was deleted" in unknown.stderr


def test_what_is_wrong_is_said(deployment: Place) -> None:
    no_key = deployment.agl("sessions", "key", "support", "support")
    assert no_key.returncode == 2
    assert "not a run's folder" in no_key.stderr
    for change, says in (
        ("online.applications={}", "[online] applications"),
        ("online.redact=['(']", "no regular expression"),
        ("online.redact=['x*']", "matches an empty text"),
        ("online.applications={'a/b'=1}", "[online.applications] a/b"),
        ("online.upstream='nowhere'", "[online] upstream"),
        ("online.upstream_key_env='NO_SUCH_KEY'", "NO_SUCH_KEY is not set"),
        ("online.upstream='http://127.0.0.1:9/v1'", "cannot be reached"),
    ):
        refused = deployment.agl("serve", "support.toml", "--set", change)
        assert refused.returncode == 2, change
        assert says in refused.stderr, (change, refused.stderr)
    assert not (deployment.folder / "runs" / "support").exists()
    with deployment.serving():
        other = deployment.agl("sessions", "key", "support", "nobody")
        assert other.returncode == 2
        assert "no application 'nobody'. Known: support" in other.stderr
    trained = deployment.agl("train", "support.toml")
    assert (trained.returncode, "nothing to train" in trained.stderr) == (2, True)


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


def loaded(folder: Path, *overrides: str, **tables: Any) -> Any:
    (folder / "parts.py").write_text(RULES)
    config = {**LEARNING, **tables}
    (folder / "train.toml").write_text(tomli_w.dumps({name: part for name, part in config.items() if part is not None}))
    return load(folder / "train.toml", overrides)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"algorithm": {"name": "comparing"}}, ("only one of its kind", "reinforce++ or ppo")),
        ({"algorithm": {"name": "grpo"}}, ("earlier versions answered", "Set its importance_cap")),
        ({"async": {"max_staleness": 2}}, ("[async] has no place beside [learn]", "Leave [async] out")),
        ({"tasks": {"train": LEARNING["tasks"]["train"]}}, ("on held-out tasks", "[tasks.eval]")),
        ({"eval": {"modes": ["eval-greedy"]}}, ("sampled replies", "'eval-sampled' to eval.modes")),
        ({"policies": dict.fromkeys("ab", LEARNING["policies"]["default"])}, ("one policy, and there are 2",)),
        ({"engine": {"name": "poor"}}, ("'poor'", "cannot measure", "Use the engine torch")),
        ({"rewards": {}}, ("no rule scores any", '[rewards.users] rule = "feedback"')),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]) -> None:
    if "policies" in changes:
        changes["policies"]["a"] = {**changes["policies"]["a"], "agents": ["a"]}
    with pytest.raises(CapabilityError) as raised:
        learn_section(loaded(tmp_path, **changes))
    assert all(text in str(raised.value) for text in parts), raised.value


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"online": None}, "There is no [online]"),
        ({"online": {"applications": {"shop": 1}, "upstream": "http://a/v1"}}, "leave out online.upstream"),
        ({"learn": None}, "[online] needs `upstream`"),
    ],
)
def test_somebody_has_to_answer(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        online_section(loaded(tmp_path, **changes))
    assert says in str(raised.value)
