"""The whole way from records to the update of a real policy, checked at every station."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_algorithms.ppo import gae_across_calls
from agl_algorithms.prepared import samples_of
from agl_core import kinds
from agl_core.config.sections import OptimizerSection
from agl_core.learning.batch import BatchPlan, PolicyCredit, StepBatches, filter_trainable, make_batches
from agl_core.learning.rewards import ScoringRule, reported, score
from agl_core.plugins import Plugins
from agl_core.protocols import PolicySpec
from agl_core.types import Batch, CreditKind, DropReason, Ending, Episode, Reward, Rollout, TransitionKey
from agl_server.store.sqlite import SqliteStore
from agl_server.training.rollouts import recorded_episodes
from agl_torch.loading import LoadedModel, load_model
from agl_torch.trainer import PolicyTrainer

from .recorded_data import Data

VOCABULARY = 64
CONTEXT = 256


def make_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A folder in Hugging Face format."""
    words = {"<end>": 0, **{f"w{i}": i for i in range(1, VOCABULARY)}}
    words_alone = Tokenizer(models.WordLevel(words, unk_token="w1"))
    words_alone.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words_alone, eos_token="<end>", pad_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


PLUGINS = Plugins.load()
JUDGED = dict.fromkeys(Ending, "score")


@dataclass(frozen=True)
class Way:
    """An algorithm with settings, and the credit rule before it."""

    algorithm: str
    credit: str
    settings: tuple[tuple[str, Any], ...] = ()
    kind: CreditKind = CreditKind.RETURN

    @property
    def sound(self) -> set[str]:
        """The fates of sound transitions; DPO trains on the best and the worst rollout of a group alone."""
        return {"", "no_advantage"} if self.algorithm == "dpo" else {""}


WAYS = (
    Way("grpo", "identical", (("beta", 0.04),)),  # With a KL term groups without contrast are trained on too.
    Way("grpo", "discounted", (("importance_cap", 2.0), ("importance_level", "sequence"), ("ratio", "sequence"))),
    Way("grpo", "gigpo", (("surrogate", "cispo"),), CreditKind.ADVANTAGE),
    Way("grpo", "air", (("beta", 0.04), ("aggregation", "token-mean")), CreditKind.ADVANTAGE),
    Way("reinforce++", "gigpo", (), CreditKind.ADVANTAGE),
    Way("ppo", "discounted", (("minibatches", 2),)),
    Way("ppo", "immediate", (("across_calls", True),), CreditKind.REWARD),
    Way("reinforce++", "identical"),
    Way("reinforce++", "immediate", (("across_calls", True), ("gamma", 0.9)), CreditKind.REWARD),
    Way("sft", "identical"),
    Way("rft", "identical", (("threshold", -10.0),)),
    Way("dpo", "identical"),
    Way("distill", "identical", (("teacher", "the policy itself"),)),
)


def tools(episode: Episode) -> list[Reward]:
    """A rule that rewards calls: ±0.25 for each tool result."""
    return [
        Reward(episode.rollout, 0, f"{o.tool}.{n}", 0.25 if o.status == "ok" else -0.25, "", t.key.call, t.key.choice)
        for t in episode.transitions
        for n, o in enumerate(t.tool_results)
    ]


def answer(episode: Episode) -> float:
    return float(episode.result) if isinstance(episode.result, int | float) else 0.0


RULES = (ScoringRule("answer", answer), ScoringRule("said", reported), ScoringRule("tools", tools))


async def judged(
    data: Data, folder: Path, rules: Sequence[ScoringRule] = RULES, endings: Mapping[Ending, Any] = JUDGED
) -> list[list[Episode]]:
    """Through a real store and the reward rules; groups as they were planned. StoreError if a record is refused."""
    folder.mkdir(exist_ok=True)
    store = SqliteStore(folder / "store.sqlite")
    async with store:
        await store.put(*data.records)
        known = {r.id: r for r in await store.rollouts()}
        rollouts = [known[r.id] for r in data.rollouts]
        episodes = await recorded_episodes(store, rollouts, PLUGINS.hook, "drop")
    scored = [(await score(episode, rules, endings))[0] for episode in episodes]
    return by_group(rollouts, scored)


def by_group(rollouts: Sequence[Rollout], episodes: Sequence[Episode]) -> list[list[Episode]]:
    groups: dict[str, list[Episode]] = {}
    for rollout, episode in zip(rollouts, episodes, strict=True):
        groups.setdefault(rollout.group, []).append(episode)
    return list(groups.values())


def credited(way: Way, groups: Sequence[Sequence[Episode]], min_group_size: int = 2) -> StepBatches:
    component = PLUGINS.component(kinds.CREDIT, way.credit, "a test")
    credit = PolicyCredit(way.credit, component.build(component.options()), way.kind)
    return make_batches(groups, BatchPlan({"default": credit, "other": credit}, min_group_size=min_group_size))


class Line:
    """Tiny policies that learn from whatever comes, one for each way; they have to stay finite."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._trainers: dict[Way, tuple[PolicyTrainer, Any, LoadedModel]] = {}
        self._results: dict[str, dict[TransitionKey, str | None]] = {}
        self.updates = 0

    def learn(self, way: Way, groups: Sequence[Sequence[Episode]], min_group_size: int = 2) -> dict[TransitionKey, str]:
        """Credit, make_batches and update; why each transition was dropped, "" where it was trained on.

        Asserts that every transition is accounted for once, and that nothing that is left of it is not finite.
        """
        prepared = credited(way, groups, min_group_size)
        fates = {record.key: str(record.dropped) for record in prepared.dropped}
        assert len(fates) == len(prepared.dropped)
        assert set(fates.values()) <= set(DropReason)
        for batch in prepared.batches.values():
            check_shapes(batch)
            for key, reason in self._update(way, batch).items():
                assert key not in fates
                fates[key] = reason or ""
        expected = {t.key for group in groups for e in group for t in (*e.transitions, *e.undelivered, *e.housekeeping)}
        assert fates.keys() == expected, "a transition was lost, or came from nowhere"
        counted = Counter(e.dropped or DropReason.NO_TRANSITION for g in groups for e in g if e.dropped)
        assert all(prepared.episodes_dropped.get(reason, 0) >= count for reason, count in counted.items())
        return fates

    def returns(self, way: Way, groups: Sequence[Sequence[Episode]], call: str) -> float:
        """The engine's advantage for rewards from one call on, γ = 0.9."""
        model = self._trainer(way)[2]
        batch = credited(way, groups).batches["default"]
        batch = filter_trainable(batch, context_length=model.context_length, vocabulary=model.vocabulary).batch
        [row] = [i for i, key in enumerate(batch.keys) if key.call == call]
        samples = samples_of(batch)
        return float(gae_across_calls(samples, torch.zeros_like(samples.values_N), gamma=0.9, lam=1.0)[row])

    def _update(self, way: Way, batch: Batch) -> dict[TransitionKey, str | None]:
        digest = hashlib.sha256(repr(way).encode())
        for field in fields(batch):
            if field.name not in ("keys", "version_N"):  # An update depends on neither.
                value = getattr(batch, field.name)
                digest.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        if digest.hexdigest() not in self._results:
            self._results[digest.hexdigest()] = dict(enumerate(self._updated(way, batch)))  # type: ignore[arg-type]
        return dict(zip(batch.keys, self._results[digest.hexdigest()].values(), strict=True))

    def _updated(self, way: Way, batch: Batch) -> tuple[str | None, ...]:
        trainer, algorithm, loaded = self._trainer(way)
        result = trainer.update(batch, algorithm, teacher=loaded if algorithm.teacher else None)
        self.updates += 1
        assert finite(trainer.state_dict()), "the optimizer or the critic"
        assert finite(loaded.model.state_dict()), "the weights"
        assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics
        assert np.isfinite(result.advantage_N).all()
        assert np.isfinite(result.weight_N).all()
        assert set(result.dropped) <= {None, *DropReason}
        for reason, weight in zip(result.dropped, result.weight_N.tolist(), strict=True):
            assert (weight == 0) == (reason is not None)
        dropped = sum(reason is not None for reason in result.dropped)
        assert result.metrics["transitions_dropped"] == dropped
        return result.dropped

    def _trainer(self, way: Way) -> tuple[PolicyTrainer, Any, LoadedModel]:
        if way not in self._trainers:
            spec = PolicySpec(str(self._checkpoint))
            loaded = load_model(spec, torch.device("cpu"), 0)
            trainer = PolicyTrainer(
                loaded,
                OptimizerSection(learning_rate=1e-4),
                tokens_per_micro_batch=1024,
                initial=lambda: load_model(spec, torch.device("cpu"), 0),
            )
            component = PLUGINS.component(kinds.ALGORITHM, way.algorithm, "a test")
            options = component.options.model_validate(dict(way.settings))
            self._trainers[way] = trainer, component.build(options), loaded
        return self._trainers[way]


def check_shapes(batch: Batch) -> None:
    """Arrays of one batch fit each other."""
    responses, tokens = int(batch.response_offsets[-1]), int(batch.offsets[-1])
    assert len(batch.tokens_T) == tokens
    assert len(batch.behaviour_logprobs_R) == len(batch.mask_R) == responses
    assert (np.diff(batch.offsets) == batch.prompt_lengths_N + batch.response_lengths_N).all()
    assert np.isfinite(batch.values_N).all()


def finite(state: Any) -> bool:
    """True if every number in nested state is finite."""
    if isinstance(state, torch.Tensor):
        return bool(torch.isfinite(state).all())
    if isinstance(state, Mapping):
        return all(finite(value) for value in state.values())
    if isinstance(state, list | tuple):
        return all(finite(value) for value in state)
    return not isinstance(state, float) or math.isfinite(state)
