"""A function and a decorator make a plugin; keyword-only parameters are its settings."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, ValidationError

import agl_core
from agl_core import Capability, CreditKind, Task, kinds
from agl_core.config.resolve import ChosenComponent
from agl_core.errors import PluginError
from agl_core.kinds import Component, Kind
from agl_core.learning.rewards import ScoringRule, score
from agl_core.plugins import Plugins
from agl_core.testing import episodes as make
from agl_core.types import DropReason, Ending, Episode, Reward


def component_of(kind: Kind, function: Any, name: str) -> Component:
    module = ModuleType("users_file")
    module.rule = function  # type: ignore[attr-defined]
    plugins = Plugins()
    plugins.register(module, "users_file.py")
    return plugins.component(kind, name, "here")


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
    assert rule.build(rule.options(unit="words"))(None) == 200
    assert rule.build(rule.options(limit=3, unit="characters"))(None) == -3
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
            return component.build(component.options(**settings))

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
    @agl_core.credit_rule(kind=[CreditKind.REWARD, CreditKind.RETURN])
    def nothing(episodes: Sequence[Episode]) -> list[list[float]]:
        return []

    @agl_core.group_reward_rule
    def ranks(episodes: Sequence[Episode]) -> list[float]:
        return []

    rule = component_of(kinds.REWARD, ranks, "ranks")
    assert rule.needs == {Capability.GROUPS}
    assert component_of(kinds.CREDIT, nothing, "nothing").yields == {CreditKind.REWARD, CreditKind.RETURN}


def test_an_algorithm_is_a_class_with_its_settings_as_keywords_or_as_a_model() -> None:
    class Model(BaseModel):
        beta: float = 0.5

    @agl_core.algorithm(takes=CreditKind.REWARD)
    class Keywords:
        needs_reference = needs_critic = needs_entropy = False

        def __init__(self, *, beta: float = 0.1) -> None:
            self.beta = beta

    @agl_core.algorithm(
        name="model", options=Model, needs=lambda o: {Capability.REFERENCE} if o.beta else (), takes=lambda o: None
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
    assert (default.needs, default.takes, without.needs) == ({Capability.REFERENCE}, None, set())


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
