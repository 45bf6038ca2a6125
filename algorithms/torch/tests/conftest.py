"""Tiny models and checkpoints of two architectures, and ways to sample and train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizers import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_chat.backends import Generation, Request
from agl_core.config.sections import OptimizerSection
from agl_core.protocols import EngineContext, PolicySpec, UpdateResult
from agl_core.testing.engines import Row, batch_of
from agl_core.types import Batch
from agl_torch import attention
from agl_torch.loading import LoadedModel, load_model
from agl_torch.plugin import TorchOptions
from agl_torch.process import Policies
from agl_torch.sampler import Sampler
from agl_torch.trainer import PolicyTrainer


@dataclass(frozen=True)
class Shape:
    """The shape of a test checkpoint."""

    architecture: str = "qwen2"
    tied: bool = True
    dtype: torch.dtype = torch.float32
    sharded: bool = False
    eos: tuple[str, ...] = ("<|im_end|>",)
    layers: int = 2
    hidden: int = 32


def make_model(architecture: str, **changes: Any) -> Any:
    """Random weights large enough that likely and unlikely tokens differ much."""
    config, model = (Qwen2Config, Qwen2ForCausalLM) if architecture == "qwen2" else (LlamaConfig, LlamaForCausalLM)
    fields = {"vocab_size": 320, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.15}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return model(config(**fields | changes, bos_token_id=0, eos_token_id=1))


def make_checkpoint(folder: Path, shape: Shape = Shape(), template: str | None = "own") -> Path:
    """Write random weights, a tokenizer and a chat template ("own": that of the architecture)."""
    tokenizer = make_tokenizer(shape.architecture, template)
    model = make_model(
        shape.architecture,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        max_position_embeddings=256,
        tie_word_embeddings=shape.tied,
    ).to(shape.dtype)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in shape.eos]
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(folder, max_shard_size="20KB" if shape.sharded else "1GB")
    tokenizer.save_pretrained(folder)
    return folder


SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def untrained(kind: str, **changes: Any) -> Any:
    """A small model of any kind that transformers knows."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SMALL | changes))).eval()


@dataclass(frozen=True)
class Loaded(LoadedModel):
    """A loaded model as `load_model` gives it, made by hand."""

    @property
    def token_bytes(self) -> int:
        """The bytes that the cache needs for one token, in float32."""
        config = self.model.config
        return int(config.num_hidden_layers * config.num_key_value_heads * 2 * config.head_dim * 4)

    def with_eos(self, *ids: int) -> Loaded:
        return replace(self, eos_ids=frozenset(ids))


def in_memory(architecture: str, ends: Sequence[str], **changes: Any) -> Loaded:
    tokenizer, model = make_tokenizer(architecture), make_model(architecture, max_position_embeddings=512, **changes)
    attention.use(model)
    eos = frozenset(tokenizer.convert_tokens_to_ids(ends))
    return Loaded(model.eval(), tokenizer, torch.device("cpu"), torch.float32, eos, 512)


@pytest.fixture(scope="session")
def qwen() -> Loaded:
    ends = ["<|im_end|>", "<|endoftext|>"]
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 32}
    return in_memory("qwen2", ends, **shape, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def llama() -> Loaded:
    ends = ["<|eot_id|>", "<|end_of_text|>"]
    shape = {"hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    return in_memory("llama", ends, **shape, num_attention_heads=3, num_key_value_heads=3, tie_word_embeddings=False)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def load(model: Path, **settings: Any) -> LoadedModel:
    """A model, loaded anew."""
    return load_model(PolicySpec(str(model), **settings), CPU, seed=0)


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return load(checkpoint)


@pytest.fixture
def in_float64(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, model=loaded.model.double(), dtype=torch.float64)


def random_ids(loaded: Loaded, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(8, len(loaded.tokenizer), length).astype(np.int32)


def drive(sampler: Sampler, requests: Sequence[Request] = ()) -> dict[str, Generation]:
    """Submit, run until idle, and return what came out by request id."""
    for request in requests:
        sampler.submit(request)
    done: dict[str, Generation] = {}
    while not sampler.idle:
        done.update((generated.request.id, generated) for generated in sampler.step())
    return done


@torch.inference_mode()
def recomputed(loaded: Loaded, generated: Generation, choice: int = 0) -> np.ndarray:
    """The log-probabilities of a response by one plain forward pass over prompt and response."""
    ids = torch.from_numpy(generated.responses[choice].ids).long()
    return distributions(loaded, generated, choice).gather(1, ids[:, None])[:, 0].numpy()


@torch.inference_mode()
def distributions(loaded: Loaded, generated: Generation, choice: int = 0) -> torch.Tensor:
    """The log-probabilities of all tokens at each position of a response, likewise."""
    request, response = generated.request, generated.responses[choice]
    ids = torch.tensor(np.concatenate([request.prompt_ids, response.ids]), dtype=torch.long)
    logits = loaded.model(input_ids=ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].float()
    return torch.log_softmax(logits / (request.temperature or 1.0), -1)


CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 8.0}


def tokens_of(batch: Batch, i: int) -> torch.Tensor:
    """Prompt and response of transition i."""
    return torch.from_numpy(batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))


def mask_of(batch: Batch, i: int) -> torch.Tensor:
    return torch.from_numpy(batch.mask_R[batch.response_offsets[i] : batch.response_offsets[i + 1]])


def plain_logits(model: Any, batch: Batch, i: int) -> torch.Tensor:
    """[response, V] the oracle: one plain forward of transition i alone, at its temperature."""
    logits = model(input_ids=tokens_of(batch, i)[None]).logits[0, int(batch.prompt_lengths_N[i]) - 1 : -1]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)) / float(batch.temperature_N[i])


def plain_logprobs(model: Any, batch: Batch, i: int) -> torch.Tensor:
    """[response] of its tokens."""
    logprobs = torch.log_softmax(plain_logits(model, batch, i), -1)
    return logprobs.gather(-1, tokens_of(batch, i)[-len(logprobs) :, None])[:, 0]


@torch.no_grad()
def all_logprobs(model: Any, batch: Batch) -> np.ndarray:
    """[R] of every transition."""
    return np.concatenate([plain_logprobs(model, batch, i).numpy() for i in range(len(batch))])


def make_batch(loaded: LoadedModel | None, *, groups: int = 2, members: int = 3, seed: int = 0) -> Batch:
    """Ragged random transitions, 1 to 3 turns each; behaviour as the model computes it."""
    rng = np.random.default_rng(seed)
    rows, masks, rollouts, turns = [], [], [], []
    for rollout in range(groups * members):
        value = float(rng.choice([0.0, 1.0, 0.3]))
        for turn in range(1 + rollout % 3):
            prompt = rng.integers(3, 300, int(rng.integers(1, 40)))
            response = rng.integers(3, 300, int(rng.integers(1, 12)))
            rows.append(Row(prompt, response, [-1.0] * len(response), value))
            masks.append(rng.random(len(response)) < 0.8)
            masks[-1][0] = True
            rollouts.append(rollout)
            turns.append(turn)
    batch = replace(
        batch_of(rows),
        mask_R=np.concatenate(masks),
        temperature_N=rng.choice([0.7, 1.0, 1.3], len(rows)).astype(np.float32),
        group_N=np.array(rollouts) // members,
        rollout_N=np.array(rollouts),
        turn_N=np.array(turns),
    )
    if loaded is None:
        return batch
    behaviour = all_logprobs(loaded.model, batch)
    return replace(batch, behaviour_logprobs_R=behaviour.astype(np.float32))


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every weight."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


RATE = OptimizerSection(learning_rate=1e-2)


def trainer_of(loaded: LoadedModel, settings: OptimizerSection = RATE, **more: Any) -> PolicyTrainer:
    return PolicyTrainer(loaded, settings, **({"tokens_per_micro_batch": 100} | more))


def grpo(**options: Any) -> Grpo:
    return Grpo(GrpoOptions(**({"beta": 0.0} | options)))


def start_policies(options: Mapping[str, Any] = MappingProxyType({}), /, **policies: PolicySpec) -> Policies:
    """A policy that names no algorithm has GRPO without a reference."""
    plain = {"algorithm": "grpo", "algorithm_options": {"beta": 0.0}}
    specs = {name: spec if spec.algorithm else replace(spec, **plain) for name, spec in policies.items()}
    context = EngineContext(Path("run"), 0, specs, False, (), "key")
    return Policies(TorchOptions(**({"cache_mib": 16, "device": "cpu"} | options)), context)


def update(policies: Policies, name: str = "default", seed: int = 0) -> UpdateResult:
    return policies.update(name, make_batch(None, seed=seed), lambda _: None)


def saved(folder: Path, policy: PolicySpec, updates: int = 1) -> tuple[LoadedModel, Path]:
    """A policy after some updates, and the folder with its weights."""
    policies = start_policies(default=policy)
    for seed in range(updates):
        update(policies, seed=seed)
    policies.save(folder)
    return policies.policies["default"].loaded, folder / "default" / "model"
