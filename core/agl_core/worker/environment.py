"""What the agent gets from the worker for one attempt: its context, and its environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

import orjson

from agl_core.capture import ActiveAttempt, Recording
from agl_core.wire.workers import Assignment
from agl_core.worker.agent import AgentContext

_NO_PROXY = ("no_proxy", "NO_PROXY")
OTHER_KEY = "ANTHROPIC_AUTH_TOKEN"
"""A second key beside ANTHROPIC_API_KEY, which some clients refuse; it would be the user's own."""
PLACEHOLDER_KEY = "agl"
"""The key of a client that is made outside any attempt; each of its requests gets the key of its attempt."""


def active_attempt(assignment: Assignment, base_url: str, recording: Recording) -> ActiveAttempt:
    """The attempt that the context of its code carries."""
    return ActiveAttempt(assignment.rollout, assignment.attempt, base_url, assignment.key, recording)


def agent_context(assignment: Assignment, base_url: str) -> AgentContext:
    return AgentContext(
        task_id=assignment.task_id,
        split=assignment.task_split,
        rollout=assignment.rollout,
        attempt=assignment.attempt,
        mode=assignment.mode,
        base_url=f"{base_url}{assignment.path}/v1",
        api_key=assignment.key,
    )


def client_variables(base_url: str, key: str = PLACEHOLDER_KEY) -> dict[str, str]:
    """The variables that send an unmodified agent's LLM client to `base_url`, the server's or an attempt's own.

    A proxy that the environment names is not used for the server.

    >>> client_variables("http://127.0.0.1:8000")["OPENAI_BASE_URL"]
    'http://127.0.0.1:8000/v1'
    """
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_BASE": f"{base_url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": key,
        **dict.fromkeys(_NO_PROXY, _without_proxy(urlsplit(base_url).hostname or "")),
    }


def _without_proxy(host: str) -> str:
    """The hosts that no proxy is used for: those that the environment names, and this one."""
    named = ",".join(os.environ.get(name, "") for name in _NO_PROXY).split(",")
    hosts = dict.fromkeys(each.strip() for each in (*named, host) if each.strip())
    return "*" if "*" in hosts else ",".join(hosts)


def attempt_variables(assignment: Assignment, base_url: str) -> dict[str, str]:
    """The environment of a process that runs this attempt and no other."""
    return {
        **client_variables(f"{base_url}{assignment.path}", assignment.key),
        "AGL_TASK": orjson.dumps(assignment.task_input).decode(),
        "AGL_ROLLOUT": assignment.rollout,
        "AGL_ATTEMPT": str(assignment.attempt),
    }


@contextmanager
def agent_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process's environment has these variables, and no `OTHER_KEY`."""
    before = {name: os.environ.get(name) for name in (*variables, OTHER_KEY)}
    os.environ.update(variables)
    os.environ.pop(OTHER_KEY, None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
