"""The capability check: every pair that does not go together is refused, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agl_core.config import LoadedConfig, check
from agl_core.errors import CapabilityError

Load = Callable[..., LoadedConfig]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("train.group_size=2",),
        ("train.group_size=4", "train.min_group_size=4"),
        ("algorithm.name=easy", "train.group_size=1", "engine.name=poor"),
        ("algorithm.name=judging", "engine.name=rich", "credit.name=per_step", "train.group_size=1"),
        ("algorithm.comparing.beta=0", "engine.name=poor"),
        ("credit.name=mixing",),
        ("rewards.tools.rule=tool_counting",),
    ],
)
def test_what_goes_together_passes(loaded: Load, minimal: dict[str, Any], overrides: tuple[str, ...]) -> None:
    check(loaded(minimal, *overrides))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("train.group_size=1",), ("compares several rollouts", "group_size is 1", "Set it to 2 or more")),
        (("train.min_group_size=1",), ("min_group_size is 1", "nothing to compare")),
        (("train.group_size=2", "train.min_group_size=3"), ("min_group_size is 3, more than group_size 2",)),
        (("credit.name=per_step",), ("takes returns", "the time axis has no owner", "stepwise, whole)")),
        (
            ("algorithm.name=judging", "engine.name=rich"),
            ("adds up what came after itself", "counted twice", "(confused, immediate, per_step)"),
        ),
        (("engine.name=poor",), ("needs a reference model", "engine 'poor'", "(pretending, rich")),
        (
            ("algorithm.name=judging", "credit.name=per_step"),
            ("needs a critic", "engine 'pretending'", "that provides critic (rich"),
        ),
        (
            ("algorithm.name=judging", "credit.name=per_step", "engine.name=poor"),
            ("needs a critic", "needs token ids"),
        ),
        (("credit.name=confused",), ("either returns or rewards", "provides both")),
        (("credit.name=silent",), ("either returns or rewards", "provides neither")),
        (
            ("credit.name=mixing", "rewards.tools.rule=tool_counting"),
            ("credit 'mixing'", "reward 'tool_counting'", "an outcome would count twice", "Keep one"),
        ),
        (("rewards.a.rule=tool_counting", "rewards.b.rule=tool_counting"), ("an outcome would count twice",)),
    ],
)
def test_what_does_not_is_refused_with_a_remedy(
    loaded: Load, minimal: dict[str, Any], overrides: tuple[str, ...], said: tuple[str, ...]
) -> None:
    with pytest.raises(CapabilityError) as error:
        check(loaded(minimal, *overrides))

    for part in said:
        assert part in str(error.value)


def test_all_problems_are_told_together(loaded: Load, minimal: dict[str, Any]) -> None:
    with pytest.raises(CapabilityError) as error:
        check(loaded(minimal, "train.group_size=1", "engine.name=poor", "credit.name=per_step"))

    assert len(str(error.value).splitlines()) == 4
