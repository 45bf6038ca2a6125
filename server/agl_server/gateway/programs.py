"""Command-line agents that agl knows: what they say of a call, in its instructions, its metadata and its headers.

Housekeeping is told here from a program's own words. `agl_server.training.lineages` tells it from structure, once all
calls of an attempt are known. Compactions and sub-agents are work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, NamedTuple

from agl_core.capture.status import message_text
from agl_core.types import Housekeeping, Json
from agl_core.types.forms import parse_if_json

_PROGRAMS = re.compile(r"(claude)-cli/|(codex)[\w-]*/|(opencode)/|(qwen)code/", re.IGNORECASE)
"""Beginnings of the header User-Agent; aider and mini-swe-agent send their library's."""
_OWN_PURPOSE = {
    "claude": r"Generate a (concise, sentence-case title|short kebab-case name) \("
    r"|You are coming up with a succinct title and git branch"
    r"|Write a short summary label describing what these tool calls",
    "opencode": r"You are a title generator\. You output ONLY"
    r"|Summarize what was done in this conversation\. Write like a pull request",
    "qwen": r"You are now acting as the managed memory extraction|You generate session recaps for a programming",
    "aider": r"You are an expert software engineer that generates concise, (one-line )?Git commit messages",
}
"""Beginnings of instructions, seen in Claude Code 2.1, opencode 1.18, Qwen Code 0.15 and aider 0.86.

Each counts whoever sends it: Qwen Code has Claude Code's first one too, and aider has no name.
"""
_OWN_PURPOSES = re.compile("|".join(_OWN_PURPOSE.values()))
_LAST_MESSAGE = re.compile(r"\[SUGGESTION MODE: |The user stepped away and is coming back\. Recap")
"""Beginnings of Claude Code's messages that ask for a suggestion or a recap, at the end of the user's conversation."""
_CLAUDE_CLASS = "x-claude-code-request-class"
"""Header of Claude Code, if CLAUDE_CODE_GATEWAY_HINT_HEADERS is set: main, subagent, compaction, auxiliary, …"""
_CODEX = frozenset({"memory", "prewarm", "thread_title", "memory_consolidation", "guardian_review"})
"""Values of `request_kind` and `thread_source` in Codex's metadata (0.171)."""


class Marks(NamedTuple):
    """The words of a program on one of its calls."""

    program: str | None = None
    agent: str | None = None
    """The sub-agent's name; None for the program's main agent."""
    housekeeping: Housekeeping | None = None


def marks_of(request: Mapping[str, Json], headers: Mapping[str, str]) -> Marks:
    """The marks of a program on a request, as it is recorded.

    >>> marks_of({"messages": []}, {"user-agent": "claude-cli/2.1.332 (external, cli)"}).program
    'claude'
    >>> instructions = {"role": "system", "content": "You are a title generator. You output ONLY"}
    >>> str(marks_of({"messages": [instructions]}, {}).housekeeping)
    'program'
    """
    known = _PROGRAMS.match(headers.get("user-agent", ""))
    program = known[known.lastindex or 0].lower() if known else None
    metadata = _codex_metadata(request)
    is_own = any(map(_OWN_PURPOSES.match, _instructions(request["messages"])))
    is_own |= headers.get(_CLAUDE_CLASS) == "auxiliary"
    is_own |= not _CODEX.isdisjoint((metadata.get("request_kind"), metadata.get("thread_source")))
    if program == "claude":
        last = [message_text(message.get("content")).strip() for message in request["messages"][-1:]]
        is_own |= any(map(_LAST_MESSAGE.match, last))
    agent = metadata.get("agent_name")
    if not isinstance(agent, str) or agent.strip("/") in ("", "root"):
        is_sub_agent = "subagent" in (metadata.get("thread_source"), headers.get(_CLAUDE_CLASS))
        agent = headers.get("x-claude-code-agent-type", "sub-agent") if is_sub_agent else None
    return Marks(program, agent, Housekeeping.PROGRAM if is_own else None)


def _instructions(messages: list[dict[str, Any]]) -> Iterator[str]:
    """The texts of the system messages at the beginning, each part by itself."""
    for message in takewhile(lambda message: message["role"] in ("system", "developer"), messages):
        content = message.get("content")
        yield from [content] if isinstance(content, str) else (message_text([part]) for part in content or ())


def _codex_metadata(request: Mapping[str, Json]) -> Mapping[str, Json]:
    sent = request.get("client_metadata")
    metadata = parse_if_json(sent.get("x-codex-turn-metadata")) if isinstance(sent, Mapping) else None
    return metadata if isinstance(metadata, Mapping) else {}
