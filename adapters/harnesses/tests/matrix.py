"""Scenarios of command-line agents, and how the model asks each program for its tools.

A conversation is answered by what it says: the prompt has `RUN name`, and the number of tool results that came decides
the next step.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_core.testing.scripts import CallTools, Hold, Received, Say, Step

ToolCall = tuple[str, dict[str, Any]]

SCENARIOS = {
    "edit": "it edits a file with its own tool",
    "tests": "a command fails, then passes",
    "long": "a command prints 200 kB",
    "parallel": "two tools in one reply",
    "sub-agent": "it has a sub-agent run a command",
    "compaction": "its history is full, and it asks for a summary",
    "two at once": "two attempts in one workspace",
    "killed": "its process is killed during a call",
    "hangs": "a reply never comes, and time is up",
}
FINAL = "All of it is done."
SUMMARY, SUBTASK = "A summary so far", "This is a part of RUN"


@dataclass(frozen=True)
class Tools:
    """The tools of one program, as its model calls them."""

    shell: Callable[[str], ToolCall]
    edit: Callable[[str, str], ToolCall]
    """Writes a new file: its path, its text."""
    shell_name: str
    """Who offers it is no title and no summary."""
    sub_agent: Callable[[str], ToolCall] | None = None
    """Has a sub-agent follow a prompt."""
    summarises: str = ""
    """A regular expression for the message that asks for a summary of the history."""
    writes_files: bool = False
    """Its model has no tools: a reply has whole files."""
    submits: bool = False
    """It ends by a command, not by an answer."""
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    failed: str = "error"
    """The status of a command that fails."""
    loses_result: bool = False
    """Its compaction takes the place of the last tool call's result."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Reservations about scenarios that it passes."""
    gaps: Mapping[str, str] = field(default_factory=dict)
    """Scenarios that this program has not, and why."""


_NO_TOOLS = "its model has no tools: it writes files, and aider runs the test command"
TOOLS: dict[str, Tools] = {
    "claude-code": Tools(
        shell=lambda command: ("Bash", {"command": command, "description": "Run it"}),
        edit=lambda path, text: ("Write", {"file_path": path, "content": text}),
        shell_name="Bash",
        sub_agent=lambda prompt: (
            "Agent",
            {"description": "Look", "prompt": prompt, "subagent_type": "general-purpose", "run_in_background": False},
        ),
        summarises=r"create a detailed summary of",
        variables={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"},
    ),
    "codex": Tools(
        shell=lambda command: ("exec_command", {"cmd": command, "yield_time_ms": 20000}),
        edit=lambda path, text: ("exec_command", {"cmd": f"cat > {path} <<'E'\n{text}\nE"}),
        shell_name="exec_command",
        summarises=r"CONTEXT CHECKPOINT COMPACTION",
        arguments=("-c", "model_auto_compact_token_limit=100000"),
        gaps={"sub-agent": "its sub-agents, a `namespace` of tools, were not played"},
    ),
    "opencode": Tools(
        shell=lambda command: ("bash", {"command": command, "description": "Run it"}),
        edit=lambda path, text: ("write", {"filePath": path, "content": text}),
        shell_name="bash",
        sub_agent=lambda prompt: ("task", {"description": "Look", "prompt": prompt, "subagent_type": "general"}),
        summarises=r"(?i)create a new anchored summary|summar",
        failed="ok",
        loses_result=True,
        notes={
            "tests": "no result of a command says that it failed, so its status is `ok`",
            "compaction": "the result before it is a part of the summary's prompt alone, and joined to no call",
        },
    ),
    "qwen-code": Tools(
        shell=lambda command: ("run_shell_command", {"command": command, "is_background": False}),
        edit=lambda path, text: ("write_file", {"file_path": path, "content": text}),
        shell_name="run_shell_command",
        sub_agent=lambda prompt: (
            "agent",
            {"description": "Look", "prompt": prompt, "subagent_type": "general-purpose", "run_in_background": False},
        ),
        summarises=r"(?i)state_snapshot",
    ),
    "mini-swe-agent": Tools(
        shell=lambda command: ("bash", {"command": command}),
        edit=lambda path, text: ("bash", {"command": f"cat > {path} <<'E'\n{text}\nE"}),
        shell_name="bash",
        submits=True,
        gaps={
            "sub-agent": "it has no sub-agents",
            "compaction": "it keeps its whole history",
        },
    ),
    "aider": Tools(
        shell=lambda command: ("", {}),
        edit=lambda path, text: ("", {}),
        shell_name="",
        writes_files=True,
        arguments=("--auto-test", "--test-cmd", "grep -q Hello $AGL_ROLLOUT*.txt || { echo 1 failed; exit 3; }"),
        gaps={
            "long": _NO_TOOLS,
            "parallel": _NO_TOOLS,
            "sub-agent": _NO_TOOLS,
            "compaction": "its history is that of one prompt",
        },
    ),
}


@dataclass
class Play:
    """What the model of one attempt says, and what has to be recorded of it."""

    tools: Tools
    name: str
    """A word that is in all of the attempt's conversations, and in the results of its tools."""
    scenarios: Sequence[str]
    expected: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Status and a text of the result of each tool call that was asked for, by its id."""
    seen: set[str] = field(default_factory=set)
    """Of sub-agent and compaction, those that the program came to."""

    @property
    def prompt(self) -> str:
        return f"-Do all that is asked. RUN {self.name}"

    def answer(self, received: Received) -> Step:
        text = "\n".join(map(text_of, received.items))
        if self.tools.writes_files:
            edit = self.edit if "1 failed" in newest(received) else "A draft"
            return Say(f"{Path(self.edited).name}\n```\n{edit}\n```\n{FINAL}")
        results = sum(item.get("role") == "tool" for item in received.items)
        if self.tools.summarises and re.search(self.tools.summarises, newest(received)):
            self.seen.add("compaction")
            return Say(f"{SUMMARY} of RUN {self.name}.")
        if self.tools.shell_name not in offered(received):
            return Say(f"A title of {self.name}")
        if SUBTASK in text and not any(SUBTASK in str(item.get("tool_calls")) for item in received.items):
            self.seen.add("sub-agent")
            below = (self.tools.shell(f"echo {self.name} below"), "ok", f"{self.name} below")
            return self._ask("below", below) if not results else Say(f"The sub-agent of {self.name} is done.")
        for number, step in enumerate(self._steps() if SUMMARY not in text else ()):
            if results == 0:
                return self._ask(str(number), *step)
            results -= len(step)
        if self.tools.submits:
            return CallTools([self.tools.shell(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo {FINAL}")])
        return Say(FINAL)

    def _ask(self, step: str, *calls: tuple[ToolCall, str, str]) -> CallTools:
        ids = [f"call_{self.name}_{step}_{place}" for place in range(len(calls))]
        self.expected |= {id: (status, text) for id, (_, status, text) in zip(ids, calls, strict=True)}
        asked = [(*call, id) for id, (call, _, _) in zip(ids, calls, strict=True)]
        return CallTools(asked, f"Next, {self.name}.")

    def _steps(self) -> Iterator[list[tuple[ToolCall, str, str]]]:
        """Tool calls of each reply, with the status and a text of their results."""
        name, shell = self.name, self.tools.shell
        steps = {
            "edit": [[(self.tools.edit(self.edited, self.edit), "ok", "")]],
            "tests": [
                [(shell(f"echo {name}: 1 failed; exit 3"), self.tools.failed, f"{name}: 1 failed")],
                [(shell(f"echo {name}: 1 passed"), "ok", f"{name}: 1 passed")],
            ],
            "long": [
                [
                    (
                        shell(f"echo {name} begins; head -c 200000 /dev/zero | tr '\\0' x; echo; echo {name} ends"),
                        "ok",
                        f"{name} ",
                    )
                ]
            ],
            "parallel": [[(shell(f"echo {name} {side}"), "ok", f"{name} {side}") for side in ("left", "right")]],
            "compaction": [[(shell(f"echo {name} is full"), "ok", f"{name} is full")]],
        }
        if self.tools.sub_agent is not None:
            asked = self.tools.sub_agent(f"{SUBTASK} {name}: run the command.")
            steps["sub-agent"] = [[(asked, "ok", f"The sub-agent of {name} is done.")]]
        for scenario in SCENARIOS:
            yield from steps.get(scenario, ()) if scenario in self.scenarios else ()

    @property
    def edited(self) -> str:
        return str(Path.cwd() / f"{self.name}.txt")

    @property
    def edit(self) -> str:
        return f"Hello from {self.name}"

    @property
    def breaks(self) -> int:
        """Replies that may be followed by another history than their own."""
        return int("compaction" in self.scenarios)


class Stuck(Play):
    """Never answers."""

    def __init__(self, tools: Tools, name: str) -> None:
        super().__init__(tools, name, ())
        self.hold = Hold()

    def answer(self, received: Received) -> Step:
        return self.hold


def text_of(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    return content if isinstance(content, str) else "\n".join(part.get("text") or "" for part in content or ())


def newest(received: Received) -> str:
    """The texts of the user behind the last reply and its results."""
    texts: list[str] = []
    for item in reversed(received.items):
        if item.get("role") in ("assistant", "tool"):
            break
        texts.append(text_of(item) if item.get("role") == "user" else "")
    return "\n".join(texts)


def offered(received: Received) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in received.body.get("tools") or ())
