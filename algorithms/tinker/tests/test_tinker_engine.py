from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agl_algorithms.policy_gradient import Algorithm, Logprobs
from agl_algorithms.prepared import minibatches, prepare, samples_of
from agl_core.config.load import load
from agl_core.config.sections import LoraSection, OptimizerSection
from agl_core.errors import CapabilityError, ConfigError, EngineError
from agl_core.learning.batch import filter_trainable, lay_out
from agl_core.plugins import Plugins
from agl_core.protocols import PolicySpec, UpdateResult
from agl_core.testing import episodes as make
from agl_core.testing.engines import engine_context
from agl_core.types import Batch, CreditKind, DropReason, Transition
from agl_server.engines.child import build_algorithm
from agl_tinker.plugin import TinkerEngine, TinkerOptions
from agl_tinker.service import Division, Service
from agl_tinker.trainer import PolicyTrainer

from .bigram import VOCABULARY, Bigrams

OPTIMIZER = OptimizerSection(learning_rate=0.01, max_grad_norm=0.5, weight_decay=0.1)
SUM = Division(by_targets=False, by_rows=False, weighs=True)
DIVISIONS = [SUM, replace(SUM, by_rows=True), *(Division(True, by_rows, weighs=False) for by_rows in (False, True))]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_three_steps_that_are_taken_back_tell_how_a_service_divides(division: Division) -> None:
    client: Any = Bigrams(by_targets=division.by_targets, by_rows=division.by_rows)
    before = client.logits.detach().clone()
    assert Division.probed(client, [3, 5, 7, 11], timeout=1.0) == division
    torch.testing.assert_close(client.logits, before, rtol=0, atol=0.02)


def batch() -> Batch:
    """A group of three rollouts, of which the first has a second turn that continues its first.

    Better and worse ones say nothing after the same token: gradients that cancel are noise, which Adam magnifies.
    """
    random = np.random.default_rng(7)

    def call(rollout: str, prompt: Sequence[int], size: int) -> Transition:
        response = random.integers(0, VOCABULARY, size)
        logprobs = -random.uniform(0.5, 4.0, size)
        return make.transition(rollout=rollout, prompt_ids=prompt, response_ids=response, logprobs=logprobs)

    first = call("a", (1, 2, 3), 4)
    said = [*first.prompt_ids, *first.response_ids]
    calls = [first, call("a", (*said, 9, 10), 3), call("b", (6, 7), 5), call("c", (4, 5), 2)]
    return lay_out(calls, [1.0, 0.25, 0.0, 0.5], [0] * 4, [0, 0, 1, 2], CreditKind.RETURN)


def trainer(
    client: Any, division: Division, *, teacher: Any = None, trains: Callable[[PolicySpec, int], Any] | None = None
) -> PolicyTrainer:
    service: Any = SimpleNamespace(
        options=TinkerOptions(timeout=5.0), explained=lambda when: nullcontext(), trains=trains
    )
    reference: Any = Bigrams()
    return PolicyTrainer(
        service,
        client,
        PolicySpec(model="bigrams", optimizer=OPTIMIZER),
        division,
        reference=reference,
        teacher=teacher,
        context_length=64,
        vocabulary=VOCABULARY,
        seed=0,
        steps=10,
    )


def by_torch(batch: Batch, algorithm: Algorithm, model: Bigrams, teacher: Bigrams | None = None) -> UpdateResult:
    """The same update, with the loss differentiated through the model, and torch's AdamW."""
    prepared = prepare(
        usable := filter_trainable(batch, context_length=64, vocabulary=VOCABULARY, grammars=False),
        samples := samples_of(usable.batch, dtype=torch.float64),
        algorithm,
    )
    tokens = usable.batch.tokens_T
    pairs = [
        (tokens[place - 1], tokens[place])
        for start, prompt, end in zip(
            usable.batch.offsets[:-1], usable.batch.prompt_lengths_N, usable.batch.offsets[1:], strict=True
        )
        for place in range(start + prompt, end)
    ]
    before_R, token_R = torch.tensor(np.array(pairs)).T

    def logprobs(of: Bigrams) -> torch.Tensor:
        return torch.log_softmax(of.logits[before_R], dim=-1).gather(1, token_R[:, None])[:, 0]

    adam = torch.optim.AdamW([model.logits], lr=0.01, weight_decay=0.1)
    old_R, reference_R = logprobs(model).detach(), logprobs(Bigrams()).detach()
    if algorithm.needs_scores:
        teacher_R = None if teacher is None else logprobs(teacher).detach()
        prepared, _ = prepared.rescored(algorithm, Logprobs(old_R, old_R, old_R, reference_R, teacher_R=teacher_R))
    steps = minibatches(prepared.batch, prepared.trained, algorithm.minibatches, [0, 0]) * algorithm.epochs
    for chosen in steps:
        weights_R = prepared.step_weights(prepared.weights_R, [chosen])
        of_all = Logprobs(logprobs(model), old_R, samples.behaviour_R, reference_R)
        loss, _ = algorithm.loss(samples, of_all, prepared.advantages_R, weights_R)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([model.logits], 0.5)
        adam.step()
    return prepared.result(1, {}, old_R)


ONCE, TWICE = ["cross_entropy"], ["forward", "importance_sampling"]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize(
    ("name", "options", "passes"),
    [
        ("grpo", {}, ONCE),
        ("grpo", {"epochs": 3, "clip": 0.01, "importance_cap": 1.5}, TWICE * 3),
        ("grpo", {"importance_cap": 1.5, "importance_floor": 0.5}, TWICE),
        ("grpo", {"beta": 0.1}, TWICE),
        ("grpo", {"minibatches": 2}, TWICE * 2),
        ("grpo", {"surrogate": "cispo", "epochs": 2}, TWICE * 2),
        ("reinforce++", {}, ONCE),
        ("sft", {}, ONCE),
        ("sft", {"epochs": 3}, TWICE * 3),
        ("rft", {"top_k": 2, "minibatches": 2}, TWICE * 2),
        ("dpo", {"beta": 0.5}, TWICE),
        ("distill", {"teacher": "larger"}, TWICE),
        ("distill", {"teacher": "larger", "epochs": 2, "reward_weight": 0.5}, TWICE * 2),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_an_update_is_that_of_the_loss_differentiated_through_the_model(
    name: str, options: dict[str, Any], passes: list[str], division: Division
) -> None:
    algorithm = build_algorithm(Plugins.load(), name, options)
    service, oracle = Bigrams(by_targets=division.by_targets, by_rows=division.by_rows), Bigrams()
    teacher = Bigrams(seed=4) if algorithm.teacher else None
    with torch.no_grad():
        service.logits[1:9] += 0.3 * torch.eye(VOCABULARY)[1:9]  # Weights that are no longer the initial ones.
        oracle.logits.copy_(service.logits)
    result = trainer(service, division, teacher=teacher).update(batch(), algorithm, lambda share: None)
    expected = by_torch(batch(), algorithm, oracle, teacher)
    assert result.version == 1
    expected_passes: list[str] = []
    torch.testing.assert_close(service.logits, oracle.logits, rtol=0, atol=2e-6)
    for step in passes:
        expected_passes += TWICE if step in ONCE and not division.weighs else [step]
    assert service.passes == expected_passes
    np.testing.assert_allclose(result.advantage_N, expected.advantage_N, atol=1e-6)
    for ours, theirs in zip(result.logprobs_N, expected.logprobs_N, strict=True):
        assert ours is theirs or np.allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("division", [SUM, DIVISIONS[-1]], ids=str)
def test_a_step_that_is_not_finite_is_left_out_and_leaves_nothing_behind(division: Division) -> None:
    """A gradient in one pass is at the service before anyone can look at it: the next one is not added to it."""
    algorithm = build_algorithm(Plugins.load(), "grpo", {})
    broken, oracle = (Bigrams(by_targets=division.by_targets, by_rows=division.by_rows) for _ in range(2))
    broken.broken = True
    ours, theirs = trainer(broken, division, trains=broken.renewed), trainer(oracle, division)
    skipped = ours.update(batch(), algorithm, lambda share: None)
    assert set(skipped.dropped) == {DropReason.NON_FINITE}
    broken.broken = False
    assert ours.update(batch(), algorithm, lambda share: None).metrics["steps_applied"] == 1
    theirs.update(batch(), algorithm, lambda share: None)
    client: Any = ours.client
    torch.testing.assert_close(client.logits, oracle.logits, rtol=0, atol=0)


def test_a_gradient_that_only_seems_constant_is_replaced() -> None:
    """Neither the ratio 1 nor that of the other point is between floor and cap; those of some tokens are."""
    algorithm = build_algorithm(Plugins.load(), "grpo", {"importance_cap": 0.3, "importance_floor": 0.01})
    service, oracle = Bigrams(), Bigrams()
    ours = trainer(service, SUM, trains=service.renewed)
    ours.update(batch(), algorithm, lambda share: None)
    by_torch(batch(), algorithm, oracle)
    client: Any = ours.client
    assert (service.passes, client.passes) == (["cross_entropy"], ["importance_sampling"])
    assert not torch.equal(oracle.logits, Bigrams().logits)
    torch.testing.assert_close(client.logits, oracle.logits, rtol=0, atol=2e-6)


def test_what_it_cannot_train_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'default' trains all weights.*\[policies.default.model.lora\]"):
        TinkerEngine(TinkerOptions(), engine_context(tmp_path, "model"))
    with pytest.raises(ConfigError, match=r"leave policies.default.model.lora.alpha out"):
        TinkerEngine(TinkerOptions(), engine_context(tmp_path, "model", lora=LoraSection(alpha=8)))
    elsewhere = {"algorithm_options": {"teacher": "http://there/v1", "teacher_model": "big"}}
    with pytest.raises(ConfigError, match="leave 'teacher_model' out"):
        TinkerEngine(TinkerOptions(), engine_context(tmp_path, "model", lora=LoraSection(), **elsewhere))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(EngineError, match="TINKER_API_KEY has no key for Tinker"):
        Service(TinkerOptions())
    monkeypatch.setenv("TINKER_API_KEY", "tml-anything")
    with pytest.raises(EngineError, match="MY_KEY has no key for http"):
        Service(TinkerOptions(api_key_env="MY_KEY", base_url="http://127.0.0.1:9"))


def test_another_temperature_is_refused_by_the_configuration() -> None:
    file, adapter = Path(__file__).parents[3] / "examples/calc/train.toml", "policies.default.model.lora.rank=8"
    load(file, ["engine.name=tinker", adapter])
    with pytest.raises(
        CapabilityError, match=r"engine 'tinker'.*at temperature 1, but \[sampling\] temperature is 0.7"
    ):
        load(file, ["engine.name=tinker", adapter, "sampling.temperature=0.7"])


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-32B", {"base_model": "Qwen/Qwen3-32B"}),
        ("tinker://run/sampler_weights/last", {"model_path": "tinker://run/sampler_weights/last"}),
    ],
)
def test_a_teacher_is_a_model_of_the_service(model: str, expected: dict[str, str]) -> None:
    service: Any = object.__new__(Service)
    service.options, service.place = TinkerOptions(), "Tinker"
    service.client = SimpleNamespace(create_sampling_client=lambda **given: given)
    assert service.sampler_of(model) == expected


@pytest.mark.parametrize(
    ("targets", "problem"),
    [(("q_proj", "v_proj"), "Add k_proj, o_proj"), (("q_proj", "k_proj", "v_proj", "o_proj", "norm"), "called norm")],
)
def test_layers_are_adapted_by_kind(targets: tuple[str, ...], problem: str) -> None:
    service = object.__new__(Service)
    with pytest.raises(ConfigError, match=problem):
        service.trains(PolicySpec(model="m", lora=LoraSection(targets=targets)), 0)
