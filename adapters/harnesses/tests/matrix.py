"""Scenarios of command-line agents, and how the model asks each program for its tools.

A conversation is answered by what it says: the prompt has `RUN name`, and the number of tool results that came decides
the next step.
"""

from __future__ import annotations

import json
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
    "housekeeping": "it makes calls for itself, which are told from work",
    "sandbox": "bubblewrap, a test that fails, then passes, and the reward of the hidden one",
    "mcp": "in that sandbox, it calls a task's own tools: two at once, one that fails, and the reward",
    "two at once": "two attempts in one workspace",
    "killed": "its process is killed during a call",
    "hangs": "a reply never comes, and time is up",
}
FINAL = "All of it is done."
SUMMARY, SUBTASK = "A summary so far", "This is a part of RUN"
TITLE = "A title of"
_OWN = re.compile(r"generates concise, one-line Git commit messages|managed memory extraction subagent")
"""Instructions of programs whose housekeeping has tools as work has, or whose work has none."""


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
    waits: Callable[[str], ToolCall] | None = None
    """Waits for the sub-agent, if it runs beside; takes what the tools have said so far."""
    summarises: str = ""
    """A regular expression for the message that asks for a summary of the history."""
    writes_files: bool = False
    """Its model has no tools: a reply has whole files."""
    submits: bool = False
    """It ends by a command, not by an answer."""
    model: str = "agl"
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    own_arguments: tuple[str, ...] = ()
    """Settings with which it makes calls for itself."""
    own_variables: Mapping[str, str] = field(default_factory=dict)
    own_prompt: Callable[[str], str] = str
    """The prompt as it reads it with these settings."""
    own_scenarios: tuple[str, ...] = ("tests",)
    sandbox_arguments: tuple[str, ...] = ()
    mcp: str = ""
    """It has this before the name of a task's own tool."""
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
        mcp="mcp__environment__",
        sub_agent=lambda prompt: (
            "Agent",
            {"description": "Look", "prompt": prompt, "subagent_type": "general-purpose", "run_in_background": False},
        ),
        summarises=r"create a detailed summary of",
        variables={"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000"},
        own_arguments=("--input-format=stream-json", "--output-format=stream-json", "--verbose"),
        own_variables={"CLAUDE_CODE_EMIT_TOOL_USE_SUMMARIES": "1"},
        own_prompt=lambda prompt: "\n".join(
            json.dumps(line)
            for line in (
                {"type": "user", "message": {"role": "user", "content": prompt}},
                {
                    "type": "control_request",
                    "request_id": "title",
                    "request": {"subtype": "generate_session_title", "description": prompt, "persist": True},
                },
            )
        ),
    ),
    "codex": Tools(
        shell=lambda command: ("exec_command", {"cmd": command, "yield_time_ms": 20000}),
        edit=lambda path, text: (
            "apply_patch",
            {"input": f"*** Begin Patch\n*** Add File: {path}\n+{text}\n*** End Patch"},
        ),
        shell_name="exec_command",
        mcp="mcp__environment__",
        sub_agent=lambda prompt: ("multi_agent_v1__spawn_agent", {"message": prompt}),
        waits=lambda said: (
            "multi_agent_v1__wait_agent",
            {"targets": re.findall(r'"agent_id":\s*"([^"]+)"', said), "timeout_ms": 60000},
        ),
        summarises=r"CONTEXT CHECKPOINT COMPACTION",
        model="gpt-5.5",  # For a model that it does not know, it has no `apply_patch`.
        arguments=("-c", "model_auto_compact_token_limit=100000"),
        own_arguments=("-c", "features.memories=true", "-c", "memories.min_rollout_idle_hours=0"),
    ),
    "opencode": Tools(
        shell=lambda command: ("bash", {"command": command, "description": "Run it"}),
        edit=lambda path, text: ("write", {"filePath": path, "content": text}),
        shell_name="bash",
        mcp="environment_",
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
        mcp="mcp__environment__",
        sub_agent=lambda prompt: (
            "agent",
            {"description": "Look", "prompt": prompt, "subagent_type": "general-purpose", "run_in_background": False},
        ),
        summarises=r"(?i)state_snapshot",
        own_scenarios=(),  # Its memory is asked when the first reply is the last.
    ),
    "mini-swe-agent": Tools(
        shell=lambda command: ("bash", {"command": command}),
        edit=lambda path, text: ("bash", {"command": f"cat > {path} <<'E'\n{text}\nE"}),
        shell_name="bash",
        submits=True,
        gaps={
            "sub-agent": "it has no sub-agents",
            "compaction": "it keeps its whole history",
            "housekeeping": "all of its calls are work",
            "mcp": "it takes no MCP servers, and says so before it starts",
        },
    ),
    "aider": Tools(
        shell=lambda command: ("", {}),
        edit=lambda path, text: ("", {}),
        shell_name="",
        writes_files=True,
        arguments=("--auto-test", "--test-cmd", "grep -q Hello $AGL_ROLLOUT*.txt || { echo 1 failed; exit 3; }"),
        own_arguments=("--git",),
        sandbox_arguments=("--auto-test", "--test-cmd", "python3 check.py"),
        gaps={
            "long": _NO_TOOLS,
            "parallel": _NO_TOOLS,
            "sub-agent": _NO_TOOLS,
            "compaction": "its history is that of one prompt",
            "mcp": "it takes no MCP servers, and says so before it starts",
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
    is_own: bool = False
    """The program has the settings with which it makes calls for itself."""
    expected: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Status and a text of the result of each tool call that was asked for, by its id."""
    seen: set[str] = field(default_factory=set)
    """Of sub-agent and compaction, those that the program came to."""
    said: str = ""
    """The results of tools in the conversation that is answered."""
    final: str = FINAL

    @property
    def prompt(self) -> str:
        prompt = f"-Do all that is asked. RUN {self.name}"
        return self.tools.own_prompt(prompt) if self.is_own else prompt

    def answer(self, received: Received) -> Step:
        text = "\n".join(map(text_of, received.items))
        self.said = "\n".join(text_of(item) for item in received.items if item.get("role") == "tool")
        if _OWN.search(text):
            return Say(f"{TITLE} {self.name}")
        if self.tools.writes_files:
            edit = self.edit if "1 failed" in newest(received) else "# A draft"
            return Say(f"{Path(self.edited).name}\n```\n{edit}\n```\n{FINAL}")
        results = sum(item.get("role") == "tool" for item in received.items)
        if self.tools.summarises and re.search(self.tools.summarises, newest(received)):
            self.seen.add("compaction")
            return Say(f"{SUMMARY} of RUN {self.name}.")
        if self.tools.shell_name not in offered(received):
            return Say(f"{TITLE} {self.name}")
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
        return Say(self.final)

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
            done = f"The sub-agent of {name} is done."
            steps["sub-agent"] = [[(asked, "ok", done if self.tools.waits is None else "agent_id")]]
            if self.tools.waits is not None:
                steps["sub-agent"] += [[(self.tools.waits(self.said), "ok", done)]]
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


class Repair(Play):
    """Has the program write what a test of its workspace needs, and run that test before and behind."""

    def _steps(self) -> Iterator[list[tuple[ToolCall, str, str]]]:
        check = self.tools.shell("pwd; python3 check.py")
        yield [(check, self.tools.failed, "1 failed")]
        yield [(self.tools.edit(self.edited, self.edit), "ok", "")]
        yield [(check, "ok", "1 passed")]

    @property
    def edited(self) -> str:
        return next(iter(re.findall(r"/\S*/workspace\b", self.said)), "") + "/calc.py"

    @property
    def edit(self) -> str:
        return "def add(a, b): return a + b"


@dataclass
class Shop(Play):
    """Has the program call the tools of `ledger_environment`."""

    task: Any = None
    """The task's input."""

    @property
    def prompt(self) -> Any:
        return self.task

    def _steps(self) -> Iterator[list[tuple[ToolCall, str, str]]]:
        price, add = f"{self.tools.mcp}price", f"{self.tools.mcp}add"
        yield [((price, {"item": "apple"}), "ok", "3"), ((price, {"item": "pear"}), "ok", "4")]
        yield [((price, {"item": "plum"}), "error", "'plum'")]
        yield [((add, {"numbers": [3, 4]}), "ok", "7")]


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
