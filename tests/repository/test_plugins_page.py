"""The code of docs/plugins.md: complete, short, and working, as a user's own files and as an installed package."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from testing_aids import run_command

from agl_core import hooks, kinds
from agl_core.capture import AttemptContext, Identity, Recording, current_identity, running
from agl_core.config.load import load
from agl_core.kinds import Kind
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Ending, Episode, Mode, Reward, Task
from agl_core.wire import Assignment

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
FILES = {
    code.split("\n", 1)[0].removeprefix("# "): code for code in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
}
EXAMPLES = {name: code for name, code in FILES.items() if not name.startswith("test_")}
CONFIGURATIONS: list[str] = re.findall(r"^\s*```toml\n(.*?)^\s*```$", PAGE, re.M | re.S)

MADE = {
    kinds.REWARD: {"brevity", "calculated", "cited", "shortest"},
    kinds.CREDIT: {"relative"},
    kinds.ALGORITHM: {"rloo", "sapo"},
    kinds.TASK_SOURCE: {"sums"},
    kinds.TRACKER: {"reward_curve"},
    kinds.STORE: {"fast_disk"},
    kinds.HARNESS: {"shell_agent"},
    kinds.ENGINE: {"endpoint"},
    kinds.ADAPTER: {"tiny"},
    kinds.CONFIG_TABLE: {"opening"},
}
"""The components of the page's files."""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[Path]]:
    """The page's files, as a user has them; what they import is forgotten afterwards."""
    path, modules = list(sys.path), set(sys.modules)
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    yield [tmp_path / name for name in EXAMPLES]
    sys.path[:] = path
    for name in {Path(file).stem for file in EXAMPLES} - modules:
        sys.modules.pop(name, None)


def test_every_kind_and_every_hook_has_an_example(files: list[Path]) -> None:
    plugins, origins = Plugins.load(files), {str(file) for file in files}
    brought = {
        kind: {name for name, component in plugins.components(kind).items() if component.origin in origins}
        for kind in kinds.KINDS
    }
    assert brought == MADE
    other = {name for name in vars(hooks) if re.match(r"(rollout|episode|policy)_", name)}
    code = "\n".join(EXAMPLES.values())
    assert len(other) == 4
    assert {name for name in other if f"def {name}(" not in code} == set()


async def test_the_examples_of_tests_pass(files: list[Path]) -> None:
    Plugins.load(files)
    exec(FILES["test_my_agent.py"] + FILES["test_my_algorithm.py"], names := dict[str, Any]())
    await names["test_my_agent"]()
    names["test_rloo"]()


def test_a_run_with_the_examples_is_accepted(files: list[Path], tmp_path: Path) -> None:
    plugins, _, rewards, tasks, *_ = CONFIGURATIONS
    assert plugins.strip() == 'plugins = ["brevity.py"]'
    config = tmp_path / "train.toml"
    config.write_text(
        f"""config_version = 1
plugins = {json.dumps([file.name for file in files])}
agent = {{ entry = "agent:run" }}
policies = {{ default = {{ model = {{ path = "some/model" }} }} }}
algorithm = {{ name = "rloo" }}
credit = {{ name = "relative", relative = {{ gamma = 0.5 }} }}
store = {{ name = "fast_disk" }}
{tasks}
{rewards}
[rewards.shortest]
[trackers.reward_curve]
"""
    )
    loaded = load(config)
    assert loaded.rewards["brevity"].options.model_dump() == {"limit": 80}
    assert loaded.tasks["train"].options.model_dump() == {"count": 500}


async def test_the_examples_work_as_a_users_own_files(files: list[Path], tmp_path: Path) -> None:
    plugins = Plugins.load(files)

    def built(kind: Kind, name: str, *context: Any, **settings: Any) -> Any:
        component = plugins.component(kind, name, "the page")
        assert component.summary, f"{kind} {name} has no description"
        return component.build(component.options(**settings), *context)

    short, long = _episode(0, "4", terminal=1.0), _episode(1, "It is four.")
    assert built(kinds.REWARD, "brevity", None, limit=5)(short) == 1.0
    assert built(kinds.REWARD, "brevity", None, limit=5)(long) == 0.0
    calculated = replace(short, result="2 + 2", task=replace(short.task, metadata={"value": 4}))
    assert await built(kinds.REWARD, "calculated", None)(calculated) == 1.0
    assert built(kinds.REWARD, "shortest", None).reward([short, long]) == [1.0, 0.0]
    assert built(kinds.REWARD, "shortest", None).reward([short]) == [None]
    assert built(kinds.CREDIT, "relative", gamma=0.5)([short, long]) == [[0.0, 0.5], [-0.5, -0.5]]
    assert built(kinds.ALGORITHM, "sapo", temperature=2.0).options.temperature == 2.0
    with pytest.raises(ValueError, match="'clip' has no effect here: sapo has no clip range"):
        built(kinds.ALGORITHM, "sapo", clip=0.1)
    sums = built(kinds.TASK_SOURCE, "sums", Path(), 0, count=3)
    assert (sums.size, sums.task(2).input, sums.task(2).metadata) == (3, "2 + 2 = ?", {"result": "4"})
    engine = built(kinds.ENGINE, "endpoint", SimpleNamespace(policies={"a": SimpleNamespace(model="m")}))
    assert (await engine.start()).models == {"a": "m"}
    assert await engine.versions() == {"a": 0}
    await engine.stop()
    assert built(kinds.CONFIG_TABLE, "opening", hour=8).hour == 8
    task = Assignment(
        rollout="r",
        attempt=0,
        task_id="t",
        task_input="Hello.",
        task_split="train",
        mode=Mode.TRAIN,
        path="/r",
        key="k",
    )
    async with built(kinds.HARNESS, "shell_agent", None, model="m").launch(task, "http://agl", tmp_path) as launch:
        assert launch.command == ["sh", "agent.sh", "--model", "m", "Hello."]
    curve = built(kinds.TRACKER, "reward_curve", tmp_path, path=tmp_path / "rewards.csv")
    curve.log(1, {"reward/mean": 0.5})
    curve.log(2, {"loss": 0.5})
    assert (tmp_path / "rewards.csv").read_text() == "1,0.5\n"
    async with built(kinds.STORE, "fast_disk", Path("my-run"), folder=tmp_path) as store:
        await store.put(Reward("r", 0, "right", 1.0, "right"))
    assert (tmp_path / "my-run.sqlite").exists()
    await _try_adapter(built(kinds.ADAPTER, "tiny"))
    _try_run_hooks(plugins, short)


def _episode(member: int, result: str, terminal: float = 0.0) -> Episode:
    """Of two calls; the tool calls of the second cannot be parsed."""
    calls = [make.transition(0, rollout=f"r{member}"), make.transition(1, rollout=f"r{member}", parse_error="no JSON")]
    task = Task("t", "2 + 2 = ?")
    return make.episode(*calls, rollout=f"r{member}", member=member, task=task, result=result, terminal=terminal)


async def _try_adapter(adapter: Any) -> None:
    async def run(agent: Any) -> Identity | None:
        return current_identity()

    framework: Any = ModuleType("tiny_agents")
    framework.Agent = type("Agent", (), {"name": "solver", "run": run})
    framework.on_tool_end = []
    sys.modules["tiny_agents"] = framework
    try:
        adapter.attach()
        adapter.attach()
        active = AttemptContext("r", 0, "http://127.0.0.1:9", "key", Recording())
        with running(active):
            assert await framework.Agent().run() == Identity("solver")
            for report in framework.on_tool_end:
                report(framework.Agent(), "c1", "search", {}, None, ValueError("no city"))
        assert [(result.tool, result.tool_call_id, result.error) for result in active.recording.tool_results] == [
            ("search", "c1", "ValueError: no city")
        ]
    finally:
        del sys.modules["tiny_agents"]


def _try_run_hooks(plugins: Plugins, built: Episode) -> None:
    run = plugins.hook
    run.call(hooks.rollout_started, make.rollout(), 0)
    run.call(hooks.rollout_finished, make.rollout(), make.attempt())
    run.call(hooks.policy_updated, "default", 1, {})
    assert run.episode_built(built) is built
    assert run.episode_built(replace(built, result="I cannot answer.")).dropped is DropReason.PLUGIN
    assert run.failures == {}
    assert sys.modules["watching"].seen == {"started": 1, Ending.FINISHED: 1, "updated": 1}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder to put on PYTHONPATH, with the page's files installed in it as a package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    package = source / "my_agl_plugins"
    package.mkdir()
    (package / "__init__.py").touch()
    for name, code in EXAMPLES.items():
        (package / name).write_text(code)
    _, project, *_, frameworks, commands = CONFIGURATIONS
    entries = [f'{Path(name).stem} = "my_agl_plugins.{Path(name).stem}"' for name in EXAMPLES]
    assert entries[0] in project
    backend = '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
    project = re.sub(r"^ +", "", project, flags=re.M).replace(entries[0], "\n".join(entries))
    (source / "pyproject.toml").write_text(f"{project}\n{frameworks}\n{commands}\n{backend}")
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    run_command(*install, "--target", target, source)
    return str(target)


@pytest.mark.storm
def test_the_package_is_listed_with_its_settings_and_brings_its_command(installed: str) -> None:
    def python(*arguments: str) -> str:
        return run_command(sys.executable, *arguments, PYTHONPATH=installed)

    listed = json.loads(python("-m", "agl_core", "plugins", "--json"))
    mine = {(plugin["kind"], plugin["name"]): plugin for plugin in listed if plugin["origin"] == "my-agl-plugins 0.1"}
    assert set(mine) == {(kind, name) for kind, names in MADE.items() for name in names}
    brevity = mine["reward", "brevity"]
    assert brevity["doc"] == "1 if the answer is short."
    assert brevity["settings"] == [{"name": "limit", "required": False, "default": 200, "description": ""}]
    assert mine["reward", "shortest"]["needs"] == ["groups"]
    assert (mine["credit", "relative"]["yields"], mine["algorithm", "rloo"]["takes"]) == (["return"], ["return"])
    assert python("-m", "agl_core", "greet", "world") == "hello world\n"
    frameworks = "from importlib.metadata import entry_points as e; print(*e(group='agl.frameworks').names)"
    assert "tiny_agents" in python("-c", frameworks).split()
