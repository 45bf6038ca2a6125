"""Rewards for what an attempt changed in its workspace: hidden tests, the size of the patch, and what it touched.

    patch ─▶ fresh copy of the workspace ─▶ hidden tests over it ─▶ pytest in a fresh sandbox ─▶ JUnit XML ─▶ reward

Code under test runs in the interpreter that runs the tests, and it is hostile to them. So the verdict rests on more
than on what that interpreter says: each test file gets *control tests*, of random names, that have to fail. A solution
that makes tests pass in any other way than by being right lets them pass as well, or prevents the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary
from xml.etree import ElementTree

from pydantic import Field, ValidationError, model_validator

import agl_core
from agl_core.config.models import RunConfig
from agl_core.config.sections import Section
from agl_core.errors import ConfigError
from agl_core.protocols import RewardRule
from agl_core.types import Episode, Reward
from agl_harnesses.patches import PatchError, apply_patch, is_matched, patched_paths, place_file
from agl_harnesses.sandbox import confined
from agl_harnesses.workspace import Files, Workspace, Workspaces, task_source

PROTECTED = (
    "tests", "test_*.py", "*_test.py", "conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg",
    "pyproject.toml", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "__pycache__", "site-packages", ".venv",
    "*.dist-info", "*.egg-info",
)  # fmt: skip
"""Tests, and files that steer what runs them: an attempt's changes to them are left out."""
_PASSED = "passed"
_MAX_REPORT = 32 << 20
_MAX_OUTPUT, _MAX_MESSAGE, _MAX_NAMED = 4000, 200, 20
"""Characters of the output and of a test's message, and failed tests, that evidence has."""
_AT_ONCE = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()

_PYTEST = """\
import os, sys, pytest
packages = [place for place, path in enumerate(sys.path) if path.endswith("-packages")]
sys.path.insert(min(packages, default=len(sys.path)), os.getcwd())
os._exit(pytest.main(sys.argv[1:]))
"""
"""Modules of the workspace come after the standard library and before what is installed."""
_PYTEST_OPTIONS = (
    "-p", "no:cacheprovider", "-o", "addopts=", "-o", "junit_family=xunit2", "--import-mode=append",
    "--continue-on-collection-errors", "--tb=short", "-q",
)  # fmt: skip
_CONTROLS = """

def test_{0}():
    value = [{1}]
    assert value == [{1} + 1]


class Test_{0}(__import__("unittest").TestCase):
    def test_{0}(self):
        self.assertEqual({1}, {1} + 1)
"""


class HiddenTests(Section):
    """A task's `tests` in its metadata, which no agent sees."""

    files: Files = Field({})
    """Texts of files that are put over the workspace, by path."""
    folder: Path | None = None
    """A folder whose files are put over the workspace, absolute."""
    patch: str = ""
    """A git patch that brings the tests, instead."""
    fail_to_pass: Annotated[tuple[str, ...], Field(min_length=1)]
    """The tests that a solution has to make pass, by pytest's ids: `tests/test_a.py::TestA::test_b[1]`."""
    pass_to_pass: tuple[str, ...] = ()
    """The tests that pass before and have to pass after it."""
    command: tuple[str, ...] = ()
    """Instead of pytest, any command that writes JUnit XML to `{junit}` and exits with 0 only if all tests passed.
    Ids are then the report's: class name, dot, name. It has no control tests."""

    @model_validator(mode="after")
    def _is_absolute(self) -> HiddenTests:
        if self.folder is not None and not self.folder.is_absolute():
            raise ValueError(f"the folder '{self.folder}' has to be an absolute path")
        return self


@dataclass(frozen=True)
class Verdict:
    """How the hidden tests ended."""

    passed: frozenset[str]
    """Ids of those that certainly passed."""
    evidence: str
    """The reasons, for people; text of the agent is part of it."""


class TestsPassOptions(Section):
    score: Literal["all", "share"] = "all"
    """all: 1 if every test passes, else 0. share: the share of `fail_to_pass` that passes."""
    timeout: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Seconds that the tests may take."""
    python: str | None = None
    """A Python that has pytest, for instance '.venv/bin/python' of the setup; absent: agl's own, without
    plugins, or a container's `python3`."""


def tests_pass(options: TestsPassOptions, config: RunConfig | None) -> RewardRule:
    """Hidden tests on the attempt's patch, in a fresh copy of the workspace and a fresh sandbox.

        [rewards.tests_pass]
        score = "share"

    The agent's result has the patch as `diff`, as that of every harness. The task's metadata has the tests:
    `{"tests": {"files": {"test_a.py": "…"}, "fail_to_pass": ["test_a.py::test_b"], "pass_to_pass": []}}`. If one of
    `pass_to_pass` fails, the reward is 0. The patch's changes to tests and to files that steer pytest are left out.
    """
    workspaces = Workspaces.of(config)

    async def score(episode: Episode) -> list[Reward]:
        tests = _hidden_tests(episode)
        verdict = await judge(episode, tests, options, workspaces)
        solved = set(tests.fail_to_pass) & verdict.passed
        value = len(solved) / len(set(tests.fail_to_pass)) if verdict.passed.issuperset(tests.pass_to_pass) else 0.0
        if options.score == "all":
            value = float(value == 1)
        return [Reward(episode.rollout, episode.attempt, "tests_pass", value, "", evidence=verdict.evidence)]

    return score


async def judge(episode: Episode, tests: HiddenTests, options: TestsPassOptions, workspaces: Workspaces) -> Verdict:
    if _diff(episode) == "":
        return Verdict(frozenset(), "The attempt changed nothing.")
    files = {id.partition("::")[0] for id in (*tests.fail_to_pass, *tests.pass_to_pass)}

    def is_protected(path: str) -> bool:
        return path in files or is_matched(path, PROTECTED)

    try:
        async with patched_workspace(episode, workspaces, is_protected) as (workspace, home):
            return await _run_tests(tests, sorted(files), workspace, home, options)
    except PatchError as error:
        return Verdict(frozenset(), f"The patch cannot be applied: {error}")


@contextlib.asynccontextmanager
async def patched_workspace(
    episode: Episode, workspaces: Workspaces, is_protected: Callable[[str], bool]
) -> AsyncIterator[tuple[Workspace, Path]]:
    """A fresh workspace of the episode's task with the attempt's patch, and an empty home beside it.

    Changes of protected paths are left out. PatchError if there is no patch, or it does not fit.
    """
    task, diff = episode.task, _diff(episode)
    own = task_source({**task.metadata}, f"Task '{task.id}', its metadata")
    source = own or task_source(task.input, f"Task '{task.id}', its input")
    if diff is None:
        raise PatchError("the attempt's result has no diff, as that of a harness has")
    turns = _AT_ONCE.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(max(2, os.cpu_count() or 1)))
    async with turns:
        with TemporaryDirectory(prefix="agl-", ignore_cleanup_errors=True) as folder:
            home = Path(folder) / "home"
            home.mkdir()
            workspace = await asyncio.to_thread(workspaces.create, source, Path(folder) / "work")
            excluded = [path for path in await asyncio.to_thread(patched_paths, diff) if is_protected(path)]
            await asyncio.to_thread(apply_patch, diff, workspace.path, excluded)
            yield workspace, home


async def _run_tests(
    tests: HiddenTests, files: Sequence[str], workspace: Workspace, home: Path, options: TestsPassOptions
) -> Verdict:
    root, controls = workspace.path, set[str]()
    await asyncio.to_thread(_place_tests, tests, root)
    report = home / f"{secrets.token_hex(8)}.xml"
    if tests.command:
        command = [part.replace("{junit}", str(report)) for part in tests.command]
    else:
        if options.python is None and importlib.util.find_spec("pytest") is None:
            raise ConfigError("tests_pass needs pytest: install it beside agl, or name a `python` that has it.")
        for file in files:
            controls |= await asyncio.to_thread(_add_controls, root, file)
        own = "python3" if workspace.section.runner == "command" else sys.executable
        program = own if options.python is None else os.path.join(workspace.mount, options.python)
        command = [
            program,
            "-I",
            "-B",
            "-c",
            _PYTEST,
            *_PYTEST_OPTIONS,
            f"--rootdir={workspace.mount}",
            f"--junitxml={report}",
            *files,
        ]
    # Plugins of agl's own environment are no part of a task.
    variables = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} if options.python is None else {}
    status, output = await run_confined(command, workspace, home, options.timeout, variables)
    return await asyncio.to_thread(_verdict, tests, controls, status, report, output)


def _hidden_tests(episode: Episode) -> HiddenTests:
    try:
        return HiddenTests.model_validate(episode.task.metadata.get("tests"))
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, ("tests", *problem["loc"])))
        raise ConfigError(
            f"Task '{episode.task.id}': its metadata `{place}`: {problem['msg']}. tests_pass needs `tests` there, with "
            f"`fail_to_pass` and `files` or `folder`."
        ) from None


def _diff(episode: Episode) -> str | None:
    diff = episode.result.get("diff") if isinstance(episode.result, dict) else None
    return diff if isinstance(diff, str) else None


def _place_tests(tests: HiddenTests, root: Path) -> None:
    apply_patch(tests.patch, root)
    files = dict[str, bytes]()
    if tests.folder is not None:
        below = (path for path in tests.folder.rglob("*") if path.is_file())
        files = {path.relative_to(tests.folder).as_posix(): path.read_bytes() for path in below}
    files |= {path: text.encode() for path, text in tests.files.items()}
    for path, content in files.items():
        place_file(root, path, content)


def _add_controls(root: Path, file: str) -> set[str]:
    """Append tests that have to fail to a test file; returns their names in the report."""
    path, name = root / file, secrets.token_hex(4)
    if not path.is_file() or path.is_symlink():
        raise ConfigError(f"tests_pass: there is no test file '{file}', neither in the workspace nor in `tests.files`.")
    with path.open("a") as appended:
        appended.write(_CONTROLS.format(name, secrets.randbelow(1000)))
    return {_reported(f"{file}::test_{name}"), _reported(f"{file}::Test_{name}::test_{name}")}


def _reported(id: str) -> str:
    """The name of a test in a JUnit report, by pytest's id.

    >>> _reported("tests/test_a.py::TestA::test_b[x::y/z]"), _reported("pkg.TestA.test_b")
    ('tests.test_a.TestA.test_b[x::y/z]', 'pkg.TestA.test_b')
    """
    address, bracket, parameters = id.partition("[")
    file, *names = address.split("::")
    return ".".join([re.sub(r"\.py$", "", file).replace("/", "."), *names]) + bracket + parameters


async def run_confined(
    command: Sequence[str], workspace: Workspace, home: Path, timeout: float, variables: Mapping[str, str], **more: Any
) -> tuple[int | None, str]:
    """The exit status, None if time is up, and the end of the output; nothing runs any more then.

    `more` are further arguments of `confined`.
    """
    own = {"HOME": str(home), "TMPDIR": str(home), **workspace.variables, **variables}
    environment = {"PATH": os.environ.get("PATH", os.defpath), **own}
    places: Any = {"workspace": workspace.path, "home": home, "mount": workspace.mount, "variables": own, **more}
    async with confined(command, section=workspace.section, **places) as line:
        process = await asyncio.create_subprocess_exec(
            *line,
            cwd=workspace.path,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        assert process.stdout is not None
        output, status = bytearray(), None
        try:
            async with asyncio.timeout(timeout):
                while data := await process.stdout.read(1 << 16):
                    output += data
                    del output[:-_MAX_OUTPUT]
                status = await process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
    return status, output.decode(errors="replace")


def _verdict(tests: HiddenTests, controls: set[str], status: int | None, report: Path, output: str) -> Verdict:
    """The proof in a report: a test passed if it is there once, as passed, and everything else is as it has to be."""

    def refused(reason: str) -> Verdict:
        return Verdict(frozenset(), f"{reason} The end of its output:\n{output}")

    if status is None:
        return refused("The tests took too long.")
    outcomes: dict[str, list[str]] = {}
    try:
        if report.is_symlink() or report.stat().st_size > _MAX_REPORT:
            raise ValueError
        for case in ElementTree.parse(report).iter("testcase"):
            worse = [child for child in case if child.tag in ("failure", "error", "skipped")]
            outcome = f"{worse[0].tag}: {worse[0].get('message', '')[:_MAX_MESSAGE]}" if worse else _PASSED
            outcomes.setdefault(f"{case.get('classname')}.{case.get('name')}", []).append(outcome)
    except (OSError, ValueError, ElementTree.ParseError):
        return refused(f"The command exited with status {status} and wrote no report.")
    if not all(len(outcomes.get(name, ())) == 1 and _has_failed(outcomes[name]) for name in controls):
        return refused("Tests that have to fail did not: the test runner was tampered with, or could not start.")
    if status != 1 if controls else any(map(_has_failed, outcomes.values())) != (status != 0):
        return refused(f"The report does not go with exit status {status}.")
    ended = {id: outcomes.get(_reported(id), ["it did not run"]) for id in (*tests.fail_to_pass, *tests.pass_to_pass)}
    passed = frozenset(id for id, ends in ended.items() if ends == [_PASSED])
    failed = [f"{id}: {'; '.join(ends)}" for id, ends in ended.items() if id not in passed]
    return Verdict(passed, "\n".join([f"{len(passed)} of {len(ended)} tests passed.", *failed[:_MAX_NAMED]]))


def _has_failed(outcomes: Sequence[str]) -> bool:
    return any(outcome.startswith(("failure", "error")) for outcome in outcomes)


@agl_core.reward_rule
def diff_size(
    episode: Episode,
    *,
    per_line: Annotated[float, Field(gt=0, description="The penalty of a line.")] = 0.001,
    free: Annotated[int, Field(ge=0, description="Lines without a penalty.")] = 0,
    most: Annotated[float, Field(gt=0, description="The largest penalty.")] = 1.0,
) -> float:
    """A penalty for each line of the attempt's patch: all but those of context, so each file counts some more.

    >>> from agl_core.types import Ending, Mode, Task
    >>> result = {"diff": "diff --git a/f b/f\\n--- a/f\\n+++ b/f\\n@@ -1,2 +1,2 @@\\n same\\n-old\\n+new\\n"}
    >>> diff_size(Episode("r", 0, "g", 0, Task("1", "Fix it"), Mode.TRAIN, Ending.FINISHED, (), result=result), free=5)
    -0.001
    """
    lines = sum(not line.startswith(" ") for line in (_diff(episode) or "").split("\n")[:-1])
    return -min(most, per_line * max(0, lines - free))


@agl_core.reward_rule
def untouched(
    episode: Episode,
    *,
    patterns: Annotated[
        tuple[str, ...], Field(min_length=1, description="Names, or paths with a slash; `*`, `?` and `[…]` match.")
    ],
) -> float:
    """1 if the attempt's patch changes nothing that a pattern matches; 0 without a patch."""
    diff = _diff(episode)
    try:
        return float(diff is not None and not any(is_matched(path, patterns) for path in patched_paths(diff)))
    except PatchError:
        return 0.0
