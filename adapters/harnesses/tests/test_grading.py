"""Each run is a real one: the patch is made of a changed workspace, and pytest runs in a sandbox if there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_core.config.models import RunConfig, UntrainedConfig
from agl_core.errors import ConfigError
from agl_core.learning.rewards import ScoringRule, score
from agl_core.types import Ending, Episode, Mode, Reward, Task
from agl_harnesses import grading
from agl_harnesses.workspace import Workspaces, WorkspaceSection

BUGGY = "def add(a, b):\n    return a - b\n\n\ndef mul(a, b):\n    return a + b\n\n\ndef neg(a):\n    return -a\n"
FIXED = BUGGY.replace("a - b", "a + b", 1).replace(
    "def mul(a, b):\n    return a + b", "def mul(a, b):\n    return a * b"
)
HIDDEN = """
import json
import unittest
from calc import add, mul, neg

def test_add():
    assert add(2, 2) == 4

class TestMul(unittest.TestCase):
    def test_mul(self):
        self.assertEqual(mul(3, 3), 9)

def test_neg():
    assert neg(1) == -1
"""
TESTS = {
    "files": {"tests/test_calc.py": HIDDEN},
    "fail_to_pass": ["tests/test_calc.py::test_add", "tests/test_calc.py::TestMul::test_mul"],
    "pass_to_pass": ["tests/test_calc.py::test_neg"],
}
Change = Callable[[Path], object]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "project" / "tests").mkdir(parents=True)
    (tmp_path / "project" / "calc.py").write_text(BUGGY)
    (tmp_path / "project" / "tests" / "test_calc.py").write_text("def test_old():\n    pass\n")
    return tmp_path


def episode(project: Path, change: Change, tests: Any = TESTS) -> Episode:
    """An attempt that made this change in its workspace."""
    section = WorkspaceSection(folder=project / "project")
    workspace = Workspaces(section, project).create(None, project / "attempt")
    change(workspace.path)
    task = Task("t", {"prompt": "Fix it.", "workspace": {"folder": "project"}}, metadata={"tests": tests})
    result = {"text": "Done.", "diff": workspace.diff()}
    return Episode("r", 0, "g", 0, task, Mode.TRAIN, Ending.FINISHED, (), result=result)


async def reward(project: Path, change: Change, tests: Any = TESTS, **settings: Any) -> float:
    return (await rewarded(project, episode(project, change, tests), **settings)).value


def configured(project: Path) -> RunConfig:
    return UntrainedConfig.model_validate({"config_version": 1, "folder": project})


async def rewarded(project: Path, attempt: Episode, **settings: Any) -> Reward:
    rule = grading.tests_pass(grading.TestsPassOptions(**{"timeout": 250.0, **settings}), configured(project))
    scored, errors = await score(attempt, [ScoringRule("tests_pass", rule)], {})
    if errors:
        raise errors[0]
    return scored.rewards[0]


def writes(files: dict[str, str]) -> Change:
    def write(folder: Path) -> None:
        for name, text in files.items():
            (folder / name).write_text(text)

    return write


HALF = BUGGY.replace("a - b", "a + b", 1)
NEG_BROKEN = FIXED.replace("return -a", "return a")


@pytest.mark.parametrize(
    ("solution", "score", "expected"),
    [(FIXED, "all", 1.0), (HALF, "all", 0.0), (HALF, "share", 0.5), (BUGGY, "share", 0.0), (NEG_BROKEN, "share", 0.0)],
    ids=["right", "half", "the share of half", "nothing done", "another one broken"],
)
async def test_a_solution_earns_what_it_solves(project: Path, solution: str, score: str, expected: float) -> None:
    assert await reward(project, writes({"calc.py": solution}), score=score) == expected


ALWAYS_PASSES = "def test_add(): pass\nclass TestMul:\n    def test_mul(self): pass\ndef test_neg(): pass\n"
PASSING_HOOK = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    (yield).get_result().outcome = "passed"
"""
PATCHED_RUNNER = """
import unittest, _pytest.python
unittest.TestCase.run = lambda self, result=None: result.addSuccess(self)
_pytest.python.Function.runtest = lambda self: None
"""
PATCHED_REPORT = """
import _pytest.reports
make = _pytest.reports.TestReport.from_item_and_call.__func__
def passed(cls, item, call):
    call.excinfo = None
    return make(cls, item, call)
_pytest.reports.TestReport.from_item_and_call = classmethod(passed)
"""
PATCHED_CODE = """
import _pytest.python
_pytest.python.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__
"""
REGISTERED = """
import sys
class Passing:
    def pytest_runtest_call(self, item):
        item.runtest = lambda: None
    def pytest_runtest_setup(self, item):
        item.runtest = lambda: None
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        manager = getattr(getattr(value, "config", None), "pluginmanager", None)
        if manager and not manager.has_plugin("passing"):
            manager.register(Passing(), "passing")
    frame = frame.f_back
"""
FORGED = """
import os, sys
path = next(a for a in sys.argv if a.startswith("--junitxml=")).partition("=")[2]
names = [("tests.test_calc", "test_add"), ("tests.test_calc.TestMul", "test_mul"), ("tests.test_calc", "test_neg")]
cases = "".join(f'<testcase classname="{c}" name="{n}"/>' for c, n in names)
def forge():
    with open(path, "w") as file:
        file.write(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
"""
AT_EXIT = """
import atexit, re
def no_failures():
    text = re.sub("<failure.*?</failure>", "", open(path).read(), flags=re.S)
    open(path, "w").write(text)
atexit.register(no_failures)
"""
LATER = """
import subprocess
wait_and_forge = '''
import os, re, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(0.5)
text = re.sub("<failure.*?</failure>", "", open(sys.argv[1]).read(), flags=re.S)
open(sys.argv[1], "w").write(text)
'''
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.Popen([sys.executable, "-c", wait_and_forge, path], start_new_session=True, **quiet)
"""
PLANTED = {
    "reward.txt": "1.0",
    "reward.json": '{"reward": 1.0}',
    "conftest.py": PASSING_HOOK,
    "tests/conftest.py": PASSING_HOOK,
    "sitecustomize.py": PATCHED_RUNNER,
    "usercustomize.py": PATCHED_RUNNER,
    "cheat.pth": "import cheat",
    "cheat.py": PASSING_HOOK + PATCHED_RUNNER,
    "pytest.ini": "[pytest]\naddopts = -p cheat\n",
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-p cheat'\n",
    "pytest.py": PATCHED_RUNNER,
    "pluggy.py": PATCHED_RUNNER,
    "json.py": PATCHED_RUNNER,
    "unittest.py": PATCHED_RUNNER,
    "tests/test_calc.py": ALWAYS_PASSES,
    "test_calc.py": ALWAYS_PASSES,
}


@pytest.mark.parametrize(("solution", "expected"), [(FIXED, 1.0), (BUGGY, 0.0)], ids=["right", "wrong"])
async def test_planted_files_and_edited_tests_have_no_effect(project: Path, solution: str, expected: float) -> None:
    assert await reward(project, writes({**PLANTED, "calc.py": solution}), score="share") == expected


ATTACKS = {
    "sys.exit": "import sys\nsys.exit(0)",
    "os._exit": "import os\nos._exit(0)",
    "a patched runner": PATCHED_RUNNER + BUGGY,
    "patched reports": PATCHED_REPORT + BUGGY,
    "patched code": PATCHED_CODE + BUGGY,
    "a registered plugin": REGISTERED + BUGGY,
    "a forged report": FORGED + "forge(); os._exit(1)",
    "a report changed at exit": FORGED + AT_EXIT + BUGGY,
    "a process that changes the report later": FORGED + LATER + BUGGY,
    "NaN, infinity and 1.5": "add = lambda a, b: float('nan')\nmul = lambda a, b: float('inf')\nneg = lambda a: 1.5",
    "a skip": "import pytest\ndef add(a, b): pytest.skip()\nmul = neg = add",
}


@pytest.mark.parametrize("solution", ATTACKS.values(), ids=ATTACKS)
async def test_it_pays_for_no_other_way_to_make_tests_pass(project: Path, solution: str) -> None:
    assert await reward(project, writes({"calc.py": solution}), score="share") == 0.0


async def test_an_endless_loop_ends_with_its_time(project: Path) -> None:
    endless = FIXED.replace("return a * b", "while True: pass")
    attempt = episode(project, writes({"calc.py": endless}))
    tests = grading.HiddenTests.model_validate(TESTS)
    verdict = await grading.judge(
        attempt, tests, grading.TestsPassOptions(timeout=2), Workspaces.of(configured(project))
    )
    assert not verdict.passed
    assert verdict.evidence.startswith("The tests took too long.")


async def test_nothing_is_written_or_read_through_a_link(project: Path) -> None:
    outside = project / "outside"
    outside.mkdir()
    (outside / "test_calc.py").write_text(ALWAYS_PASSES)
    attempt = episode(project, writes({"calc.py": BUGGY}))
    assert isinstance(attempt.result, dict)
    link = f"new file mode 120000\n--- /dev/null\n+++ b/deep\n@@ -0,0 +1 @@\n+{outside}\n\\ No newline at end of file\n"
    attempt.result["diff"] = f"diff --git a/deep b/deep\n{link}"
    ids = [id.replace("tests/", "deep/") for id in TESTS["fail_to_pass"]]
    tests = {"files": {"deep/test_calc.py": HIDDEN}, "fail_to_pass": ids}
    attempt = replace(attempt, task=replace(attempt.task, metadata={"tests": tests}))
    assert (await rewarded(project, attempt)).value == 0.0
    assert (outside / "test_calc.py").read_text() == ALWAYS_PASSES


async def test_another_command_reports_by_junit_xml(project: Path) -> None:
    report = '<testsuite><testcase classname="calc" name="add"/><testcase classname="calc" name="mul"/>{}</testsuite>'
    for more, status, expected in (("", 0, 1.0), ("", 1, 0.0), ('<testcase classname="calc" name="add"/>', 0, 0.5)):
        command = ["sh", "-c", f"echo '{report.format(more)}' > {{junit}}; exit {status}"]
        tests = {"fail_to_pass": ["calc.add", "calc.mul"], "command": command}
        assert await reward(project, writes({"calc.py": FIXED}), tests, score="share") == expected


async def test_another_python_runs_the_tests(project: Path) -> None:
    (project / "project" / "own-python").write_text("#!/bin/sh\necho my own\n")
    (project / "project" / "own-python").chmod(0o755)
    graded = await rewarded(project, episode(project, writes({"calc.py": FIXED})), python="own-python")
    assert graded.value == 0.0
    assert str(graded.evidence).endswith("wrote no report. The end of its output:\nmy own\n")


@pytest.mark.parametrize(
    ("tests", "words"),
    [
        (None, "`tests`"),
        ({"files": {}}, r"`tests\.fail_to_pass`: Field required"),
        ({"files": {"../a.py": ""}, "fail_to_pass": ["a"]}, r"'\.\./a\.py' is not inside"),
        ({"folder": "tests", "fail_to_pass": ["a"]}, "absolute"),
        ({"fail_to_pass": ["missing.py::test_a"]}, r"no test file 'missing\.py'"),
    ],
)
async def test_tests_that_cannot_be_run_are_errors_that_name_the_key(project: Path, tests: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        await reward(project, writes({"calc.py": FIXED}), tests)


def test_a_patch_is_judged_by_its_size_and_by_what_it_touches(project: Path) -> None:
    attempt = episode(project, writes({"calc.py": HALF}))
    headers, changed = 5, 2
    assert grading.diff_size(attempt, per_line=0.01, free=headers) == -0.01 * changed
    assert grading.diff_size(attempt, per_line=1.0, most=2.0) == -2.0
    assert grading.untouched(attempt, patterns=("tests", "*.py")) == 0.0
    assert grading.untouched(attempt, patterns=("*.toml", "src/*")) == 1.0
    assert grading.untouched(replace(attempt, result=None), patterns=("*.toml",)) == 0.0


async def test_the_evidence_says_what_failed_and_what_was_printed(project: Path) -> None:
    attempt = episode(project, writes({"calc.py": HALF}))
    graded = await rewarded(project, attempt)
    assert graded.name == "tests_pass"
    assert graded.evidence == (
        "2 of 3 tests passed.\ntests/test_calc.py::TestMul::test_mul: failure: AssertionError: 6 != 9"
    )
    broken = await rewarded(project, replace(attempt, result={"diff": "no patch"}))
    assert broken.evidence is not None
    assert broken.evidence.startswith("The patch cannot be applied: git apply failed")
