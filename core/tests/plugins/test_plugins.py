"""Plugins are found, or refused with a reason; hooks call them in their order, and none of them can break a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import agl_core
from agl_core import hookimpl, hooks, kinds
from agl_core.errors import EngineError, PluginError
from agl_core.kinds import Register
from agl_core.plugins import Plugins
from agl_core.protocols import Engine
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Episode

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


class OneComponent:
    """A plugin object that registers one component."""

    def __init__(self, *component: Any, **declared: Any) -> None:
        self.component, self.declared = component, declared

    @agl_core.hookimpl
    def register_components(self, register: Register) -> None:
        register(*self.component, **self.declared)


def build_engine(options: Any, context: Any) -> Any:
    """A stand-in."""


def plugins_with(*given: object) -> Plugins:
    plugins = Plugins()
    for number, plugin in enumerate(given):
        plugins.register(plugin, f"plugin{number}.py")
    return plugins


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if not name.startswith("agl_"):
            del sys.modules[name]


def test_a_file_brings_its_rules_and_hooks_once(tmp_path: Path) -> None:
    (tmp_path / "lies_beside.py").write_text("LIMIT = 3")
    (file := tmp_path / "my_rewards.py").write_text(f"{PLUGIN}\nimport lies_beside\n")
    (another := tmp_path / "another.py").write_text("from my_rewards import shortness\n")
    plugins = Plugins.load([file, file, another])

    rule = plugins.component(kinds.REWARD, "shortness", "[rewards]")
    seen: list[tuple[str, int]] = []
    plugins.hook.call(hooks.policy_updated, policy="default", version=3, metrics={"seen": seen})

    assert (rule.origin, rule.summary) == (str(file), "1 if the answer is short.")
    episode = SimpleNamespace(result="abc")
    assert [rule.build(rule.options(limit=limit))(episode) for limit in (2, 3)] == [0.0, 1.0]
    assert seen == [("default", 3)]


def test_two_of_one_name_are_refused_where_one_of_them_is_wanted() -> None:
    plugins = plugins_with(*(OneComponent(kinds.ENGINE, "mine", build_engine) for _ in range(2)))

    assert plugins.components(kinds.STORE) == {}
    with pytest.raises(PluginError, match=r"Two plugins bring the engine 'mine': plugin0\.py and plugin1\.py"):
        plugins.components(kinds.ENGINE)


@pytest.mark.parametrize(
    ("kind", "declared", "message"),
    [
        (kinds.CREDIT, {}, r"credit 'mine' must say what its values are: yields="),
        (kinds.ENGINE, {"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_a_kind_cannot_declare_or_has_to_is_said(kind: kinds.Kind, declared: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=rf"plugin0\.py cannot be used: TypeError: .*{message}"):
        plugins_with(OneComponent(kind, "mine", build_engine, **declared))


def test_a_misspelt_hook_is_refused_and_leaves_nothing_behind() -> None:
    class Misspelt:
        @agl_core.hookimpl
        def register_engine(self, register: Register) -> None: ...

    plugins = Plugins()
    with pytest.raises(PluginError, match=r"plugin here cannot be used: .*register_engine"):
        plugins.register(Misspelt(), "here")
    plugins.register(OneComponent(kinds.ENGINE, "mine", build_engine), "here")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("broken.py", "1 / 0", "broken.py cannot be imported: ZeroDivisionError"),
        ("broken.py", "def (", "broken.py cannot be imported: SyntaxError"),
        ("gone.py", None, r"no Python file .*gone\.py\. Paths are relative to the configuration file"),
        ("notes.txt", "", r"no Python file .*notes\.txt"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named(tmp_path: Path, name: str, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(PluginError, match=problem):
        Plugins.load([tmp_path / name])
    assert "broken" not in sys.modules


async def test_an_engine_says_by_name_what_it_does_not_support() -> None:
    plain: Any = type("Plain", (Engine,), dict.fromkeys(Engine.__abstractmethods__))()
    plain.report_stages(print)
    for method, arguments in {
        "tokenize": ("default", []), "logprobs": ("default", None),
        "load_policy": ("default", None), "unload_policy": ("default",),
    }.items():  # fmt: skip
        with pytest.raises(EngineError, match=f"The engine Plain does not support '{method}'"):
            await getattr(plain, method)(*arguments)


# The hooks that follow a run.


EPISODE = make.episode(make.transition())
CALLS: dict[str, tuple[Any, ...]] = {
    "server_routes": (None, None),
    "rollout_started": (make.rollout(), 0),
    "rollout_finished": (make.rollout(), make.attempt()),
    "policy_updated": ("default", 3, {"loss": 0.5}),
}


def plugin(hook: str, function: Callable[..., Any], **options: Any) -> object:
    """A plugin of one hook, called with what the function's parameters ask for."""
    function.__name__ = hook
    return type("Plugin", (), {hook: staticmethod(hookimpl(**options)(function))})()


def on_built(change: Callable[[Episode], Any], **options: Any) -> object:
    return plugin("episode_built", lambda episode: change(episode), **options)


def append(result: str) -> Callable[[Episode], Episode]:
    return lambda episode: replace(episode, result=f"{episode.result or ''}{result}")


@pytest.mark.parametrize("hook", CALLS)
def test_a_plugin_that_fails_is_named_and_counted_and_the_others_are_called(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []
    run = plugins_with(plugin(hook, lambda: 1 / 0), plugin(hook, lambda: calls.append(hook))).hook
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            run.call(getattr(hooks, hook), *CALLS[hook])
    assert calls == [hook] * 3
    assert run.failures == {("plugin0.py", hook): 3}
    assert caplog.text.count("The plugin plugin0.py failed") == 1
    assert "ZeroDivisionError" in caplog.text


def test_each_hook_reaches_a_plugin_with_what_it_asks_for_and_nothing_can_be_changed() -> None:
    seen: list[Any] = []
    run = plugins_with(
        plugin("rollout_started", lambda rollout, attempt: seen.append((rollout, attempt))),
        plugin("rollout_finished", lambda attempt: seen.append(attempt)),
        plugin("policy_updated", lambda policy, version, metrics: seen.append((policy, version, dict(metrics)))),
        plugin("policy_updated", lambda metrics: metrics.clear()),
    ).hook
    for hook, arguments in CALLS.items():
        run.call(getattr(hooks, hook), *arguments)
    assert seen == [CALLS["rollout_started"], CALLS["rollout_finished"][1], CALLS["policy_updated"]]
    assert run.failures == {("plugin3.py", "policy_updated"): 1}, "metrics are read-only"


def test_episode_built_is_a_chain_in_the_order_of_registration() -> None:
    hooks = plugins_with(
        on_built(append("last"), trylast=True),
        *(on_built(change) for change in (append("a"), lambda episode: None, append("b"))),
    ).hook
    assert hooks.episode_built(EPISODE).result == "ablast"


@pytest.mark.parametrize(
    "change",
    [
        lambda episode: replace(episode, dropped=DropReason.STALE),
        lambda episode: replace(episode, dropped=DropReason.PLUGIN),
        lambda episode: replace(episode, transitions=()),
    ],
    ids=["another reason", "its reason", "no transition left"],
)
def test_what_a_plugin_drops_has_its_reason(change: Callable[[Episode], Episode]) -> None:
    episode = plugins_with(on_built(change), on_built(append("seen by the next"))).hook.episode_built(EPISODE)
    assert (episode.dropped, episode.result) == (DropReason.PLUGIN, "seen by the next")
    lost = replace(EPISODE, dropped=DropReason.ENDING, transitions=())
    assert plugins_with(on_built(append("x"))).hook.episode_built(lost).dropped is DropReason.ENDING


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda episode: 1 / 0, "ZeroDivisionError"),
        (lambda episode: "an episode", "it must return an Episode or None"),
        (lambda episode: replace(episode, rollout="another"), "of another for one of r"),
    ],
)
def test_an_episode_is_left_as_it_was_by_a_plugin_that_fails(
    change: Callable[[Episode], Any], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = plugins_with(on_built(append("a")), on_built(change), on_built(append("b"))).hook
    assert hooks.episode_built(EPISODE).result == "ab"
    assert hooks.failures == {("plugin1.py", "episode_built"): 1}
    assert problem in caplog.text
