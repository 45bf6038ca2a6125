"""Which server a worker or another command goes to, with which key, and past any proxy."""

from __future__ import annotations

import os
import sys
import textwrap
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agl_core.cli.worker import ServerAddress, find_server, is_over
from agl_core.client.agent import agent_environment, client_variables
from agl_core.client.processes import Command, CommandPerAttempt, ProcessPerAttempt
from agl_core.client.worker import LightningClient
from agl_core.errors import ConfigError, ServerError
from agl_core.types import Ending
from agl_core.wire import OPERATOR_KEY, WORKER_KEY, take_keys
from agl_server.http.keys import Keys

from .road import ASK, answer, as_tasks


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in (WORKER_KEY, OPERATOR_KEY):
        monkeypatch.delenv(name, raising=False)
    return SimpleNamespace(name="calc", runs=tmp_path)


def serve(config: Any, run: str, port: int, age: float) -> Keys:
    folder: Path = config.runs / run
    folder.mkdir()
    keys = Keys()
    keys.write(folder / "server.json", f"http://127.0.0.1:{port}")
    os.utime(folder / "server.json", (1e9 - age, 1e9 - age))
    return keys


def test_the_newest_server_of_the_name_unless_one_is_named(config: Any) -> None:
    assert find_server(config, None, None, {}) is None
    old, new = serve(config, "calc", 1, age=9), serve(config, "calc-2", 2, age=5)
    serve(config, "calculus", 3, age=1)
    (config.runs / "calc-3").mkdir()
    (config.runs / "calc-3" / "server.json").write_text("{")
    assert find_server(config, None, None, {}) == ServerAddress("http://127.0.0.1:2", new.worker)
    assert find_server(config, None, None, {}, OPERATOR_KEY) == ServerAddress("http://127.0.0.1:2", new.operator)
    assert find_server(config, None, "http://127.0.0.1:1/", {}) == ServerAddress("http://127.0.0.1:1", old.worker)
    assert find_server(config, config.runs / "calc", None, {}, OPERATOR_KEY) == ServerAddress(
        "http://127.0.0.1:1", old.operator
    )


def test_a_run_that_is_over_has_no_server_and_its_workers_can_know(config: Any) -> None:
    keys = serve(config, "calc", 1, age=9)
    server, file = ServerAddress("http://127.0.0.1:1", keys.worker), config.runs / "calc" / "server.json"
    assert not is_over(config, None, server)
    Keys.of_run(file).write(file, server.base_url, over=True)
    assert find_server(config, None, None, {}) is None
    assert is_over(config, None, server)
    assert is_over(config, config.runs / "calc", server)
    assert not is_over(config, None, ServerAddress("http://127.0.0.1:2", keys.worker)), "of that one nothing is known"
    Keys.of_run(file).write(file, server.base_url)
    assert find_server(config, None, None, {}) == server, "it was resumed, with the keys that it had"
    assert not is_over(config, None, server)


def test_a_key_of_the_environment_comes_first_and_one_has_to_be_known(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"set AGL_OPERATOR_KEY.*operator_key"):
        find_server(config, None, "http://elsewhere:1", {}, OPERATOR_KEY)
    monkeypatch.setenv(OPERATOR_KEY, " mine ")
    chosen = take_keys()
    assert find_server(config, None, "http://elsewhere:1", chosen, OPERATOR_KEY) == ServerAddress(
        "http://elsewhere:1", "mine"
    )
    with pytest.raises(ConfigError, match="set AGL_WORKER_KEY"):
        find_server(config, None, "http://elsewhere:1", chosen)


@pytest.mark.parametrize("url", ["elsewhere:1", "ftp://elsewhere", "http://", "http://a/b c"])
def test_what_is_no_address_is_said_at_once(config: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        find_server(config, None, url, {})


@pytest.mark.parametrize("name", [WORKER_KEY, OPERATOR_KEY])
@pytest.mark.parametrize("key", ["hush\nhush", "hush\x1b[1m", "hush\tx", "hüsh"])
def test_what_is_no_key_is_said_at_once_and_not_shown(
    config: Any, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's key, and the operator's; the server says the same of it."""
    monkeypatch.setenv(name, key)
    for where in (config, None):
        with pytest.raises(ConfigError, match=f"{name} has .* no HTTP header can carry") as error:
            find_server(where, None, "http://elsewhere:1", {name: key}, name)
        assert key[:4] not in str(error.value)
    with pytest.raises(ServerError, match=name) as refused:
        Keys.of_run(config.runs / "server.json")
    with pytest.raises(ConfigError, match="header can carry") as error:
        LightningClient("http://elsewhere:1", key)
    assert key[:4] not in str(error.value)
    assert key[:4] not in str(refused.value)


def test_a_key_may_have_what_a_header_may(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("a b", "~!@#$%^&*()_+=\"'\\", "x" * 500):
        monkeypatch.setenv(WORKER_KEY, f" {key}\n")
        assert find_server(config, None, "http://elsewhere:1", take_keys()) == ServerAddress("http://elsewhere:1", key)


# A proxy that the environment names is not asked for the way to the server, however the agent is run.


HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def bogus_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # Nobody listens there.
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("way", ["task", "process", "command"])
async def test_calls_reach_the_server(way: str, workplace: Any, tmp_path: Path) -> None:
    root = workplace.stack.server.base_url
    with agent_environment(client_variables(root)):
        if way == "task":
            # Named for the attempt, as nothing is attached here that stamps requests.
            runner: Any = as_tasks(answer)
        elif way == "process":
            runner = ProcessPerAttempt("isolated_agents:solve", HERE, base_url=root)
        else:
            (tmp_path / "program.py").write_text(textwrap.dedent(f"{ASK}\n    ask()"))
            runner = CommandPerAttempt(Command([sys.executable, "program.py"], tmp_path), plugins=None)
        [(rollout, attempt)] = await workplace.run(runner, [{"does": "tell"}])
    assert (rollout.ending, attempt.error) == (Ending.FINISHED, None)
    assert len(await workplace.stack.store.calls([attempt.key])) == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "corp.example, .internal"}, "corp.example,.internal,127.0.0.1"),
        ({"no_proxy": "a.example", "NO_PROXY": "b.example"}, "a.example,b.example,127.0.0.1"),
        ({"NO_PROXY": "127.0.0.1"}, "127.0.0.1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_what_the_environment_said_of_proxies_stays(
    settings: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    variables = client_variables("http://127.0.0.1:8000")
    assert (variables["NO_PROXY"], variables["no_proxy"]) == (expected, expected)
    with agent_environment(variables):
        # What clients make of it: urllib (and requests), httpx.
        assert urllib.request.proxy_bypass("127.0.0.1:8000")
        assert bool(urllib.request.proxy_bypass("other.example")) is (expected == "*")
        with httpx.Client() as client:
            direct = client._transport_for_url(httpx.URL("http://127.0.0.1:8000"))
            assert direct is client._transport
