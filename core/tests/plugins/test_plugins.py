"""Plugins are made by a decorator, found, or refused with a reason; hooks call them, and none can break a run."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

import agl_core
from agl_core import Capability, CreditKind, Task, builtin, hookimpl, hooks, kinds
from agl_core.config.resolve import ChosenComponent
from agl_core.errors import EngineError, PluginError
from agl_core.kinds import Component, Kind, Register
from agl_core.learning.rewards import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.protocols import Engine
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Ending, Episode, Reward

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


def test_a_file_brings_its_rules_and_hooks_once_also_if_it_is_installed_too(tmp_path: Path) -> None:
    (tmp_path / "lies_beside.py").write_text("LIMIT = 3")
    (file := tmp_path / "my_rewards.py").write_text(f"{PLUGIN}\nimport lies_beside\n")
    (another := tmp_path / "another.py").write_text("from my_rewards import shortness\n")
    plugins = Plugins.load([file, file, another, Path(builtin.__file__)])

    rule = plugins.component(kinds.REWARD, "shortness", "[rewards]")
    seen: list[tuple[str, int]] = []
    plugins.hook.call(hooks.policy_updated, policy="default", version=3, metrics={"seen": seen})

    assert (rule.origin, rule.summary) == (str(file), "1 if the answer is short.")
    episode = SimpleNamespace(result="abc")
    assert [rule.build(rule.options(limit=limit), None)(episode) for limit in (2, 3)] == [0.0, 1.0]
    assert seen == [("default", 3)]
    assert plugins.component(kinds.CREDIT, "identical", "here").origin.startswith("agl-core ")


def test_two_of_one_name_are_refused_where_one_of_them_is_wanted() -> None:
    plugins = plugins_with(*(OneComponent(kinds.ENGINE, "mine", build_engine) for _ in range(2)))

    assert plugins.components(kinds.STORE) == {}
    with pytest.raises(PluginError, match=r"Two plugins bring the engine 'mine': plugin0\.py and plugin1\.py"):
        plugins.components(kinds.ENGINE)


class Misspelt:
    @agl_core.hookimpl
    def register_engine(self, register: Register) -> None: ...


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (OneComponent(kinds.CREDIT, "mine", build_engine), "credit 'mine' must say what its values are: yields="),
        (OneComponent(kinds.ENGINE, "mine", build_engine, colour="red"), "unexpected keyword argument 'colour'"),
        (Misspelt(), "register_engine"),
    ],
    ids=["undeclared", "unknown", "misspelt hook"],
)
def test_what_cannot_be_used_is_refused_and_leaves_nothing_behind(plugin: object, message: str) -> None:
    plugins = Plugins()
    with pytest.raises(PluginError, match=f"plugin here cannot be used: .*{message}"):
        plugins.register(plugin, "here")
    plugins.register(OneComponent(kinds.ENGINE, "mine", build_engine), "here")


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("broken.py", "1 / 0", "broken.py cannot be imported: ZeroDivisionError"),
        ("broken.py", "def (", "broken.py cannot be imported: SyntaxError"),
        ("gone.py", None, r"no Python file .*gone\.py\. Paths in a configuration are relative to it"),
        ("notes.txt", "", r"no Python file .*notes\.txt"),
        ("copy.py", "", r"copy\.py has the name of one of Python's own modules"),
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


# A function and a decorator make a plugin; keyword-only parameters are its settings.


def component_of(kind: Kind, function: Any, name: str) -> Component:
    module = ModuleType("users_file")
    module.rule = function  # type: ignore[attr-defined]
    return plugins_with(module).component(kind, name, "here")


def test_settings_are_checked_against_their_annotations() -> None:
    @agl_core.reward_rule(name="bounded_rule")
    def bounded(
        episode: Episode,
        *,
        limit: Annotated[int, Field(ge=1, description="The longest answer.")] = 200,
        unit: Literal["words", "characters"],
    ) -> float:
        """Short answers."""
        return limit if unit == "words" else -limit

    rule = component_of(kinds.REWARD, bounded, "bounded_rule")

    assert (bounded(make.episode(), unit="words"), bounded.__doc__, rule.summary) == (200, *["Short answers."] * 2)
    assert rule.options.model_fields["limit"].description == "The longest answer."
    assert rule.build(rule.options(unit="words"), None)(None) == 200
    assert rule.build(rule.options(limit=3, unit="characters"), None)(None) == -3
    for wrong in ({}, {"limit": 0, "unit": "words"}, {"unit": "pages"}, {"limits": 3, "unit": "words"}):
        with pytest.raises(ValidationError):
            rule.options(**wrong)


ISOLATED = """
import agl_core
from agl_core import Reward

@agl_core.reward_rule(isolated=True)
def calculated(episode, *, expected: int = 4):
    return float(eval(episode.result) == expected)

@agl_core.reward_rule(isolated=True)
def parts(episode):
    eval(episode.result)
    first = episode.transitions[0].key
    return {"half": 0.5, first: 0.25}

@agl_core.reward_rule(isolated=True)
def named(episode):
    first = episode.transitions[0].key
    return [Reward(first.rollout, first.attempt, "style", eval(episode.result), "", first.call)]

@agl_core.reward_rule(isolated=True)
def silent(episode):
    return None
"""


class TestIsolatedRules:
    """Rules in a user's file that evaluate what the model wrote."""

    @pytest.fixture
    def rules(self, tmp_path: Path) -> Callable[..., Any]:
        (tmp_path / "calculating_rules.py").write_text(ISOLATED)
        plugins = Plugins.load([tmp_path / "calculating_rules.py"])

        def rule(name: str, **settings: Any) -> Any:
            component = plugins.component(kinds.REWARD, name, "here")
            return component.build(component.options(**settings), None)

        return rule

    async def test_give_what_they_give(self, rules: Callable[..., Any]) -> None:
        episode = make.episode(make.transition(0), result="2 + 2")
        key = episode.transitions[0].key
        assert await rules("calculated")(episode) == 1.0
        assert await rules("calculated", expected=5)(episode) == 0.0
        assert await rules("parts")(episode) == {"half": 0.5, key: 0.25}
        assert await rules("named")(episode) == [Reward(key.rollout, key.attempt, "style", 4, "", key.call)]
        assert await rules("silent")(episode) is None

    async def test_fail_by_what_the_model_wrote_and_change_nothing(
        self, rules: Callable[..., Any], tmp_path: Path
    ) -> None:
        touched = f"__import__('pathlib').Path('{tmp_path / 'x'}').touch()"
        wrong, no_value = (0.0, None), (None, DropReason.REWARD_FAILED)
        for text, why, treatment in (
            ("9**9**9**9", "longer than 0.5 seconds", wrong),
            ("exit()", "its process ended", wrong),
            (touched, "denied", no_value),
            ("{", "SyntaxError", no_value),
        ):
            episode = make.episode(make.transition(0), result=text)
            chosen = [ScoringRule("calculated", rules("calculated"), time_limit=0.5)]
            scored, [error] = await score(episode, chosen, dict.fromkeys(Ending, "score"))
            assert (scored.terminal, scored.dropped) == treatment
            assert why in str(error)
        assert not (tmp_path / "x").exists()


def test_rules_declare_what_they_yield_and_need() -> None:
    def rule(episodes: Sequence[Episode]) -> list[Any]:
        return []

    both = [CreditKind.REWARD, CreditKind.RETURN]
    assert component_of(kinds.REWARD, agl_core.group_reward_rule(rule), "rule").needs == {Capability.GROUPS}
    assert component_of(kinds.CREDIT, agl_core.credit_rule(kind=both)(rule), "rule").yields == both


def test_an_algorithm_is_a_class_with_its_settings_as_keywords_or_as_a_model() -> None:
    class Model(BaseModel):
        beta: float = 0.5

    @agl_core.algorithm(takes=CreditKind.REWARD)
    class Keywords:
        needs_reference = needs_critic = needs_entropy = False

        def __init__(self, *, beta: float = 0.1) -> None:
            self.beta = beta

    @agl_core.algorithm(
        name="model", options=Model, needs=lambda o: {Capability.REFERENCE} if o.beta else (), takes=lambda o: ()
    )
    class WithModel(Keywords):
        def __init__(self, options: Model) -> None:
            super().__init__(beta=options.beta)

    plain = component_of(kinds.ALGORITHM, Keywords, "Keywords")
    model = component_of(kinds.ALGORITHM, WithModel, "model")
    assert plain.build(plain.options(beta=0.3)).beta == 0.3
    assert (set(plain.needs), plain.takes) == ({Capability.TOKEN_IDS}, CreditKind.REWARD)
    assert model.build(model.options()).beta == 0.5
    default, without = ChosenComponent(model, Model()), ChosenComponent(model, Model(beta=0))
    assert (default.needs, default.takes, without.needs) == ({Capability.REFERENCE}, set(), set())


@pytest.mark.parametrize(
    ("listed", "problem"),
    [([], "must list tasks"), (["1 + 1"], "made a str"), ([Task("1", 1), Task("1", 2)], "each with an id of its own")],
)
def test_a_task_source_that_lists_what_cannot_be_used_is_told_so(listed: list[Any], problem: str) -> None:
    @agl_core.task_source(name="wrong")
    def source() -> list[Task]:
        return listed

    component = component_of(kinds.TASK_SOURCE, source, "wrong")
    with pytest.raises(PluginError, match=problem):
        component.build(component.options(), Path(), 0)


def test_an_endless_task_source_draws_held_out_tasks_that_every_run_shares() -> None:
    @agl_core.endless_task_source(held_out=20)
    def numbers(index: int, seed: int, *, split: str, most: int = 10**6) -> Task:
        return Task(f"{split}-{index}", str(random.Random(f"{split} {seed} {index}").randrange(most)), split)

    component = component_of(kinds.TASK_SOURCE, numbers, "numbers")

    def inputs(split: str, seed: int) -> list[str]:
        source = component.build(component.options(split=split), Path(), seed)
        return [source.task(index).input for index in range(20)]

    sizes = {split: component.build(component.options(split=split), Path(), 1).size for split in ("train", "eval")}
    assert sizes == {"train": None, "eval": 20}
    assert inputs("train", 1) == inputs("train", 1) != inputs("train", 2)
    assert inputs("eval", 1) == inputs("eval", 2)
    with pytest.raises(ValidationError, match="split"):
        component.options()


def test_functions_attach_to_a_framework_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    framework = ModuleType("someones_framework")
    seen: list[str] = []
    monkeypatch.setitem(sys.modules, framework.__name__, framework)

    @agl_core.adapter("someones_framework", name="someones")
    def names() -> None:
        """Agents of someone's framework."""
        seen.append("names")

    @agl_core.adapter("someones_framework")
    def tools() -> None:
        seen.append("tools")

    component = component_of(kinds.ADAPTER, names, "someones")
    agl_core.attach([names, tools, component.build(component.options())]).detach()
    assert component.summary == "Agents of someone's framework."
    assert seen == ["names", "tools"]
