"""Sessions of six command-line agents, in the shape of their calls: who asks, with what, and which calls are no work.

The words are ours but for the beginnings by which a program's own calls are known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from agl_core.testing import episodes as make
from agl_core.types import Call, Sampling
from agl_server.gateway.programs import marks_of

AGENTS = {
    "claude": "claude-cli/2.1.332 (external, sdk-cli)",
    "codex": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) xterm",
    "opencode": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14",
    "qwen": "QwenCode/0.24.4 (linux; x64)",
    "mini-swe-agent": "OpenAI/Python 2.9.0",
    "aider": "OpenAI/Python 1.99.1",
}
TASKS = ["Fix the failing test in shop.py.", "Titles are wrong in the report: correct them.", "Why is `make` slow?"]
OUTPUTS = ["1 failed, 3 passed", "shop.py: 120 lines", "", "Error: no such file", "ok"]


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


@dataclass
class Session:
    """Calls of one program, as the gateway records them, each with whether it is housekeeping."""

    program: str
    chance: random.Random
    calls: list[Call] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)

    @property
    def task(self) -> str:
        return TASKS[self.chance.randrange(len(TASKS))]

    def ask(
        self,
        messages: list[dict[str, Any]],
        offered: list[dict[str, Any]] | None = None,
        reply: str = "",
        calls: dict[str, Any] | None = None,
        *,
        own: bool = False,
        limit: int | None = None,
        **more: Any,
    ) -> list[dict[str, Any]]:
        """Record a call; returns the conversation with its reply. `calls`: tool → arguments."""
        number = len(self.calls)
        answer = message("assistant", reply)
        if calls:
            answer["tool_calls"] = [
                {"id": f"t{number}.{n}", "type": "function", "function": {"name": tool, "arguments": json.dumps(given)}}
                for n, (tool, given) in enumerate(calls.items())
            ]
        request = {"messages": messages, **({"tools": offered} if offered else {}), **more}
        marks = marks_of(request, {"user-agent": AGENTS[self.program]})._asdict()
        choice = make.choice(message=answer)
        asked = Sampling(max_tokens=limit)
        self.calls.append(make.call(number, choice, request=request, requested=asked, **marks))
        self.own.append(own)
        return [*messages, answer]

    def answer(self, conversation: list[dict[str, Any]], *texts: str) -> list[dict[str, Any]]:
        """The conversation with the results of its last message's tool calls."""
        called = conversation[-1]["tool_calls"]
        given = texts or [self.chance.choice(OUTPUTS) for _ in called]
        results = [message("tool", text, tool_call_id=c["id"]) for c, text in zip(called, given, strict=True)]
        return [*conversation, *results]

    def work(self, conversation: list[dict[str, Any]], offered: list[dict[str, Any]], tool: str) -> Any:
        """Some turns with a tool, and a last one with an answer."""
        for number in range(self.chance.randint(1, 4)):
            conversation = self.answer(self.ask(conversation, offered, "", {tool: {"cmd": f"run step {number}"}}))
        return self.ask(conversation, offered, self.chance.choice(["Done.", "The test passes now: a sign was wrong."]))


def claude(s: Session) -> None:
    billing = {"type": "text", "text": f"x-billing: v{s.chance.random()};"}
    role = {"type": "text", "text": "You are an agent of the SDK."}
    instructions = {"type": "text", "text": "You help with software. Use the tools."}
    system, offered = [message("system", [billing, role, instructions])], tools("Agent", "Bash", "Edit")
    if s.chance.random() < 0.5:
        s.ask([message("user", "quota")], limit=1, own=True)
    task = s.task
    aside = {"type": "text", "text": "Generate a concise, sentence-case title (3-7 words) for this session."}
    s.ask(
        [message("system", [billing, role, aside]), message("user", f"<session>\n{task}\n</session>")],
        None,
        "A title",
        own=True,
    )
    talk = [*system, message("user", [{"type": "text", "text": "Today is a day."}, {"type": "text", "text": task}])]
    talk = s.work([*talk, message("system", "Agents: Explore, Plan.")], offered, "Bash")
    prompt = f"Look for the reason of this, and list the files: {task}"
    talk = s.ask([*talk, message("user", "Go on.")], offered, "", {"Agent": {"prompt": prompt, "type": "Explore"}})
    below = [message("system", [billing, role, {"type": "text", "text": "You explore. Change nothing."}])]
    found = s.work([*below, message("user", f"Today is a day.{prompt}")], tools("Bash", "Read"), "Read")
    talk = s.work(s.answer(talk, found[-1]["content"]), offered, "Bash")
    if s.chance.random() < 0.5:
        brief = [message("system", [billing, {"type": "text", "text": "You summarise conversations."}])]
        summary = "The user wants a repair. Two files were read, one was changed, and one test is left."
        s.ask([*brief, *talk[len(system) :], message("user", "Write a detailed summary.")], tools("Read"), summary)
        talk = s.work([*system, message("user", f"The session goes on. Summary: {summary}")], offered, "Bash")
    if s.chance.random() < 0.5:
        s.ask([*talk, message("user", "[SUGGESTION MODE: What would the user type next?")], offered, "Go on", own=True)


def codex(s: Session) -> None:
    def meta(kind: str = "turn", thread: str = "a", **more: str) -> dict[str, Any]:
        fields = {"request_kind": kind, "thread_id": thread, "agent_name": "/root", "thread_source": "user", **more}
        return {"client_metadata": {"x-codex-turn-metadata": json.dumps(fields)}}

    system = [message("developer", "You are a coding agent."), message("developer", "<skills>none</skills>")]
    task, offered = s.task, tools("exec_command", "spawn_agent")
    talk = [*system, message("user", "<environment>bash</environment>"), message("user", task)]
    talk = s.ask(talk, offered, "", {"spawn_agent": {"message": f"Read all tests first. {task}"}}, **meta())
    # The sub-agent runs beside: its first call may come before or after the next one of the main thread.
    inner, below = [*system, message("user", f"Read all tests first. {task}")], {"thread_source": "subagent"}
    talk = s.answer(talk, '{"agent_id": "b"}')
    if s.chance.random() < 0.5:
        inner = s.ask(inner, offered, "", {"exec_command": {"cmd": "ls"}}, **meta(thread="b", **below))
    talk = s.ask(talk, offered, "", {"wait_agent": {"targets": ["b"]}}, **meta())
    if inner[-1]["role"] == "user":
        inner = s.ask(inner, offered, "", {"exec_command": {"cmd": "ls"}}, **meta(thread="b", **below))
    s.ask(s.answer(inner), offered, "They are read.", **meta(thread="b", **below))
    talk = s.ask(s.answer(talk, "They are read."), offered, "", {"exec_command": {"cmd": "make"}}, **meta())
    name = [message("user", f"Name this thread: {task}")]
    s.ask(name, None, "Repair of a test", own=True, **meta(thread="c", thread_source="thread_title"))
    summary = "So far the tests were read and make was run; one of them still fails in shop.py."
    s.ask([*s.answer(talk), message("user", "Write a handoff.")], offered, summary, **meta("compaction"))
    s.ask([*talk[:4], message("user", f"Before: {summary}")], offered, "Done.", **meta())
    s.ask([message("user", "What is worth keeping?")], None, "Nothing.", own=True, **meta("memory"))


def opencode(s: Session) -> None:
    task, offered = s.task, tools("bash", "edit", "task")
    aside = message("system", "You are a title generator. You output ONLY a thread title. Nothing else.\n\n<rules>")
    s.ask([aside, message("user", "Generate a title:\n"), message("user", task)], None, task[:20], own=True)
    system = message("system", "You are an interactive tool for software. Be brief.")
    talk = s.work([system, message("user", task)], offered, "bash")
    prompt = "Search the whole repository for uses of this function."
    talk = s.ask([*talk, message("user", "Go on.")], offered, "", {"task": {"prompt": prompt, "subagent": "explore"}})
    below = message("system", "You search files, and nothing else.")
    found = s.work([below, message("user", prompt)], tools("bash", "grep"), "grep")
    talk = s.work(s.answer(talk, found[-1]["content"]), offered, "edit")
    if s.chance.random() < 0.5:
        brief = message("system", "You summarise a conversation between a user and an agent.")
        summary = "Goal: repair a function. Done: all uses were found, and the first was changed."
        s.ask([brief, *talk[1:], message("user", "Summarise the above.")], None, summary)
        s.work([system, message("user", "What was done so far?"), message("assistant", summary)], offered, "bash")
    told = message("system", "Summarize what was done in this conversation. Write like a pull request description.")
    s.ask([told, *talk[1:]], None, "Repairs a function.", own=True)


def qwen(s: Session) -> None:
    task, offered = s.task, tools("read_file", "run_shell_command")
    setup = [message("user", "This is the setup of our chat."), message("assistant", "Got it.")]
    system = message("system", "You are an interactive agent for the command line.")
    talk = s.work([system, *setup, message("user", task)], offered, "run_shell_command")
    if s.chance.random() < 0.5:
        shrink = message("system", "You summarise the history of a chat into a given structure.")
        summary = "<state>The function is repaired, and two tests are left to be run again.</state>"
        s.ask([shrink, *talk[1:], message("user", "First think about the history.")], None, summary)
        talk = [system, message("user", summary), message("assistant", "Got it."), message("user", "Go on.")]
        talk = s.work(talk, offered, "run_shell_command")
    keep = message("system", "You are now acting as the managed memory extraction subagent for an assistant.")
    kept = [keep, *talk[1:], message("user", "Memory folder: /memory. Update it.")]
    kept = s.ask(kept, tools("read_file", "write_file"), "", {"read_file": {"path": "/memory/index"}}, own=True)
    s.ask(s.answer(kept), tools("read_file", "write_file"), "Nothing is worth keeping.", own=True)
    if s.chance.random() < 0.5:
        recap = message("system", "You generate session recaps for a programming assistant. One line.")
        s.ask([recap, *talk[1:], message("user", "Recap.")], None, "<recap>A test.</recap>", own=True)


def mini_swe_agent(s: Session) -> None:
    talk = [message("system", "You interact with a computer by commands."), message("user", f"Please solve: {s.task}")]
    for _ in range(s.chance.randint(2, 6)):
        talk = s.ask(talk, None, "THOUGHT: look.\n```bash\nls\n```")
        talk = [*talk, message("user", f"<returncode>0</returncode>{s.chance.choice(OUTPUTS)}")]


def aider(s: Session) -> None:
    examples = [message("user", "Change the greeting."), message("assistant", "hello.py <<<< hi ==== hello >>>>")]
    system = message("system", "Act as an expert software developer. Answer with edit blocks.")
    task = s.task
    talk = s.ask([system, *examples, message("user", f"{task}\n\nshop.py: …")], None, "shop.py <<<< a ==== b >>>>")
    commit = "You are an expert software engineer that generates concise, one-line Git commit messages from diffs."
    s.ask([message("system", commit), message("user", "diff --git a/shop.py b/shop.py")], None, "fix: sign", own=True)
    talk = s.ask([*talk, message("user", "And the sum?")], None, "shop.py <<<< c ==== d >>>>")
    if s.chance.random() < 0.5:
        brief = message("system", "*Briefly* summarise this part of a conversation about programming.")
        summary = "I asked you to repair shop.py, and you gave an edit of its sign, which I took."
        s.ask([brief, message("user", "# USER\n" + task)], None, summary)
        earlier = [message("user", f"I spoke to you before. {summary}"), message("assistant", "Ok.")]
        s.ask([system, *examples, *earlier, message("user", "Now the tests.")], None, "test.py <<<< a ==== b >>>>")
    else:
        s.ask([*talk, message("user", "Now the tests.")], None, "test.py <<<< a ==== b >>>>")


PROGRAMS: dict[str, Callable[[Session], None]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "qwen": qwen,
    "mini-swe-agent": mini_swe_agent,
    "aider": aider,
}


def sessions(each: int) -> Iterator[Session]:
    """So many sessions of each program, which differ in their tasks, lengths and optional parts."""
    for program, play in PROGRAMS.items():
        for seed in range(each):
            session = Session(program, random.Random(f"{program} {seed}"))
            play(session)
            yield session
