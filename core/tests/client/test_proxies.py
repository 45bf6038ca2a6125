"""A proxy that the environment names is not asked for the way to the server, however the agent is run."""

from __future__ import annotations

import sys
import textwrap
import urllib.request
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_core.types import Ending
from agl_core.worker.agent import Agent, TaskPerAttempt, agent_environment, client_variables
from agl_core.worker.commands import CommandPerAttempt
from agl_core.worker.processes import ProcessPerAttempt

from .road import answer

HERE = Path(__file__).parent
NOBODY = "http://127.0.0.1:9"
"""Where no proxy listens."""


@pytest.fixture(autouse=True)
def bogus_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, NOBODY)
        monkeypatch.setenv(name.lower(), NOBODY)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


COMMAND = """
    import httpx, os

    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, headers=headers).raise_for_status()
"""


@pytest.mark.parametrize("way", ["task", "process", "command"])
async def test_calls_reach_the_server(way: str, workplace: Any, tmp_path: Path) -> None:
    root = workplace.stack.server.base_url
    with agent_environment(client_variables(root)):
        if way == "task":
            # Named for the attempt, as nothing is attached here that stamps requests.
            runner: Any = TaskPerAttempt(Agent("test:agent", answer, wants_context=True, is_async=True))
        elif way == "process":
            runner = ProcessPerAttempt("isolated_agents:solve", HERE, base_url=root)
        else:
            (tmp_path / "program.py").write_text(textwrap.dedent(COMMAND))
            runner = CommandPerAttempt([sys.executable, "program.py"], tmp_path, plugins=None)
        ended = await workplace.finish(workplace.start_runner(runner), [{"does": "tell"}])
    rollout, attempt = ended[0]
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
