"""The capability check: every pair that does not go together is refused, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agl_core.config.check import cautions
from agl_core.config.load import LoadedConfig
from agl_core.errors import CapabilityError
from agl_core.types import CreditKind

Load = Callable[..., LoadedConfig]


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.group_size=2",),
        ("algorithm.name=easy", "train.group_size=1", "engine.name=poor"),
        ("algorithm.name=judging", "engine.name=rich", "credit.name=per_step", "train.group_size=1"),
        ("algorithm.comparing.beta=0", "engine.name=poor"),
        ("credit.name=mixing",),
        ("rewards.tools.rule=tool_counting",),
        ("async.max_staleness=4",),
        ("async.max_staleness=1", "async.in_flight=17"),
        ("async.max_staleness=0", "async.in_flight=16", "train.deterministic=true"),
    ],
)
def test_what_goes_together_passes(loaded: Load, overrides: tuple[str, ...]) -> None:
    loaded({}, *overrides)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (("train.group_size=1",), ("compares several rollouts", "group_size is 1", "Set it to 2 or more")),
        (
            ("async.max_staleness=1", "train.deterministic=true"),
            ("deterministic is on", "Set max_staleness to 0, or deterministic to false"),
        ),
        (("train.refill=1", "train.deterministic=true"), ("deterministic is on", "Set refill to 0")),
        (("train.refill=1", "train.group_size=1", "algorithm.name=easy"), ("group_size is 1, so all are",)),
        (("async.max_staleness=1", "async.in_flight=15"), ("in_flight is 15", "needs 16 groups")),
        (("async.max_staleness=0", "async.in_flight=17"), ("in_flight is 17", "Set max_staleness to 1 or more")),
        (("credit.name=per_step",), ("takes returns", "the time axis has no owner", "whole)")),
        (
            ("algorithm.name=judging", "engine.name=rich"),
            ("takes rewards", "counted twice", "(either, immediate, per_step)"),
        ),
        (("engine.name=poor",), ("needs a reference model", "engine 'poor'", "(pretending, rich")),
        (
            ("algorithm.name=judging", "credit.name=per_step"),
            ("needs a critic", "engine 'pretending'", "that provides critic (rich"),
        ),
        (("algorithm.name=judging", "credit.name=per_step", "engine.name=poor"), ("needs a critic", "needs token ids")),
        (("algorithm.name=judging", "engine.name=rich", "credit.name=mixing"), ("a return would be counted twice",)),
        (
            ("credit.name=mixing", "rewards.tools.rule=tool_counting"),
            ("credit 'mixing'", "reward 'tool_counting'", "a tool result would count twice", "Keep one"),
        ),
        (("rewards.a.rule=tool_counting", "rewards.b.rule=tool_counting"), ("a tool result would count twice",)),
        (
            (
                *("algorithm.name=distill", "algorithm.distill.teacher=http://there/v1", "sampling.temperature=0.7"),
                "algorithm.distill.teacher_model=big",
            ),
            ("algorithm 'distill'", "at temperature 1, but [sampling] temperature is 0.7", "Set it to 1"),
        ),
        (("eval.patience=2", "eval.every=0"), ("[eval] patience counts evaluations, and there is none",)),
        (
            ("algorithm.name=sft",),
            ("imitates recorded rollouts, but task source", "agl train CONFIG --from RUN", "trains on recorded texts"),
        ),
        (
            ("tasks.held.source=recorded", "tasks.held.run=old"),
            ("[tasks.held] is of recorded rollouts, whose replies engine 'pretending'", "that scores them (", "torch"),
        ),
    ],
)
def test_what_does_not_is_refused_with_a_remedy(
    loaded: Load, overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with pytest.raises(CapabilityError) as error:
        loaded({}, *overrides)

    for part in parts:
        assert part in str(error.value)


def two_policies(**writer: Any) -> dict[str, Any]:
    """A run with the policies 'critic', which goes by the run's choices, and 'writer'."""
    model = {"path": "weights"}
    return {"policies": {"critic": {"model": model}, "writer": {"model": model, **writer}}}


def test_each_policy_is_judged_by_its_own_pair(loaded: Load) -> None:
    own = {"algorithm": {"name": "judging"}, "credit": {"name": "per_step"}}

    loaded(two_policies(**own), "engine.name=rich")
    for broken in ("algorithm", "credit"):
        with pytest.raises(CapabilityError) as error:
            loaded(two_policies(**{broken: own[broken]}), "engine.name=rich")
        first, problem = str(error.value).splitlines()
        assert first == "The parts of this run do not go together:"
        assert problem.strip().startswith(f"policy 'writer': algorithm '{'judging' if broken == 'algorithm' else ''}")


def test_what_several_policies_share_is_told_once_with_their_names(loaded: Load) -> None:
    with pytest.raises(CapabilityError) as error:
        loaded(two_policies(), "engine.name=poor", "train.refill=1", "train.deterministic=true")

    _, sizes, reference = str(error.value).splitlines()
    assert sizes.strip().startswith("[train] deterministic is on")
    assert reference.strip().startswith("policies 'critic' and 'writer': algorithm 'comparing'")


@pytest.mark.parametrize(
    ("algorithm", "credit", "kind"),
    [
        ("comparing", "whole", CreditKind.RETURN),
        ("comparing", "either", CreditKind.RETURN),
        ("judging", "per_step", CreditKind.REWARD),
        ("judging", "either", CreditKind.REWARD),
        ("easy", "either", CreditKind.RETURN),
        ("easy", "per_step", CreditKind.RETURN),
        ("easy", "compared", CreditKind.RETURN),
    ],
)
def test_the_algorithm_decides_what_the_values_are(loaded: Load, algorithm: str, credit: str, kind: CreditKind) -> None:
    run = loaded({}, "engine.name=rich", f"algorithm.name={algorithm}", f"credit.name={credit}")

    assert run.policies["default"].credit_kind is kind


def test_training_on_what_older_weights_sampled_without_correction_is_worth_a_word(loaded: Load) -> None:
    grpo = {"policies.default.algorithm": {"name": "grpo"}}
    assert list(cautions(loaded(grpo))) == []
    assert list(cautions(loaded(grpo, "async.max_staleness=2", "policies.default.algorithm.name=easy"))) == []
    stale = "async.max_staleness=2"
    [caution] = cautions(loaded(grpo, stale))
    assert "max_staleness is 2" in caution
    assert "importance_cap is not set" in caution
    assert list(cautions(loaded(grpo, stale, "policies.default.algorithm.grpo.importance_cap=2.0"))) == []
