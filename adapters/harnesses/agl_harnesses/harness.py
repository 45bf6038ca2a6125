"""Starting a command-line agent for an attempt: its command and settings, a home and a workspace of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from agl_core.client.agent import client_variables
from agl_core.config.models import RunConfig
from agl_core.config.sections import Section
from agl_core.errors import AgentError, ConfigError
from agl_core.protocols import Launch
from agl_core.types import Json
from agl_core.types.forms import dump_json
from agl_core.wire import Assignment
from agl_harnesses.sandbox import confined, filled
from agl_harnesses.workspace import Workspaces, task_source

_FOLDERS = {
    "HOME": "",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "XDG_STATE_HOME": ".local/state",
    "XDG_CACHE_HOME": ".cache",
    "TMPDIR": "tmp",
}
"""Variables for folders of a program's own, below its home."""
_PROMPT = ".prompt"
_GIT = "[user]\n\tname = agent\n\temail = agent@localhost\n"


class ProgramOptions(Section):
    """The settings of a program that is known by name."""

    model: str = Field("agl", pattern=r"^[\w./:@+-]+$")
    """The name by which it asks for its model; the policy answers to any name."""
    arguments: tuple[str, ...] = ()
    """Further arguments of its command, before the prompt."""
    variables: dict[str, str] = Field({})
    """Further environment variables; {folder} in them is the configuration's."""


class CommandOptions(Section):
    """The settings of the harness `command`. Its texts may have the placeholders of `Program`; those of `command` also
    {python}, the interpreter that agl runs in."""

    command: tuple[str, ...] = Field(min_length=1)
    """The command, for instance ["my-agent", "--model", "{model}", "{prompt}"]."""
    model: str = ProgramOptions.model_fields["model"].default
    """The name by which it asks for its model; the policy answers to any name."""
    variables: dict[str, str] = Field({})
    """Environment variables, beside OPENAI_BASE_URL, ANTHROPIC_BASE_URL and their keys."""
    files: dict[str, str] = Field({})
    """Files that are written below its home before it starts, by path."""


class McpServer(Section):
    """A task's own, in its input below `mcp_servers`. Its texts may have {python}, {workspace} and {home}."""

    command: str
    args: list[str] = Field([])
    env: dict[str, str] = Field({})


_SERVERS = TypeAdapter(dict[Annotated[str, Field(pattern=r"^[\w-]+$")], McpServer])


@dataclass(frozen=True)
class Program:
    """A command-line agent.

    Its texts may have the placeholders {prompt}, {prompt_file}, {model}, {key}, {home}, {workspace}, {folder} (the
    configuration's), {base_url} (which ends in /v1), {origin} (the same without /v1) and {mcp}, the MCP servers of the
    task.
    """

    name: str
    command: tuple[str, ...]
    """How it is started without a person; `{arguments}` alone stands for the user's own."""
    install: str = ""
    """The command that installs it, for errors."""
    reads_prompt: bool = False
    """It takes the prompt from its standard input, where none is taken for an option or is too long."""
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    """Its settings: files below its home, by path."""
    mcp: Callable[[Any], str] = dump_json
    """Writes MCP servers, the values of `McpServer` by name, as its settings have them: for {mcp}, if it takes any."""
    answer: Callable[[Json], Json] = field(default=lambda printed: printed)
    """Its answer, of what it printed."""
    settings: tuple[str, ...] = ()
    """Beginnings of the environment variables that it reads: those of its user do not reach it."""


class ProgramHarness:
    """Starts a program for each attempt. AgentError if it is not installed.

    Its result is what the program answers as `text`, and what it changed as `diff`, a git patch. Without a
    configuration it works in the current folder, and its result is the answer alone.
    """

    def __init__(self, program: Program, options: ProgramOptions | CommandOptions, config: RunConfig | None) -> None:
        self._program, self._options, self._folder = program, options, config.folder if config else Path.cwd()
        texts = (*program.command, *options.variables.values())
        self._prompts = program.reads_prompt or any("{prompt" in text for text in texts)
        self._workspaces = None if config is None else Workspaces.of(config)
        path = shutil.which(program.command[0])
        self._reads = [] if path is None else list(_installation(Path(path)))
        is_elsewhere = self._workspaces is not None and self._workspaces.section.runner == "command"
        self._python = "python3" if is_elsewhere else sys.executable
        if path is None and not is_elsewhere:
            remedy = f"Install it: {program.install}" if program.install else "Install it, or write its whole path."
            raise AgentError(f"harness '{program.name}': there is no program '{program.command[0]}' to run. {remedy}")

    @asynccontextmanager
    async def launch(self, assignment: Assignment, base_url: str, folder: Path) -> AsyncIterator[Launch]:
        servers = self._servers(assignment.task_input)
        home, path = folder / "home", Path.cwd() if self._workspaces is None else folder / "workspace"
        workspace = None
        if self._workspaces is not None:
            workspace = await asyncio.to_thread(self._workspaces.create, task_source(assignment.task_input), path)
        values = {
            "{prompt}": prompt_of(assignment.task_input) if self._prompts else "",
            "{prompt_file}": str(home / _PROMPT),
            "{model}": self._options.model,
            "{key}": assignment.key,
            "{home}": str(home),
            "{workspace}": workspace.mount if workspace else str(path),
            "{base_url}": f"{base_url}{assignment.path}/v1",
            "{origin}": f"{base_url}{assignment.path}",
            "{folder}": str(self._folder),
        }
        inside = {"{python}": self._python, "{workspace}": values["{workspace}"], "{home}": str(home)}
        values["{mcp}"] = filled(self._program.mcp(servers), inside)
        await asyncio.to_thread(self._write_home, home, values)
        command = []
        for word in self._program.command:
            own = getattr(self._options, "arguments", ()) if word == "{arguments}" else (word,)
            command += [filled(text, values) for text in own]
        variables = {
            **(workspace.variables if workspace else {}),
            **client_variables(values["{origin}"], assignment.key),
            **{name: str(home / path) for name, path in _FOLDERS.items()},
            **{n: filled(text, values) for n, text in {**self._program.variables, **self._options.variables}.items()},
        }
        if self._program.reads_prompt:
            command = ["sh", "-c", 'exec "$@" <"$0"', values["{prompt_file}"], *command]
        # A program that is started in a session of itself would take that session's settings for its own.
        foreign = [n for n in os.environ if n.startswith(self._program.settings) and n not in variables]
        if foreign:
            command = ["env", *(f"-u{name}" for name in foreign), *command]
        if workspace is None:
            yield Launch(command, path, variables, self._program.answer)
            return

        def result(printed: Json) -> Json:
            return {"text": self._program.answer(printed), "diff": workspace.diff()}

        places: Any = {"workspace": path, "mount": workspace.mount, "home": home, "gateway": base_url}
        places |= {"reads": self._reads, "variables": variables}
        async with confined(command, section=workspace.section, **places) as confined_command:
            yield Launch(confined_command, path, variables, result)

    def _servers(self, task_input: Json) -> Any:
        described = task_input.get("mcp_servers") if isinstance(task_input, dict) else None
        program = self._program
        if described and not any("{mcp}" in text for text in (*program.command, *program.files.values())):
            raise ConfigError(
                f"harness '{program.name}' cannot use the MCP servers that its tasks bring. Take claude-code, codex, "
                f"opencode or qwen-code, or a `command` that has {{mcp}} in its words or `files`."
            )
        try:
            return _SERVERS.dump_python(_SERVERS.validate_python(described or {}))
        except ValidationError as error:
            raise ConfigError(f"The task's input has wrong `mcp_servers`. {error}") from None

    def _write_home(self, home: Path, values: Mapping[str, str]) -> None:
        for path in _FOLDERS.values():
            (home / path).mkdir(parents=True, exist_ok=True)
        for path, text in {".gitconfig": _GIT, _PROMPT: "{prompt}", **self._program.files}.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(text, values))


def command_harness(options: CommandOptions, config: RunConfig | None) -> ProgramHarness:
    """Any program, by a command with placeholders."""
    folder = str(config.folder if config else Path.cwd())
    command = (word.replace("{python}", sys.executable).replace("{folder}", folder) for word in options.command)
    program = Program("command", tuple(command), files=options.files)
    return ProgramHarness(program, options, config)


def _installation(program: Path) -> Iterator[Path]:
    """The folders above `bin` of a program and of its interpreter, of links and of their targets."""
    for path in {program, program.resolve()}:
        folder = path.parents[1]
        yield path if Path.home().is_relative_to(folder) or folder == Path.home() / ".local" else folder
    with program.open("rb") as file:
        line = file.readline(4096)
    words = [word for word in os.fsdecode(line[2:]).split() if not word.startswith("-") and not word.endswith("/env")]
    if line.startswith(b"#!") and words and (interpreter := shutil.which(words[0])):
        yield from _installation(Path(interpreter))


def prompt_of(task_input: Json) -> str:
    """The prompt in a task's input: the input itself, or its `prompt`. AgentError without one.

    >>> prompt_of({"prompt": "Fix the test.", "workspace": {"folder": "shop"}})
    'Fix the test.'
    """
    prompt = task_input.get("prompt") if isinstance(task_input, dict) else task_input
    if not isinstance(prompt, str) or not prompt.strip() or "\0" in prompt:
        raise AgentError("A harness needs a prompt: the task's input has to be a text, or an object with 'prompt'.")
    return prompt
