"""The distributions as others get them: wheels in an empty environment, and a third party's package beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command that must succeed; returns what it printed."""
    result = subprocess.run(
        [str(each) for each in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheels(distributions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for distribution in distributions.values():
        run(
            sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, distribution.folder
        )  # fmt: skip
    return folder


def test_every_distribution_makes_a_wheel_with_its_types(wheels: Path, distributions: dict[str, Any]) -> None:
    from zipfile import ZipFile

    made = {file.name.split("-")[0]: set(ZipFile(file).namelist()) for file in wheels.glob("*.whl")}

    assert set(made) == {distribution.package for distribution in distributions.values()}
    for distribution in distributions.values():
        sources = {str(file.relative_to(distribution.folder)) for file in distribution.sources}
        assert sources <= made[distribution.package]
        assert f"{distribution.package}/py.typed" in made[distribution.package]


def test_core_and_an_adapter_in_an_empty_environment_bring_no_torch(wheels: Path, root: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(
        python, "-m", "pip", "install", "--quiet", "-c", root / "constraints.txt", "--find-links", wheels,
        "agl-core", "agl-langchain",
    )  # fmt: skip

    installed = {each["name"].lower() for each in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    assert {"agl-core", "agl-langchain", "langchain-core"} <= installed
    assert not installed & {"torch", "transformers", "starlette", "uvicorn", "aiohttp", "langgraph", "openai"}

    run(python, "-c", "import agl_core, agl_langchain, agl_core.client, agl_core.config, agl_core.store, agl_core.cli")
    listed = {each["name"]: each["origin"] for each in json.loads(run(python.parent / "agl", "plugins", "--json"))}
    assert listed["langchain"].startswith("agl-langchain ")
    assert {"sqlite", "jsonl", "identical"} <= set(listed)


@pytest.fixture(scope="module")
def thirdparty(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder to put on PYTHONPATH, with the third party's package installed in it."""
    folder = tmp_path_factory.mktemp("thirdparty")
    source = root / "tests" / "repository" / "fixtures" / "thirdparty"
    run(
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--target", folder, source,
    )  # fmt: skip
    return str(folder)


def agl(*arguments: str, path: str) -> str:
    """Run the `agl` command with a folder on PYTHONPATH."""
    return run(sys.executable, "-c", "from agl_core.cli import main; main()", *arguments, PYTHONPATH=path)


def test_a_third_partys_package_is_listed_with_its_settings(thirdparty: str) -> None:
    listed = {(each["kind"], each["name"]): each for each in json.loads(agl("plugins", "--json", path=thirdparty))}

    assert listed["reward", "politeness"] == {
        "kind": "reward",
        "name": "politeness",
        "origin": "agl-thirdparty-example 2.3",
        "doc": "1 if the answer has the word in it.",
        "settings": [{"name": "word", "required": False, "default": "please", "description": "What counts as polite."}],
        "needs": [],
        "provides": [],
    }
    assert listed["credit", "last_only"]["provides"] == ["returns"]


def test_its_command_runs(thirdparty: str) -> None:
    assert "greet" in agl("--help", path=thirdparty)
    assert agl("greet", "world", path=thirdparty) == "hello world\n"


def test_its_rules_run_with_checked_settings(thirdparty: str) -> None:
    code = (
        "from types import SimpleNamespace as N\n"
        "from agl_core.plugins import Kind, Plugins\n"
        "plugins = Plugins.load()\n"
        "reward = plugins.component(Kind.REWARD, 'politeness', 'here')\n"
        "credit = plugins.component(Kind.CREDIT, 'last_only', 'here')\n"
        "print(reward.build(reward.options(word='kindly'))(N(result='kindly do')))\n"
        "print(credit.build(credit.options())([N(transitions=(1, 2), terminal=0.5)]))\n"
        "try:\n    reward.options(word='')\nexcept ValueError:\n    print('refused')\n"
    )

    assert run(sys.executable, "-c", code, PYTHONPATH=thirdparty).splitlines() == ["1.0", "[[0.0, 0.5]]", "refused"]
