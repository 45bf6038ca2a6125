"""The code of docs/plugins.md: complete, short, and working, as a user's own files and as an installed package."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_core import hooks, kinds
from agl_core.config import check, load
from agl_core.plugins import Plugins

PROGRAM = Path(__file__).parent / "plugins_page.py"
PAGE = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
EXAMPLES: dict[str, str] = PAGE.examples()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Path]]:
    """The page's files, as a user has them; what they import is forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    yield [tmp_path / name for name in EXAMPLES]
    sys.path[:] = path
    for name in {Path(each).stem for each in EXAMPLES} - modules:
        sys.modules.pop(name, None)


def test_every_kind_and_every_hook_has_an_example(files: list[Path]) -> None:
    plugins, origins = Plugins.load(files), {str(file) for file in files}
    brought = {
        kind: {name for name, each in plugins.components(kind).items() if each.origin in origins}
        for kind in kinds.KINDS
    }
    assert brought == PAGE.MADE
    other = {name for name in vars(hooks) if re.match(r"(rollout|episode|policy)_", name)}
    code = "\n".join(EXAMPLES.values())
    assert len(other) == 4
    assert {name for name in other if f"def {name}(" not in code} == set()


def test_the_examples_work_as_a_users_own_files(files: list[Path]) -> None:
    PAGE.exercise(Plugins.load(files))


async def test_the_example_of_a_test_passes() -> None:
    code = PAGE.example_of_a_test()
    names: dict[str, Any] = {}
    exec(compile(code, "test_my_agent.py", "exec"), names)
    await names["test_my_agent"]()


def test_a_run_with_the_examples_is_accepted(files: list[Path], tmp_path: Path) -> None:
    plugins, _, rewards, tasks, *_ = PAGE.configurations()
    assert plugins.strip() == 'plugins = ["brevity.py"]'
    config = tmp_path / "train.toml"
    config.write_text(
        f"""config_version = 1
plugins = {json.dumps([file.name for file in files])}
agent = {{ entry = "agent:run" }}
policies = {{ default = {{ model = {{ path = "some/model" }} }} }}
algorithm = {{ name = "rloo" }}
credit = {{ name = "relative", relative = {{ gamma = 0.5 }} }}
buffer = {{ name = "unequal" }}
store = {{ name = "fast_disk" }}
{tasks}
{rewards}
[rewards.shortest]
[trackers.reward_curve]
"""
    )
    loaded = load(config)
    check(loaded)
    assert loaded.rewards["brevity"].options.model_dump() == {"limit": 80}
    assert loaded.tasks["train"].options.model_dump() == {"count": 500}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder to put on PYTHONPATH, with the page's files installed in it as a package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    package = source / "my_agl_plugins"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, code in EXAMPLES.items():
        (package / name).write_text(code)
    _, project, *_, frameworks, commands = PAGE.configurations()
    entries = [f'{Path(name).stem} = "my_agl_plugins.{Path(name).stem}"' for name in EXAMPLES]
    assert entries[0] in project
    backend = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    project = re.sub(r"^ +", "", project, flags=re.M).replace(entries[0], "\n".join(entries))
    (source / "pyproject.toml").write_text(f"{project}\n{frameworks}\n{commands}\n{backend}")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return str(target)


def run(*command: str, path: str) -> str:
    """A command that must succeed, with a folder on PYTHONPATH; what it printed."""
    environment = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


AGL = "from agl_core.cli import main; main()"


@pytest.mark.storm
def test_the_examples_work_as_an_installed_package(installed: str) -> None:
    run(str(PROGRAM), path=installed)


@pytest.mark.storm
def test_the_package_is_listed_with_its_settings_and_brings_its_command(installed: str) -> None:
    listed = json.loads(run("-c", AGL, "plugins", "--json", path=installed))
    mine = {(each["kind"], each["name"]): each for each in listed if each["origin"] == "my-agl-plugins 0.1"}
    assert set(mine) == {(kind, name) for kind, names in PAGE.MADE.items() for name in names}
    brevity = mine["reward", "brevity"]
    assert brevity["doc"] == "1 if the answer is short."
    assert brevity["settings"] == [{"name": "limit", "required": False, "default": 200, "description": ""}]
    assert mine["reward", "shortest"]["needs"] == ["groups"]
    assert (mine["credit", "relative"]["yields"], mine["algorithm", "rloo"]["takes"]) == (["return"], "return")
    assert run("-c", AGL, "greet", "world", path=installed) == "hello world\n"
    frameworks = "from importlib.metadata import entry_points as e; print(*e(group='agl.frameworks').names)"
    assert "tiny_agents" in run("-c", frameworks, path=installed).split()
