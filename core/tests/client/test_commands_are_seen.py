"""A command under a worker gets what `agl run` gives one, unchanged: identity, tool results and state."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agl_core.capture import Recording
from agl_core.learning.health import health_of
from agl_core.learning.transitions import build_episode
from agl_core.testing import episodes as make
from agl_core.testing.server import until
from agl_core.types import Ending, Episode, Source
from agl_core.wire import LeaseRequest
from agl_core.worker.commands import CommandPerAttempt

ASK = """
    import httpx, os

    def ask():
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, headers=headers).raise_for_status()
"""

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

    class Mine:
        framework = "my_framework"

        def attach(self):
            return lambda: Identity("mine")

    @agl_core.hookimpl
    def register_components(register):
        register(agl_core.kinds.ADAPTER, "mine", lambda options: Mine(), doc="Mine.")
"""


async def run(workplace: Any, folder: Path, code: str, *arguments: str, **options: Any) -> tuple[Any, Any, Episode]:
    (folder / "program.py").write_text(textwrap.dedent(code))
    runner = CommandPerAttempt([sys.executable, "program.py", *arguments], folder, **options)
    rollout, attempt = (await workplace.finish(workplace.start_runner(runner), ["Bern?"]))[0]
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
    rollout, attempt, episode = await run(workplace, tmp_path, f"{MARKED}{PAST_AGL}", upstream.url)
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
    rollout, attempt, _ = await run(workplace, tmp_path, PAST_AGL, url)
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
    _, _, episode = await run(workplace, tmp_path, forging)
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
    server, recording = workplace.stack.server, Recording()
    await server.queue.enqueue([make.rollout("w0")])
    [lease] = (await server.queue.lease(LeaseRequest(worker="w", capacity=1))).leases
    runner = CommandPerAttempt([sys.executable, "program.py"], tmp_path)
    running = asyncio.create_task(runner.run(lease.assignment, server.base_url, recording))
    await until(flag.exists)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    assert [(tool_result.tool, str(tool_result.status)) for tool_result in recording.tool_results] == [
        ("look_up", "empty")
    ]
    assert [(reward.name, reward.value) for reward in recording.rewards] == [("style", 0.5)]
    await runner.close()


@pytest.mark.parametrize(("attached", "agent"), [(True, "mine"), (False, None)])
async def test_adapters_of_the_users_plugin_files(
    attached: bool, agent: str | None, workplace: Any, tmp_path: Path
) -> None:
    (tmp_path / "my_framework.py").touch()
    (tmp_path / "my_plugin.py").write_text(textwrap.dedent(PLUGIN))
    code = f"{ASK}\n    import my_framework\n    ask()\n"
    plugins = [tmp_path / "my_plugin.py"] if attached else None
    _, attempt, episode = await run(workplace, tmp_path, code, plugins=plugins)
    assert [t.agent for t in episode.transitions] == [agent], attempt.error


async def test_adapters_that_only_the_commands_python_has(workplace: Any, tmp_path: Path) -> None:
    """They name their frameworks in the metadata of their package, so that they attach before the framework is used."""
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agl]\nmine = my_plugin\n[agl.frameworks]\nmy_framework = my_plugin\n")
    (tmp_path / "my_plugin.py").write_text(textwrap.dedent(PLUGIN))
    (tmp_path / "my_framework.py").touch()
    code = f"{ASK}\n    import sys, my_framework\n    assert 'my_plugin' in sys.modules\n    ask()\n"
    _, attempt, episode = await run(workplace, tmp_path, code)
    assert [t.agent for t in episode.transitions] == ["mine"], attempt.error
