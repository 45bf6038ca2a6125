"""A function and a decorator make a plugin; keyword-only parameters are its settings."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError

import agl_core
from agl_core import Need
from agl_core.plugins import Component, Kind, Plugins
from agl_core.types import Episode


def component_of(kind: Kind, function: Any, name: str) -> Component:
    module = ModuleType("users_file")
    module.rule = function  # type: ignore[attr-defined]
    plugins = Plugins()
    plugins.register(module, "users_file.py")
    return plugins.component(kind, name, "here")


def test_settings_are_checked_against_their_annotations() -> None:
    @agl_core.reward_rule
    def bounded(
        episode: Episode,
        *,
        limit: Annotated[int, Field(ge=1, description="The longest answer.")] = 200,
        unit: Literal["words", "characters"] = "words",
    ) -> float:
        """Short answers."""
        return limit if unit == "words" else -limit

    rule = component_of(Kind.REWARD, bounded, "bounded")

    assert rule.options.model_fields["limit"].description == "The longest answer."
    assert rule.build(rule.options())(None) == 200
    assert rule.build(rule.options(limit=3, unit="characters"))(None) == -3
    for wrong in ({"limit": 0}, {"unit": "pages"}, {"limits": 3}):
        with pytest.raises(ValidationError):
            rule.options(**wrong)


def test_a_setting_without_default_is_required() -> None:
    @agl_core.reward_rule(name="exact")
    def match(episode: Episode, *, expected: str) -> float:
        return float(episode.result == expected)

    rule = component_of(Kind.REWARD, match, "exact")

    with pytest.raises(ValidationError):
        rule.options()
    assert rule.options(expected="4").model_dump() == {"expected": "4"}


def test_the_decorated_function_stays_a_function() -> None:
    @agl_core.reward_rule
    def constant(episode: Episode) -> float:
        """Always 1."""
        return 1.0

    assert constant(None) == 1.0  # type: ignore[arg-type]
    assert constant.__doc__ == "Always 1."


@pytest.mark.parametrize(
    ("kind", "provided"),
    [
        (Need.RETURNS, {Need.RETURNS}),
        (Need.REWARDS, {Need.REWARDS}),
        ([Need.REWARDS, Need.RETURNS], {Need.REWARDS, Need.RETURNS}),
    ],
)
def test_a_credit_rule_says_what_it_yields(kind: Any, provided: set[Need]) -> None:
    @agl_core.credit_rule(kind=kind)
    def nothing(episodes: Sequence[Episode], *, scale: float = 1.0) -> list[list[float]]:
        return [[scale] for _ in episodes]

    rule = component_of(Kind.CREDIT, nothing, "nothing")

    assert rule.provides == provided
    assert rule.build(rule.options(scale=2.0))([None]) == [[2.0]]
