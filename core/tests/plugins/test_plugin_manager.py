"""Finding plugins: files, objects, duplicates, versions, and what is said about broken ones."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agl_core
from agl_core.errors import PluginError
from agl_core.plugins import Kind, Plugins
from agl_core.registering import Capability, NoOptions, RegisterEngine
from agl_core.types import Episode

PLUGIN = '''
import agl_core

@agl_core.reward_rule
def shortness(episode, *, limit: int = 20):
    """1 if the answer is short.

    More about it.
    """
    return float(len(str(episode.result)) <= limit)

@agl_core.hookimpl
def policy_updated(policy, version, metrics):
    metrics["seen"].append((policy, version))
'''


class Bringing:
    """A plugin object that brings one engine."""

    def __init__(self, name: str = "mine") -> None:
        self.name = name

    @agl_core.hookimpl
    def register_engines(self, register: RegisterEngine) -> None:
        def build(options: NoOptions, context: object) -> Any:
            """What it is.

            And more.
            """

        register(self.name, build, needs={Capability.GROUPS}, provides={Capability.CRITIC})


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if not name.startswith("agl_"):
            del sys.modules[name]


@pytest.fixture
def plugin_file(tmp_path: Path) -> Path:
    file = tmp_path / "my_rewards.py"
    file.write_text(PLUGIN)
    return file


def test_an_object_is_registered_and_unregistered() -> None:
    plugins, mine = Plugins(), Bringing()

    plugins.register(mine, "here")
    found = plugins.component(Kind.ENGINE, "mine", "[engine] name")

    assert (found.kind, found.origin, found.doc) == (Kind.ENGINE, "here", "What it is.")
    assert found.needs(found.options()) == {Capability.GROUPS}
    assert found.provides == {Capability.CRITIC}

    plugins.unregister(mine)
    assert plugins.components(Kind.ENGINE) == {}


def test_a_file_brings_its_rules_and_hooks(plugin_file: Path) -> None:
    plugins = Plugins.load([plugin_file])

    rule = plugins.component(Kind.REWARD, "shortness", "[rewards]")
    seen: list[tuple[str, int]] = []
    plugins.hook.policy_updated(policy="default", version=3, metrics={"seen": seen})

    assert rule.origin == str(plugin_file)
    assert rule.doc == "1 if the answer is short."
    assert rule.build(rule.options(limit=3))(_episode("abc")) == 1.0
    assert rule.build(rule.options(limit=2))(_episode("abc")) == 0.0
    assert seen == [("default", 3)]


def test_a_file_named_twice_is_registered_once(plugin_file: Path) -> None:
    assert "shortness" in Plugins.load([plugin_file, plugin_file]).components(Kind.REWARD)


def test_a_file_can_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "lies_beside.py").write_text("LIMIT = 3")
    (tmp_path / "importing.py").write_text("import lies_beside\nassert lies_beside.LIMIT == 3")

    Plugins.load([tmp_path / "importing.py"])


def test_two_of_one_name_are_refused() -> None:
    plugins = Plugins()
    plugins.register(Bringing(), "one")
    plugins.register(Bringing(), "another")

    with pytest.raises(PluginError, match=r"Two plugins bring the engine 'mine': (another and one|one and another)"):
        plugins.components(Kind.ENGINE)


def test_an_unknown_component_gets_the_nearest_name() -> None:
    plugins = Plugins()
    plugins.register(Bringing("grpo"), "here")

    with pytest.raises(PluginError, match=r"\[engine\]: there is no engine 'gpro'. Did you mean 'grpo'\?"):
        plugins.component(Kind.ENGINE, "gpro", "[engine]")


def test_a_plugin_for_another_api_version_is_refused() -> None:
    class Future:
        AGL_API_VERSION = 99

    with pytest.raises(PluginError, match="plugin from tomorrow was written for plugin API 99, this agl has 1"):
        Plugins().register(Future(), "tomorrow")


INSTALLED = {
    "gone": "import nowhere_to_be_found\n",
    "future": "AGL_API_VERSION = 99\n",
    "late": """
        import agl_core

        @agl_core.hookimpl
        def register_engines(register):
            register("early", lambda options, context: None)
            import nowhere_either
            register("late", lambda options, context: None)

        @agl_core.hookimpl
        def register_commands(cli):
            raise OSError("no terminal")
    """,
    "whole": """
        import agl_core

        @agl_core.hookimpl
        def register_engines(register):
            register("whole", lambda options, context: None)
    """,
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path in which four plugins are installed, three of them broken; how pip leaves packages."""
    for name, code in INSTALLED.items():
        (tmp_path / f"{name}_plugin.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"agl_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agl-{name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[agl]\n{name} = {name}_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_broken_installed_plugin_is_named_and_stops_nothing(installed: Path) -> None:
    plugins = Plugins.load()
    engines = plugins.components(Kind.ENGINE)
    plugins.components(Kind.ENGINE)
    plugins.add_commands(object())

    assert {"early", "whole"} <= set(engines)
    assert "late" not in engines
    broken = {each.name: (each.origin, each.error) for each in plugins.broken}
    assert broken == {
        "gone": ("agl-gone 1.2", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        "future": (
            "agl-future 1.2",
            "The plugin from agl-future 1.2 was written for plugin API 99, this agl has 1. Install a version of it "
            "that fits.",
        ),
        "late": ("agl-late 1.2", "ModuleNotFoundError: No module named 'nowhere_either'"),
    }
    with pytest.raises(PluginError, match=r"there is no engine 'late'\. .*'late' of agl-late 1\.2 cannot be used"):
        plugins.component(Kind.ENGINE, "late", "[engine]")


def test_a_users_file_that_fails_when_asked_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "late_file.py").write_text(textwrap.dedent(INSTALLED["late"]))
    plugins = Plugins.load([tmp_path / "late_file.py"])
    with pytest.raises(PluginError, match=r"late_file\.py failed when asked what it brings: ModuleNotFoundError"):
        plugins.components(Kind.ENGINE)
    assert plugins.broken == ()


def test_a_misspelt_hook_is_refused_and_leaves_nothing_behind() -> None:
    class Misspelt:
        @agl_core.hookimpl
        def register_algorithm(self, register: RegisterEngine) -> None: ...

    plugins = Plugins()
    with pytest.raises(PluginError, match=r"from here implements an unknown hook: .*register_algorithm"):
        plugins.register(Misspelt(), "here")
    plugins.register(Bringing(), "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("def (", "cannot be imported: SyntaxError"),
        ("import nowhere_to_be_found", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(text)

    with pytest.raises(PluginError, match=f"{file} {said}"):
        Plugins.load([file])
    assert "broken" not in sys.modules


def test_a_file_that_is_not_there_or_no_python(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"gone\.py does not exist. Paths are relative to the configuration file"):
        Plugins.load([tmp_path / "gone.py"])
    (tmp_path / "notes.txt").touch()
    with pytest.raises(PluginError, match=r"notes\.txt is not a Python file"):
        Plugins.load([tmp_path / "notes.txt"])


def _episode(result: str) -> Episode:
    class Result:
        pass

    episode = Result()
    episode.result = result  # type: ignore[attr-defined]
    return episode  # type: ignore[return-value]
