"""Agents that are commands: their environment, their output and status, and what agl sees of them."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from agl_core.capture import Recording
from agl_core.client.agent import agent_environment, client_variables
from agl_core.client.processes import Command, CommandPerAttempt
from agl_core.errors import AgentError
from agl_core.learning.transitions import build_episode
from agl_core.types import Ending, Episode, Source
from agl_server.health.rollouts import health_of
from agl_server.testing import until

from .road import ASK

PROGRAM = """
import json, os, sys, urllib.request

task = json.loads(os.environ["AGL_TASK"])
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
"""


async def run(workplace: Any, tmp_path: Path, code: str, *tasks: Any) -> Any:
    """Run a program that makes a call without agl and then does this; each task's rollout and attempt."""
    (tmp_path / "program.py").write_text(PROGRAM + code)
    # Without `site`, agl does not attach.
    runner = CommandPerAttempt(Command([sys.executable, "-S", "program.py"], tmp_path))
    return await workplace.run(runner, list(tasks))


async def test_the_result_is_what_it_printed_last(workplace: Any, tmp_path: Path) -> None:
    printed = {
        'thinking\n{"answer": [5]}\n': {"answer": [5]},
        "0.5": 0.5,
        "The answer\nis five.": "The answer\nis five.",
        "NaN": "NaN",
        "": None,
        "…\n7": 7,
    }
    ended = await run(workplace, tmp_path, "print(task.replace('…', 'ä' * 100_000))", *printed)
    for result, (rollout, attempt) in zip(printed.values(), ended, strict=True):
        assert (rollout.ending, attempt.result) == (Ending.FINISHED, result)
        assert not await workplace.stack.store.rewards([attempt.key])
        assert len(await workplace.stack.store.calls([attempt.key])) == 1


@pytest.mark.parametrize("workplace", [{"timeout": 250.0}], indirect=True)
async def test_of_more_than_a_result_may_have_the_end_is_kept(workplace: Any, tmp_path: Path) -> None:
    printed = [("x", 9 << 20), ("\x01", 8 << 20), ("ä", 6 << 20)]  # Plain, escaped in JSON, and wide.
    ended = await run(workplace, tmp_path, "print(task[0] * task[1] + 'the end')", *map(list, printed))
    for (character, _), (rollout, attempt) in zip(printed, ended, strict=True):
        assert (rollout.ending, attempt.attempt) == (Ending.FINISHED, 0)
        assert attempt.result.startswith("(of its output, ")
        assert attempt.result.endswith(f"{2 * character}the end")
        assert 1 << 20 < len(attempt.result) < (1 << 20) + 100


async def test_its_environment_names_the_attempt_to_every_client(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "ANTHROPIC_AUTH_TOKEN", "the user's own, which agno and Anthropic's Node SDK refuse beside a key"
    )
    names = [
        "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY",
        "AGL_TASK", "AGL_ROLLOUT", "AGL_ATTEMPT",
    ]  # fmt: skip
    second = "'ANTHROPIC_AUTH_TOKEN' in os.environ"
    code = f"print(json.dumps([os.environ[name] for name in {names}] + [os.getcwd(), {second}]))"
    with agent_environment(client_variables(workplace.stack.server.base_url)):
        [(_, attempt)] = await run(workplace, tmp_path, code, {"question": "wie groß?"})
    assert "ANTHROPIC_AUTH_TOKEN" in os.environ
    url, key = workplace.stack.url(attempt.key), workplace.stack.server.keys.of_attempt(attempt.key)
    *environment, task, rollout, number, folder, has_second_key = attempt.result
    assert not has_second_key
    assert environment == [url, url, key, url.removesuffix("/v1"), key]
    assert (task, rollout, number) == ('{"question":"wie groß?"}', "w0", "0")
    assert folder != str(tmp_path)


FLOODING = """
import subprocess
tool = "import sys; open(sys.argv[1], 'w').write('0.9\\n')" if task == "opened" else "print(0.9)"
subprocess.run([sys.executable, "-S", "-c", tool, f"/proc/{os.getpid()}/fd/1"], stderr=subprocess.DEVNULL)
print(0.1, flush=True)
subprocess.run([sys.executable, "-S", "-c", tool, f"/proc/{os.getpid()}/fd/1"], stderr=subprocess.DEVNULL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who wrote")
async def test_what_its_subprocesses_print_is_no_result_of_it(workplace: Any, tmp_path: Path) -> None:
    ended = await run(workplace, tmp_path, FLOODING, "opened", "inherited")
    assert [attempt.result for _, attempt in ended] == [0.1, 0.1]


async def test_a_script_that_prints_nothing_itself_gives_what_its_program_prints(
    workplace: Any, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(f"{PROGRAM}print(7)")
    (tmp_path / "run.sh").write_text(f'{sys.executable} -S "$1"\nexit $?\n')
    [(_, attempt)] = await workplace.run(CommandPerAttempt(Command(["sh", "run.sh", "./program.py"], tmp_path)), [None])
    assert attempt.result == 7, attempt.error


async def test_it_works_in_an_empty_folder_of_its_own_that_is_removed(workplace: Any, tmp_path: Path) -> None:
    """The command finds what it names beside the configuration: its script, its modules, a folder."""
    (tmp_path / "tasks.jsonl").write_text("the answers")
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__main__.py").write_text(
        f"{PROGRAM}print(json.dumps([os.getcwd(), os.listdir(), sys.argv[1:]]))\nopen('left', 'w').close()"
    )
    folders = set()
    for name, command in (("file", ["shop/__main__.py"]), ("module", ["-m", "shop"]), ("folder", ["./shop"])):
        runner = CommandPerAttempt(Command([sys.executable, "-S", *command, "tasks.jsonl", "shop", ""], tmp_path))
        ended = await runner.run(await workplace.lease(id=name), workplace.stack.server.base_url, Recording())
        await runner.close()
        folder, listed, arguments = ended.result
        assert (listed, arguments) == ([], [str(tmp_path / "tasks.jsonl"), "shop", ""])
        folders.add(folder)
    await until(lambda: not any(map(os.path.exists, folders)))
    assert len(folders) == 3


ACTS = (
    "os.mkfifo('x.jsonl')",
    "os.mkdir('x.jsonl')",
    "os.symlink('nowhere', 'x.jsonl')",
    "os.symlink('/dev/zero', 'x.jsonl')",
    "os.symlink('x.jsonl', 'x.jsonl')",
    "import socket; socket.socket(socket.AF_UNIX).bind('x.jsonl')",
    "open('x.jsonl', 'w').truncate(1 << 40)",
    "open('x.jsonl', 'w').write('\\n' * (9 << 20))",
    "open(b'\\xff.jsonl', 'wb').write(b'\\xff')",
    "shutil.rmtree(folder)",
    "shutil.rmtree(folder); open(folder, 'w').close()",
    "shutil.rmtree(folder); os.symlink('/', folder)",
)
"""Acts of programs in the folder with their reports, once they have printed their results."""
ODD = (
    '{"tool_result": ' + "[" * 100_000,
    '{"reward": {"name": "r", "value": 1' + "0" * 400 + "}}",
    '{"reward": {"name": "r", "value": NaN}}',
    '{"reward": {"name": "r", "value": 1.7e308}}\n' * 2,
    '{"tool_result": {"id": "a", "tool": "t", "status": "ok", "arguments": {"n": ' + "9" * 400 + "}}}",
    '{"tool_result": {"id": "a", "tool": "t", "status": "ok", "arguments": {"n": 1e999}}}',
    '{"tool_result": {"id": "a", "tool": "t", "status": "ok", "started": 1e300, "ended": -1e300}}',
    '{"tool_result": {"id": "a", "tool": "\\u0000", "status": "ok"}}',
    '{"tool_result": {"id": "a", "tool": "\\ud800", "status": "ok"}}',
    '{"tool_result": {"id": "a", "tool": "t", "status": "ok", "result": ' + "[" * 189 + "]" * 189 + "}}",
    '{"undelivered": "' + "\\u0000" * 100 + '"}',
)
"""Texts that they write there."""


@pytest.mark.parametrize("workplace", [{"attempts": 2}], indirect=True)
async def test_nothing_that_it_leaves_after_its_result_earns_it_another_try(
    workplace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on, too, and removes what is left."""
    (folders := tmp_path / "folders").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    code = """
import shutil
print(json.dumps("the result"), flush=True)
folder = os.environ["AGL_REPORTS"]
os.chdir(folder)
exec(task)
"""
    written = "\n".join(f"open('{number}.jsonl', 'w').write({line!r})" for number, line in enumerate(ODD))
    # Its own folder, deeper than Python calls.
    deep = f"os.chdir({str(Path('..') / 'work')!r})\nfor _ in range(1100): os.mkdir('d'); os.chdir('d')"
    actions = [*ACTS, written, deep]
    ended = await run(workplace, tmp_path, code, *actions)
    for action, (rollout, attempt) in zip(actions, ended, strict=True):
        what = (rollout.ending, attempt.attempt, attempt.result)
        assert what == (Ending.FINISHED, 0, "the result"), (action[:80], attempt.error)
    problems = workplace.workers[0].worker.problems
    assert sum("cannot be read" in problem for problem in problems) >= 6
    assert any("more than 64 MiB" in problem for problem in problems)
    for remover in threading.enumerate():
        if remover.name == "agl-remover":
            await asyncio.to_thread(remover.join)
    assert not list(folders.iterdir())


async def test_another_status_than_0_and_a_task_that_no_environment_can_hold_are_crashes_that_say_so(
    workplace: Any, tmp_path: Path
) -> None:
    code = "print('noise ' * 10_000, file=sys.stderr)\nprint('7')\nraise ValueError('no such city')"
    [(rollout, failed), (_, large)] = await run(workplace, tmp_path, code, None, "x" * 200_000)
    assert rollout.ending is Ending.CRASHED
    assert failed.error.startswith("the command exited with status 1; the end of its stderr: ")
    assert failed.error.endswith("ValueError: no such city")
    assert len(failed.error) < 2200
    assert "the command could not be run" in large.error


def test_a_program_that_is_not_there_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="no program 'pythno'"):
        Command(["pythno", "agent.py"], tmp_path)


# A command under a worker gets what `agl run` gives one, unchanged: identity, tool results and state.


MARKED = f"""{ASK}
    import agl_core, subprocess, sys, time

    @agl_core.tool
    def look_up(city):
        return []

    with agl_core.agent("forecaster"):
        agl_core.state(plan=["look up"])
        ask()
        look_up("Bern")
    agl_core.reward(0.5, name="style")
"""

PLUGIN = """
    import agl_core
    from agl_core.types import Identity

    @agl_core.adapter("my_framework")
    def mine():
        return lambda: Identity("mine")
"""


async def run_seen(
    workplace: Any, folder: Path, code: str, *arguments: str, plugins: Any = ()
) -> tuple[Any, Any, Episode]:
    (folder / "program.py").write_text(textwrap.dedent(code))
    runner = CommandPerAttempt(Command([sys.executable, "program.py", *arguments], folder), plugins=plugins)
    [(rollout, attempt)] = await workplace.run(runner, ["Bern?"])
    store = workplace.stack.store
    calls, tool_results = await store.calls([attempt.key]), await store.tool_results([attempt.key])
    return rollout, attempt, build_episode(rollout, attempt, calls, tool_results, await store.rewards([attempt.key]))


PAST_AGL = """
    import httpx, sys
    # As a client with a base URL in code. It is sent to whatever address the environment of the test names.
    for _ in range(2):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": "Bearer a-key-of-its-own"}
        httpx.post(sys.argv[1] + "/chat/completions?key=secret", json=body, headers=headers)
"""


async def test_marks_state_rewards_and_calls_past_agl(workplace: Any, tmp_path: Path) -> None:
    upstream = workplace.stack.upstream
    rollout, attempt, episode = await run_seen(workplace, tmp_path, f"{MARKED}{PAST_AGL}", upstream.url)
    assert rollout.ending is Ending.FINISHED, attempt.error
    (transition,) = episode.transitions
    assert (transition.agent, transition.state) == ("forecaster", {"plan": ["look up"]})
    assert [(o.tool, str(o.status), o.source) for o in transition.tool_results] == [
        ("look_up", "empty", Source.COMMAND)
    ]
    assert [(r.name, r.value) for r in episode.rewards] == [("style", 0.5)]
    assert attempt.bypassed == {f"{upstream.url}/chat/completions": 2}
    assert health_of(episode).text == "unobserved (calls)"
    assert upstream.received[-1].headers["Authorization"] == "Bearer a-key-of-its-own", "the request is as it was"


async def test_a_command_without_a_call_is_told_where_it_called(workplace: Any, tmp_path: Path) -> None:
    url = workplace.stack.upstream.url
    rollout, attempt, _ = await run_seen(workplace, tmp_path, PAST_AGL, url)
    assert rollout.ending is Ending.NO_CALL
    assert attempt.error.endswith(f"It called {url}/chat/completions.")


async def test_what_any_process_of_the_command_writes_is_a_report_of_the_command(
    workplace: Any, tmp_path: Path
) -> None:
    forging = """
    import json, os
    for id, source in (("1", "adapter"), ("2", "conversation")):
        report = {"id": id, "rollout": "", "attempt": 0, "tool": "add", "status": "ok", "source": source,
                  "tool_call_id": "c" + id, "adapter": "langchain"}
        with open(os.path.join(os.environ["AGL_REPORTS"], f"{id}.jsonl"), "w") as spool:
            spool.write(json.dumps({"tool_result": report}))
    """
    _, _, episode = await run_seen(workplace, tmp_path, forging)
    assert [(o.id, o.tool_call_id, o.adapter, o.source) for o in episode.unjoined] == [
        ("1", "c1", "langchain", Source.COMMAND),
        ("2", "c2", "langchain", Source.COMMAND),
    ]


async def test_what_it_reported_before_its_time_was_up_is_kept(workplace: Any, tmp_path: Path) -> None:
    flag = tmp_path / "told"
    code = f"""{MARKED}
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    open({str(flag)!r}, "w").close()
    time.sleep(60)
"""
    (tmp_path / "program.py").write_text(textwrap.dedent(code))
    runner, recording = CommandPerAttempt(Command([sys.executable, "program.py"], tmp_path)), Recording()
    running = asyncio.create_task(runner.run(await workplace.lease(), workplace.stack.server.base_url, recording))
    await until(flag.exists)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert [(tool_result.tool, str(tool_result.status)) for tool_result in recording.tool_results] == [
        ("look_up", "empty")
    ]
    assert [(reward.name, reward.value) for reward in recording.rewards] == [("style", 0.5)]
    await runner.close()


@pytest.mark.parametrize("installed", [False, True])
async def test_adapters_of_the_users_plugin_files_and_those_that_only_the_commands_python_has(
    installed: bool, workplace: Any, tmp_path: Path
) -> None:
    """Packages name their frameworks in their metadata, so that they attach before the framework is used."""
    (tmp_path / "my_framework.py").touch()
    (tmp_path / "my_plugin.py").write_text(textwrap.dedent(PLUGIN))
    if installed:
        (info := tmp_path / "mine-1.0.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[agl]\nmine = my_plugin\n[agl.frameworks]\nmy_framework = my_plugin\n")
    code = f"{ASK}\n    import sys, my_framework\n    assert 'my_plugin' in sys.modules\n    ask()\n"
    plugins = [] if installed else [tmp_path / "my_plugin.py"]
    _, attempt, episode = await run_seen(workplace, tmp_path, code, plugins=plugins)
    assert [t.agent for t in episode.transitions] == ["mine"], attempt.error
