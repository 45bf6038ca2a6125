"""`agl doctor`, `agl run --config`, and starts that fail, with engines from the user's own plugin file."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from agl_command import Agl, core_and_server_alone  # noqa: F401

from agl_core import capture
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import Ending, Mode
from agl_core.wire import OPERATOR_KEY, WORKER_KEY
from agl_server.store.sqlite import SqliteStore

from .conftest import Bench

PLUGIN = """
    import os

    import agl_core
    from agl_core.protocols import Engine, Upstream
    from agl_core.types import Identity

    class Elsewhere(Engine):
        "A model server that runs already; it notes each start and stop."

        def __init__(self, context):
            self._models = {name: "served" for name in context.policies}

        def note(self, what):
            with open("starts.txt", "a") as log:
                print(what, file=log)

        async def start(self):
            self.note("started")
            return Upstream((os.environ["MODEL_SERVER"],), self._models, "key")

        async def stats(self):
            "Each time that it is asked, it has taken as many tokens more."
            self._asked = getattr(self, "_asked", 0) + 1
            counted = {"prefilled": 100.0 * self._asked, "decoded": 20.0 * self._asked, "trained": 0.0, "scored": 0.0}
            return {"peak_rss_bytes": 2.0**30} | {f"tokens_{kind}": count for kind, count in counted.items()}

        async def versions(self):
            return dict.fromkeys(self._models, 0)

        async def stop(self):
            self.note("stopped")

        update = save = load = None

    class Broken(Elsewhere):
        def __init__(self, context, log=None):
            self._log = log and context.run_dir / log

        async def start(self):
            if self._log is not None:
                self._log.write_text("what the engine had to say")
            raise agl_core.errors.EngineError("The engine cannot start: it is broken.")

    class Mine:
        framework = "my_framework"

        def attach(self):
            return lambda: Identity("mine")

    @agl_core.hookimpl
    def register_components(register):
        provided = {agl_core.Capability.TOKEN_IDS}
        register(agl_core.kinds.ENGINE, "elsewhere", lambda options, context: Elsewhere(context), provides=provided)
        register(agl_core.kinds.ENGINE, "broken", lambda options, context: Broken(context), provides=provided)
        log = "engine.log"
        register(agl_core.kinds.ENGINE, "telling", lambda options, context: Broken(context, log), provides=provided)
        register(agl_core.kinds.ALGORITHM, "plain", lambda options: None)
        register(agl_core.kinds.ADAPTER, "mine", lambda options: Mine(), doc="Mine.")
"""

CONFIG = """
    config_version = 1
    name = "tried"
    plugins = ["elsewhere.py"]
    agent.entry = "agent:solve"
    agent.attach = false
    tasks.train = { source = "jsonl", path = "tasks.jsonl" }
    policies.default.model.path = "weights"
    algorithm.name = "plain"
    engine.name = "elsewhere"
"""

AGENT = """
    import os
    import agl_core, httpx2

    KEY = os.environ["OPENAI_API_KEY"]  # Clients that are made at import look for one.

    def solve(task, context):
        headers = {"Authorization": f"Bearer {context.api_key}"}
        asked = {"model": "default", "messages": [{"role": "user", "content": str(task)}]}
        reply = httpx2.post(context.base_url + "/chat/completions", headers=headers, json=asked).json()
        agl_core.reward(0.5)
        return 3.0
"""

PROGRAM = """
    import os
    import my_framework, httpx2

    import agl_core

    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    asked = {"model": "default", "messages": [{"role": "user", "content": "1 + 2?"}]}
    reply = httpx2.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", headers=headers, json=asked).json()
    [call] = reply["choices"][0]["message"]["tool_calls"]
    with agl_core.tool(call["function"]["name"], tool_call_id=call["id"]) as run:
        run.result = 3
    agl_core.reward(1.0)
"""


Doctor: TypeAlias = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def running(running: Bench, working_folder: Path) -> Bench:
    """A folder with a configuration in front of the upstream."""
    (working_folder / "weights").mkdir()
    (working_folder / "tasks.jsonl").write_text('{"input": "1 + 2?"}\n')
    files = {
        "elsewhere.py": PLUGIN,
        "train.toml": CONFIG,
        "agent.py": AGENT,
        "my_framework.py": "",
        "program.py": PROGRAM,
    }
    for name, text in files.items():
        running.script(name, text)
    return running


@pytest.fixture
def doctor(running: Bench, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """`agl doctor` in this process, to which it attaches no adapter, since that would stay."""
    monkeypatch.setattr(capture, "installed_adapters", list)
    monkeypatch.setenv("MODEL_SERVER", running.upstream.url)
    return lambda config: agl("doctor", config)


def log(running: Bench) -> list[str]:
    return (running.folder / "starts.txt").read_text().split()


def test_doctor_finds_nothing_wrong(running: Bench) -> None:
    result = running.agl("doctor", "train.toml", MODEL_SERVER=running.upstream.url)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert "ok    configuration: train.toml is valid" in lines
    assert "ok    tasks: the first of each set (train) can be made" in lines
    assert "ok    engine, policy 'default': exact ids and log-probabilities are returned" in lines
    (resources,) = (line for line in lines if line.startswith("ok    resources: "))
    assert "took 1.0 GiB of memory" in resources
    assert not any(line.startswith("FAIL") for line in lines)
    assert log(running) == ["started", "stopped"]
    (rollout,) = (line for line in lines if line.startswith("ok    rollout: "))
    assert "finished, 1 calls by an unnamed agent; tools: none; reward: 0.5 (reported 0.5); healthy" in rollout
    assert [request.body["model"] for request in running.upstream.received] == ["served"] * 3
    assert not (running.folder / "runs").exists()


def test_doctor_estimates_what_the_run_takes_and_costs(running: Bench, doctor: Doctor) -> None:
    """10 steps of 2 groups of 4, and 3 evaluations of a task in 2 modes: 80 rollouts and 6."""
    more = """
    train = { steps = 10, groups_per_step = 2, group_size = 4 }
    eval.every = 5
    tasks.eval = { source = "jsonl", path = "tasks.jsonl" }
    prices = { prefill = 100, sample = 1000, train = 10 }
    """
    running.script("train.toml", CONFIG + more)
    result = doctor("train.toml")
    [line] = [line for line in result.stdout.splitlines() if line.startswith("ok    cost: ")]
    [_, _, asked] = running.upstream.received  # The engine is tried with two.
    assert asked.body["return_token_ids"] is True
    found = re.fullmatch(
        r"ok    cost: about 8,600 tokens prefilled, 1,700 tokens sampled, ([\d,]+) tokens trained; "
        r"cost (\S+), if all 86 rollouts are like this one",
        line,
    )
    assert found, line
    trained = int(found[1].replace(",", ""))
    assert float(found[2]) == pytest.approx((8600 * 100 + 1700 * 1000 + trained * 10) / 1e6, abs=0.01)


def test_doctor_finds_an_engine_that_returns_no_ids(running: Bench, doctor: Doctor) -> None:
    running.upstream.returns_ids = False
    result = doctor("train.toml")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "FAIL  engine, policy 'default': its replies lack prompt_token_ids, token_ids, logprobs" in result.stdout
    assert log(running) == ["started", "stopped"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"agent.py": "import nowhere_to_be_found\n"}, "the module 'agent' cannot be imported"),
        ({"train.toml": CONFIG.replace('entry = "agent:solve"', 'command = "no-such-program x"')}, "no-such-program"),
        ({"tasks.jsonl": ""}, "tasks"),
    ],
)
def test_doctor_finds_what_keeps_a_run_from_its_start(
    running: Bench, doctor: Doctor, changes: dict[str, str], problem: str
) -> None:
    for name, text in changes.items():
        running.script(name, text)
    result = doctor("train.toml")
    [broken] = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert (result.returncode, problem in broken) == (1, True), result.stdout
    assert not (running.folder / "starts.txt").exists()


@pytest.mark.usefixtures("core_and_server_alone")
def test_doctor_names_all_packages_that_are_not_installed(running: Bench, doctor: Doctor) -> None:
    changed = CONFIG.replace('"plain"', '"grpo"').replace('"elsewhere"', '"torch"')
    running.script("train.toml", f"{changed}\n    [rewards.exact_match]\n")
    result = doctor("train.toml")
    assert result.stdout.count("FAIL") == 1, result.stdout
    assert "note  engines: none is installed" in result.stdout
    named = re.findall(r"\[(.+?)\] .* in (\S+), which is not installed here", result.stdout)
    assert named == [("engine", "agl-torch"), ("algorithm", "agl-algorithms"), ("rewards", "agl-rewards")]


@pytest.mark.parametrize(
    ("old", "new", "ended", "problem"),
    [
        ("return 3.0", "return task['question']", "crashed, 1 calls", "TypeError: string indices must be integers"),
        ("reply = httpx2", "return 3.0\n        reply = httpx2", "no_call, 0 calls", "OPENAI_BASE_URL"),
        ("context.base_url", "'http://127.0.0.1:9/v1'", "crashed, 0 calls", "If its LLM client reaches no server:"),
    ],
    ids=["a key that its input does not have", "no call", "an address of its own"],
)
def test_doctor_runs_the_agent_and_says_what_is_wrong_with_it(
    running: Bench, doctor: Doctor, old: str, new: str, ended: str, problem: str
) -> None:
    running.script("agent.py", AGENT.replace(old, new))

    result = doctor("train.toml")

    assert result.returncode == 1, result.stdout + result.stderr
    looked = [line for line in result.stdout.splitlines() if "  rollout: task " in line]
    times = 8 if ended == "crashed, 1 calls" else 3  # It may have been the policy's doing.
    assert [ended in line for line in looked] == [True] * times
    assert looked[-1].startswith("FAIL  rollout: ")
    assert problem in result.stdout


def test_run_uses_the_engine_policies_and_store_of_the_configuration(
    running: Bench, agl: Agl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_SERVER", running.upstream.url)
    running.upstream.script(CallTools([("add", {"a": 1})]), Say("3"))
    result = agl("run", "--config", "train.toml", "--name", "mine", "--", sys.executable, "program.py")
    assert result.returncode == 0, result.stderr
    assert log(running) == ["started", "stopped"]

    rollout, attempt, episode = running.recorded("mine")
    assert (rollout.run, rollout.mode, attempt.ending) == ("mine", Mode.EVAL_SAMPLED, Ending.FINISHED)
    (transition,) = episode.transitions
    assert (transition.agent, transition.policy, transition.has_ids) == ("mine", "default", True)
    assert [(o.tool, o.result) for o in transition.tool_results] == [("add", 3)]
    assert [reward.value for reward in episode.rewards] == [1.0]
    (request,) = running.upstream.received
    assert request.body["return_token_ids"] is True
    assert request.headers["Authorization"] == "Bearer key"
    assert rollout.id in agl("rollouts", "runs/mine").stdout


def test_what_only_limits_is_a_note(running: Bench, agl: Agl) -> None:
    running.upstream.returns_ids = False
    result = agl("doctor", "--upstream", running.upstream.url)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"ok    model server: {running.upstream.url} answers, with served" in result.stdout
    assert "note  token ids: its replies lack prompt_token_ids, token_ids, logprobs" in result.stdout


def test_what_is_broken_is_an_error_with_a_remedy(agl: Agl) -> None:
    result = agl("doctor", "no-such.toml")
    assert result.returncode == 1
    assert "FAIL  configuration: The configuration no-such.toml does not exist" in result.stdout
    listed = json.loads(agl("doctor", "no-such.toml", "--json").stdout)
    assert [check["subject"] for check in listed if check["mark"] == "FAIL"] == ["configuration"]


def test_a_run_without_steps_one_with_alarms_and_one_with_a_damaged_line(agl: Agl, tmp_path: Path) -> None:
    def doctor() -> tuple[int, str]:
        result = agl("doctor", str(tmp_path))
        return result.returncode, result.stdout

    (tmp_path / "config.toml").write_text("config_version = 1\n[train]\nsteps = 3\n")
    assert doctor() == (0, f"ok    run: {tmp_path}: stopped, 0 steps made\nok    alarms: no step was made yet\n")

    async def make_store() -> None:
        async with SqliteStore(tmp_path / "store.sqlite"):
            pass

    asyncio.run(make_store())
    alarm = '{"name": "truncated", "seen": "0.4 are cut", "remedy": "Raise it."}'
    (tmp_path / "metrics.jsonl").write_text(
        f'{{"step": 1, "kind": "train", "alarm/truncated": 1.0, "alarms": [{alarm}]}}\n'
    )
    status, output = doctor()
    assert (status, "note  alarm truncated, since step 1: 0.4 are cut\n      → Raise it.\n" in output) == (0, True)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ki\n{"step": 3, "kind": "train"}\n')
    status, output = doctor()
    assert (status, "FAIL  metrics: line 2 of " in output) == (1, True)
    assert "truncated, step 1: " in output, "it holds no more"


@pytest.fixture
def refused(running: Bench, agl: Agl, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command with an engine that cannot start, and returns what it says."""
    running.script("train.toml", CONFIG.replace('"elsewhere"', '"broken"'))
    for name in (WORKER_KEY, OPERATOR_KEY):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> str:
        ended = agl(*arguments)
        assert ended.returncode == 2
        return ended.stderr

    return run


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["train", "train.toml", "--set=agent.entry=no_agent:solve"], "'no_agent' cannot be imported"),
        (["train", "train.toml"], "it is broken"),
        (["eval", "train.toml"], "it is broken"),
        (["run", "--config", "train.toml", "--", sys.executable, "-c", ""], "it is broken"),
    ],
    ids=["an agent", "an engine", "eval", "run"],
)
def test_a_start_that_fails_leaves_no_folder(
    refused: Callable[..., str], working_folder: Path, command: list[str], problem: str
) -> None:
    assert problem in refused(*command)
    assert list((working_folder / "runs").iterdir()) == []


def test_what_an_engine_said_stays_until_the_name_is_taken(refused: Callable[..., str], working_folder: Path) -> None:
    for _ in range(2):
        refused("train", "train.toml", "--set=engine.name=telling")
        [folder] = (working_folder / "runs").iterdir()
        assert (folder / "engine.log").read_text() == "what the engine had to say"


def test_what_an_engine_said_to_doctor_stays_too(
    running: Bench, doctor: Doctor, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error may name its log."""
    running.script("train.toml", CONFIG.replace('"elsewhere"', '"telling"'))
    temporary = working_folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert "FAIL  start: The engine cannot start: it is broken" in doctor("train.toml").stdout
    assert [file.name for file in temporary.rglob("*") if file.is_file()] == ["engine.log"]


@pytest.mark.parametrize("command", [["train", "train.toml"], ["run", "--config", "train.toml", "--", "true"]])
def test_a_folder_that_cannot_be_made_is_named(
    refused: Callable[..., str], working_folder: Path, command: list[str]
) -> None:
    (working_folder / "runs").write_text("a file")
    output = refused(*command)
    assert "The run's folder" in output
    assert "cannot be made or written (Not a directory: " in output
    assert "--set runs=FOLDER" in output


READ_ONLY = 'mount --bind . . && mount -o remount,bind,ro . && cd .. && cd mine && exec "$@"'
"""A shell command in a mount namespace of its own, for root, whom permissions do not stop."""


def test_a_read_only_run_is_not_resumed(running: Bench) -> None:
    """The run is refused before anything, a tracker for instance, opens a file in it."""
    run = running.folder / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(f"folder = '{running.folder}'\n{textwrap.dedent(CONFIG)}")
    run.chmod(0o500)
    command = running.command("train", "--resume", str(run))
    if os.geteuid() == 0:
        command = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", *command]
    done = subprocess.run(command, cwd=run, capture_output=True, text=True, timeout=120)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this root may not mount")
    assert (done.returncode, done.stderr.count("Traceback")) == (2, 0), done.stderr
    assert f"Error: The run's folder {run} cannot be written, so that the run cannot go on." in done.stderr


@pytest.mark.usefixtures("refused")
def test_a_file_with_the_name_of_a_standard_module_does_no_harm(running: Bench) -> None:
    for name in ("glob", "queue", "types", "logging"):
        running.script(f"{name}.py", "raise RuntimeError('imported instead of the standard module')")
    command = [str(Path(sys.executable).with_name("agl")), "train", "train.toml"]
    done = subprocess.run(command, cwd=running.folder, capture_output=True, text=True, check=False)
    assert "it is broken" in done.stderr  # The engine, which is the last to be started.
    assert "imported instead" not in done.stdout + done.stderr
