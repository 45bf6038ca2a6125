"""Each program as it is started for an attempt; a stand-in on the PATH says with what."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import AgentError, ConfigError
from agl_core.types import Mode
from agl_core.wire import Assignment
from agl_harnesses.harness import CommandOptions, ProgramHarness, ProgramOptions, command_harness
from agl_harnesses.programs import PROGRAMS

from .make_page import PAGE, render
from .matrix import TOOLS

STAND_IN = """#!{python} -S
import json, os, sys
home = os.environ["HOME"]
paths = [os.path.join(folder, name) for folder, _, names in os.walk(home) for name in names]
files = {{os.path.relpath(path, home): open(path).read() for path in paths}}
named = [word.partition("=")[2] for word in sys.argv if word.startswith("--message-file=")]
prompt = open(named[0]).read() if named else sys.stdin.read()
variables, folder = dict(os.environ), os.getcwd()
started = dict(words=sys.argv[1:], prompt=prompt, variables=variables, files=files, folder=folder)
print(json.dumps({{"result": started}}))
"""
BY_NAME = {program.name: program for program in PROGRAMS}
PROMPT = "-v is no option; {model} is no place\n@notes.txt is no file"
FOREIGN = {
    "claude-code": ["CLAUDECODE", "CLAUDE_CODE_SESSION_ID", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS"],
    "codex": ["CODEX_SANDBOX", "CODEX_THREAD_ID"],
    "opencode": ["OPENCODE", "OPENCODE_CONFIG"],
    "qwen-code": ["QWEN_SANDBOX", "GEMINI_API_KEY"],
    "mini-swe-agent": ["MSWEA_MODEL_NAME"],
    "aider": ["AIDER_MODEL"],
}
"""Variables of an outer session, and of its user's own settings, by program."""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in under each program's name, in an environment with foreign settings."""
    for program in PROGRAMS:
        stand_in = tmp_path / program.command[0]
        stand_in.write_text(STAND_IN.format(python=sys.executable))
        stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    for name in (name for names in FOREIGN.values() for name in names):
        monkeypatch.setenv(name, "foreign")


async def run(name: str, options: ProgramOptions, task: Any, folder: Path) -> Any:
    """The program's answer, after it ran as a worker starts it."""
    harness = ProgramHarness(BY_NAME[name], options, None)
    async with harness.launch(assignment(task), "http://127.0.0.1:9", folder) as launch:
        process = await asyncio.create_subprocess_exec(
            *launch.command, cwd=launch.folder, env={**os.environ, **launch.variables}, stdout=subprocess.PIPE
        )
        printed, _ = await process.communicate()
        return launch.result(json.loads(printed))


def assignment(task: Any) -> Assignment:
    ids = {"rollout": "r", "attempt": 0, "task_id": "t", "task_split": "train"}
    return Assignment.model_validate({**ids, "task_input": task, "mode": Mode.TRAIN, "path": "/rollout/r", "key": "K"})


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", BY_NAME)
async def test_a_program_starts_with_its_prompt_and_settings_in_a_home_of_its_own(name: str, tmp_path: Path) -> None:
    options = ProgramOptions(model="tiny/policy", arguments=("--its-own", "--home={home}"), variables={"MORE": "{key}"})
    (folder := tmp_path / "attempt").mkdir()
    started = (await run(name, options, {"prompt": PROMPT}, folder))["result"]

    words, variables, files = started["words"], started["variables"], started["files"]
    assert PROMPT in (started["prompt"], words[-1].removeprefix("--task="))
    assert {"--its-own", f"--home={variables['HOME']}"} <= set(words)
    assert (variables["MORE"], started["folder"]) == ("K", str(tmp_path))
    assert not [foreign for foreign in FOREIGN[name] if variables.get(foreign) == "foreign"]
    assert "tiny/policy" in json.dumps([words, files])
    texts = {path: text for path, text in files.items() if path.endswith((".json", ".toml"))}
    assert texts if name != "mini-swe-agent" else not texts
    for path, text in texts.items():
        (tomllib.loads if path.endswith(".toml") else json.loads)(text)
    address = "http://127.0.0.1:9/rollout/r"
    if name in ("codex", "opencode"):  # They take no address from the environment.
        assert address in "".join(texts.values())
    assert variables["ANTHROPIC_BASE_URL" if name == "claude-code" else "OPENAI_API_BASE"].startswith(address)


SERVER = {"command": "{python}", "args": ["-c", 'print("é\\n")', "{home}"], "env": {"A.B": 'say "hi"'}}


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("name", ["claude-code", "codex", "opencode", "qwen-code"])
async def test_a_program_has_the_servers_of_a_task_in_its_settings(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / "attempt").mkdir()
    task = {"prompt": PROMPT, "mcp_servers": {"shop": SERVER}}
    started = (await run(name, ProgramOptions(), task, folder))["result"]
    file, key = {
        "claude-code": (".claude/mcp.json", "mcpServers"),
        "codex": (".codex/config.toml", "mcp_servers"),
        "opencode": (".config/opencode/opencode.json", "mcp"),
        "qwen-code": (".qwen/settings.json", "mcpServers"),
    }[name]
    [shop] = (tomllib.loads if name == "codex" else json.loads)(started["files"][file])[key].values()
    words, variables = (shop["command"], shop["environment"]) if name == "opencode" else (None, shop.get("env"))
    home = started["variables"]["HOME"]
    assert (words or [shop["command"], *shop["args"]]) == [sys.executable, "-c", 'print("é\\n")', home]
    assert variables == {"A.B": 'say "hi"'}


@pytest.mark.usefixtures("programs")
async def test_a_program_that_takes_no_servers_refuses_their_task(tmp_path: Path) -> None:
    task = {"prompt": PROMPT, "mcp_servers": {"shop": SERVER}}
    for name in ("mini-swe-agent", "aider"):
        with pytest.raises(ConfigError, match=f"harness '{name}' cannot use the MCP servers .* Take claude-code"):
            await run(name, ProgramOptions(), task, tmp_path)
    with pytest.raises(ConfigError, match=r"harness 'command' .* has \{mcp\} in its words or `files`"):
        async with command_harness(CommandOptions(command=("true",)), None).launch(assignment(task), "", tmp_path):
            pass
    (folder := tmp_path / "own").mkdir()
    own = command_harness(CommandOptions(command=("true", "{mcp}")), None)
    async with own.launch(assignment(task), "http://127.0.0.1:9", folder) as launch:
        assert json.loads(launch.command[-1])["shop"]["command"] == sys.executable
    for wrong in ({"shop": {"args": []}}, {"a shop": SERVER}):
        with pytest.raises(ConfigError, match="wrong `mcp_servers`"):
            await run("codex", ProgramOptions(), {**task, "mcp_servers": wrong}, tmp_path)


def test_the_answer_is_taken_from_what_a_program_prints() -> None:
    printed = {
        "mini-swe-agent": "System:\n…\nExit:\nfirst\n\nAssistant:\n…\nExit:\nDone.\n\nSaved trajectory to '/x'",
        "aider": "Aider v1\nRepo-map: disabled\n\nDone.\n\nTokens: 594 sent, 5 received.",
        "codex": "Done.",
    }
    answers = {name: BY_NAME[name].answer(text) for name, text in printed.items()}
    assert {name: str(answer).strip() for name, answer in answers.items()} == dict.fromkeys(printed, "Done.")
    assert BY_NAME["mini-swe-agent"].answer("…\nExit:\n\nSaved trajectory to '/x'") == ""
    assert [BY_NAME[name].answer("Cut") for name in printed] == ["Cut"] * len(printed)


def test_a_program_that_is_missing_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(AgentError, match=r"'codex': there is no program 'codex'.* npm install -g @openai/codex"):
        ProgramHarness(BY_NAME["codex"], ProgramOptions(), None)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("task", [None, 5, {"question": "?"}, "", " \n", "a\0b"])
async def test_a_task_without_a_prompt_is_refused(task: Any, tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="needs a prompt"):
        await run("codex", ProgramOptions(), task, tmp_path)


def test_the_page_has_the_matrix_that_is_played() -> None:
    page = PAGE.read_text()
    assert set(TOOLS) == set(BY_NAME)
    assert page == render(page), "python -m adapters.harnesses.tests.make_page"
