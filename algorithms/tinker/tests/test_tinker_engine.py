from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agl_algorithms.policy_gradient import Algorithm, Logprobs
from agl_algorithms.prepared import prepare, samples_of
from agl_core.config.sections import LoraSection, OptimizerSection
from agl_core.errors import ConfigError, EngineError
from agl_core.learning.batch import filter_trainable, lay_out
from agl_core.plugins import Plugins
from agl_core.protocols import PolicySpec
from agl_core.testing import episodes as make
from agl_core.testing.engines import engine_context
from agl_core.types import Batch, CreditKind, Transition
from agl_server.engines.child import build_algorithm
from agl_tinker.plugin import TinkerEngine, TinkerOptions
from agl_tinker.service import Division, Service
from agl_tinker.trainer import PolicyTrainer

from .bigram import VOCABULARY, Bigrams

OPTIMIZER = OptimizerSection(learning_rate=0.01, max_grad_norm=0.5, weight_decay=0.1)
DIVISIONS = [Division(by_targets, by_rows) for by_targets in (False, True) for by_rows in (False, True)]


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_three_steps_that_are_taken_back_tell_how_a_service_divides(division: Division) -> None:
    client: Any = Bigrams(by_targets=division.by_targets, by_rows=division.by_rows)
    before = client.logits.detach().clone()
    assert Division.probed(client, [3, 5, 7, 11], timeout=1.0) == division
    torch.testing.assert_close(client.logits, before, rtol=0, atol=0.02)


def batch() -> Batch:
    """A group of three rollouts, of which the first has a second turn that continues its first."""
    random = np.random.default_rng(7)

    def call(rollout: str, prompt: Sequence[int], size: int) -> Transition:
        response = random.integers(0, VOCABULARY, size)
        logprobs = -random.uniform(0.5, 4.0, size)
        return make.transition(rollout=rollout, prompt_ids=prompt, response_ids=response, logprobs=logprobs)

    first = call("a", (1, 2, 3), 4)
    said = [*first.prompt_ids, *first.response_ids]
    calls = [first, call("a", (*said, 9, 8), 3), call("b", (1, 2, 3), 5), call("c", (4, 5), 2)]
    return lay_out(calls, [1.0, 0.25, 0.0, 0.5], [0] * 4, [0, 0, 1, 2], CreditKind.RETURN)


def trainer(client: Any, division: Division) -> PolicyTrainer:
    service: Any = SimpleNamespace(options=TinkerOptions(timeout=5.0), explained=lambda when: nullcontext())
    return PolicyTrainer(
        service,
        client,
        PolicySpec(model="bigrams", optimizer=OPTIMIZER),
        division,
        reference=SimpleNamespace(),  # type: ignore[arg-type]
        context_length=64,
        vocabulary=VOCABULARY,
        seed=0,
        steps=10,
    )


def by_torch(batch: Batch, algorithm: Algorithm, model: Bigrams) -> None:
    """The same update, with the loss differentiated through the model, and torch's AdamW."""
    prepared = prepare(
        usable := filter_trainable(batch, context_length=64, vocabulary=VOCABULARY, grammars=False),
        samples := samples_of(usable.batch, dtype=torch.float64),
        algorithm,
    )
    tokens, chosen = usable.batch.tokens_T, prepared.trained
    pairs = [
        (tokens[place - 1], tokens[place])
        for start, prompt, end in zip(
            usable.batch.offsets[:-1], usable.batch.prompt_lengths_N, usable.batch.offsets[1:], strict=True
        )
        for place in range(start + prompt, end)
    ]
    before_R, token_R = torch.tensor(np.array(pairs)).T
    adam = torch.optim.AdamW([model.logits], lr=0.01, weight_decay=0.1)
    old_R = None
    for _ in range(algorithm.epochs):
        current_R = torch.log_softmax(model.logits[before_R], dim=-1).gather(1, token_R[:, None])[:, 0]
        old_R = current_R.detach() if old_R is None else old_R
        weights_R = prepared.step_weights(prepared.weights_R, [chosen])
        logprobs = Logprobs(current_R, old_R, samples.behaviour_R)
        loss, _ = algorithm.loss(samples, logprobs, prepared.advantages_R, weights_R)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([model.logits], 0.5)
        adam.step()


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("grpo", {}),
        ("grpo", {"epochs": 3, "clip": 0.01, "importance_cap": 1.5}),
        ("grpo", {"surrogate": "cispo", "epochs": 2}),
        ("reinforce++", {}),
        ("sft", {}),
    ],
    ids=["grpo", "clipped", "cispo", "reinforce++", "sft"],
)
def test_an_update_is_that_of_the_loss_differentiated_through_the_model(
    name: str, options: dict[str, Any], division: Division
) -> None:
    algorithm = build_algorithm(Plugins.load(), name, options)
    service, oracle = Bigrams(by_targets=division.by_targets, by_rows=division.by_rows), Bigrams()
    result = trainer(service, division).update(batch(), algorithm, lambda share: None)
    by_torch(batch(), algorithm, oracle)
    assert result.version == 1
    assert not torch.equal(oracle.logits, Bigrams().logits)
    torch.testing.assert_close(service.logits, oracle.logits, rtol=0, atol=2e-6)


def test_what_it_cannot_train_is_said_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'default' trains all weights.*\[policies.default.model.lora\]"):
        TinkerEngine(TinkerOptions(), engine_context(tmp_path, "model"))
    with pytest.raises(ConfigError, match=r"leave policies.default.model.lora.alpha out"):
        TinkerEngine(TinkerOptions(), engine_context(tmp_path, "model", lora=LoraSection(alpha=8)))
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(EngineError, match="TINKER_API_KEY has no key for Tinker"):
        Service(TinkerOptions())
    monkeypatch.setenv("TINKER_API_KEY", "tml-anything")
    with pytest.raises(EngineError, match="MY_KEY has no key for http"):
        Service(TinkerOptions(api_key_env="MY_KEY", base_url="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("targets", "problem"),
    [(("q_proj", "v_proj"), "Add k_proj, o_proj"), (("q_proj", "k_proj", "v_proj", "o_proj", "norm"), "called norm")],
)
def test_layers_are_adapted_by_kind(targets: tuple[str, ...], problem: str) -> None:
    service = object.__new__(Service)
    with pytest.raises(ConfigError, match=problem):
        service.trains(PolicySpec(model="m", lora=LoraSection(targets=targets)), 0)
