"""Aids for tests of several packages, of no use to plugin authors: clients that do not wait, privacy, pages.

Tests of packages import it as `testing_aids` (pyproject.toml's `pythonpath`), those in tests/ relatively.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import pkgutil
import re
import socket
import ssl
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from agl_core.store import Record
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Attempt, Call, Episode, Rollout, Run, TrainingRecord
from agl_server.store.sqlite import SqliteStore

if TYPE_CHECKING:  # Oracles are compared where no client is installed.
    from agl_server.testing import LeasedAttempt, Stack


@contextlib.contextmanager
def fast_clients() -> Iterator[None]:
    """Clients retry at once, and take no time to be made."""
    with contextlib.ExitStack() as patches:
        patches.enter_context(certificates_read_once())
        for name in ("openai._base_client", "anthropic._base_client"):
            with contextlib.suppress(ModuleNotFoundError):
                client = importlib.import_module(name)
                for delay in ("INITIAL_RETRY_DELAY", "MAX_RETRY_DELAY"):
                    patches.enter_context(mock.patch.object(client, delay, 0.001))
        yield


@contextlib.contextmanager
def certificates_read_once() -> Iterator[None]:
    """A client reads all certificates when it is made, which takes 40 ms: here the first one reads them for all."""
    create, contexts = ssl.create_default_context, dict[Any, ssl.SSLContext]()

    def once(purpose: ssl.Purpose = ssl.Purpose.SERVER_AUTH, **given: Any) -> ssl.SSLContext:
        if purpose is not ssl.Purpose.SERVER_AUTH:
            return create(purpose, **given)
        key = (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"), *sorted(given.items()))
        if key not in contexts:
            contexts[key] = create(purpose, **given)
        return contexts[key]

    with mock.patch.object(ssl, "create_default_context", once):
        yield


NO_TELEMETRY = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    # CrewAI asks no questions about traces.
    "CREWAI_TESTING": "true",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""For `os.environ`, before a framework is imported: some read it only then."""

_OURS = ("127.0.0.1", "localhost", "::1", None)


@contextlib.contextmanager
def only_this_machine() -> Iterator[None]:
    """Meanwhile the name of another machine is not found; AssertionError at the end if one was looked up."""
    hosts: list[Any] = []
    look_up = socket.getaddrinfo

    def watched(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in _OURS:
            hosts.append(host)
            raise OSError(f"{host} is another machine")
        return look_up(host, *args, **kwargs)

    with mock.patch.object(socket, "getaddrinfo", watched):
        yield
    assert not hosts, f"names of other machines were looked up: {hosts}"


@contextlib.contextmanager
def instrumenting() -> Iterator[Callable[[Any, Any], None]]:
    """A function that instruments the client with an instrumentor; at the end all of it is undone.

    Instrumentors leave some of what they patched: of OpenLLMetry's, `create` and `parse` of the async resources.
    """
    before = resource_methods()
    used: list[Any] = []

    def instrument(kind: Any, provider: Any) -> None:
        used.append(kind())
        used[-1].instrument(tracer_provider=provider)

    try:
        yield instrument
    finally:
        for instrumentor in reversed(used):
            instrumentor.uninstrument()
        for (kind, name), value in before.items():
            if vars(kind).get(name) is not value:
                setattr(kind, name, value)


def resource_methods() -> dict[tuple[type, str], Any]:
    """The methods of the client's classes that make requests, as they are now."""
    import openai.resources

    infos = pkgutil.walk_packages(openai.resources.__path__, "openai.resources.")
    modules = [importlib.import_module(info.name) for info in infos]
    kinds = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    return {
        (kind, name): value
        for kind in kinds
        if kind.__module__.startswith("openai.resources.")
        for name, value in vars(kind).items()
        if not name.startswith("__")
    }


def blocks(page: Path, language: str = "") -> list[str]:
    """The page's code blocks that are marked with this language; without one, those that show what is printed."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for kind, text in blocks if kind == language]


def run_snippets(page: Path) -> dict[str, Any]:
    """Run the page's Python blocks one after the other, in one namespace: its names afterwards."""
    names: dict[str, Any] = {}
    for snippet in blocks(page, "python"):
        exec(compile(snippet, page.name, "exec"), names)
    return names


def run_command(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Run a command that has to succeed, with these variables more; what it printed."""
    options: dict[str, Any] = {"cwd": cwd, "env": {**os.environ, **environment}, "stdin": subprocess.DEVNULL}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(program: str, cwd: Path | None = None, **environment: str) -> str:
    """Run a program in a Python process of its own, where nothing is imported yet; it has to succeed."""
    return run_command(sys.executable, "-c", textwrap.dedent(program), cwd=cwd, **environment)


@dataclass(frozen=True)
class Recorded:
    """What is in a store."""

    runs: list[Run]
    rollouts: list[Rollout]
    attempts: list[Attempt]
    calls: list[Call]
    training_records: list[TrainingRecord]


def read_store(path: Path) -> Recorded:
    """Everything in a store now, also while others have it open; where no event loop runs."""

    async def read() -> Recorded:
        async with SqliteStore(path, read_only=True) as store:
            runs, rollouts = await store.runs(), await store.rollouts()
            attempts = await store.attempts(*(rollout.id for rollout in rollouts))
            keys = [attempt.key for attempt in attempts]
            return Recorded(runs, rollouts, attempts, await store.calls(keys), await store.training_records(keys))

    return asyncio.run(read())


def write_store(path: Path, *records: Record) -> None:
    """Put records into a store where no event loop runs."""

    async def put() -> None:
        async with SqliteStore(path) as store:
            await store.put(*records)

    asyncio.run(put())


async def play(stack: Stack, run: Callable[[], Any], *script: Any) -> Episode:
    """The episode of what `run` does while the model says this; in a thread, unless it is a coroutine function."""
    stack.upstream.script(*script)
    attempt = await stack.attempt()
    with attempt.running():
        await (run() if inspect.iscoroutinefunction(run) else asyncio.to_thread(run))
    episode = await attempt.close()
    assert episode.unjoined == ()
    return episode


async def check_snippets(stack: Stack, attempt: LeasedAttempt, page: Path, agents: list[str]) -> None:
    """A page's two Python blocks run in an attempt as these agents, whose model asks for the tool `add`."""
    assert len(blocks(page, "python")) == 2
    stack.upstream.script(CallTools([("add", {"a": 1, "b": 2})]), Say("3"))
    url, key = stack.url(attempt.key), stack.key(attempt.key)
    addresses = {"OPENAI_BASE_URL": url, "OPENAI_API_BASE": url, "OPENAI_API_KEY": key}
    with mock.patch.dict(os.environ, addresses), attempt.running():
        await asyncio.to_thread(run_snippets, page)  # They start an event loop of their own.
    assert await attempt.agents() == agents
    (result,) = (await attempt.close()).transitions[0].tool_results
    assert (result.tool, str(result.status), result.result) == ("add", "ok", "3")


def weather(city: str) -> str:
    """Weather of a city."""
    return "22 °C"


def tools_by_call(episode: Episode) -> list[tuple[Any, ...]]:
    """Of each call, the agent, and each tool that it asked for with its status."""
    return [(t.agent, *((result.tool, str(result.status)) for result in t.tool_results)) for t in episode.transitions]
