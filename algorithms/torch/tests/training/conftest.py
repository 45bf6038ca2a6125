"""Tiny checkpoints in Hugging Face format and batches to train them on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_core.config.policies import OptimizerSection
from agl_core.protocols import PolicySpec
from agl_core.types import Batch, CreditKind, TransitionKey
from agl_torch.models.loading import LoadedModel, load_model
from agl_torch.training.trainer import PolicyTrainer

HERMES = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>"
    "<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
TEXTS = [
    "What is 12 plus 345?",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+345"}}\n</tool_call>',
    "Tom has 5 apples and don't  want\t7 more.\n\nThe answer is 42.",
    "Grüße, 世界! 1234567890",
]


@dataclass(frozen=True)
class Shape:
    """What a test checkpoint is like."""

    architecture: str = "qwen2"
    tied: bool = True
    dtype: torch.dtype = torch.float32
    sharded: bool = False
    eos: tuple[str, ...] = ("<|im_end|>",)
    layers: int = 2
    hidden: int = 32


def make_tokenizer(specials: Sequence[str], template: str | None) -> PreTrainedTokenizerFast:
    """A hand-made byte-level BPE that splits digits, unlike the stock tokenizer of any architecture."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXTS * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=specials[0], eos_token=specials[1], pad_token=specials[0]
    )
    tokenizer.chat_template = template
    return tokenizer


def make_checkpoint(folder: Path, shape: Shape = Shape(), template: str | None = "own") -> Path:
    """Write random weights, a tokenizer and a chat template ("own": that of the architecture)."""
    qwen = shape.architecture == "qwen2"
    specials = (
        ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
        if qwen
        else ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"]
    )
    tokenizer = make_tokenizer(specials, (HERMES if qwen else LLAMA3) if template == "own" else template)
    config = (Qwen2Config if qwen else LlamaConfig)(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=shape.tied,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model: Any = (Qwen2ForCausalLM if qwen else LlamaForCausalLM)(config)
    model = model.to(shape.dtype)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in shape.eos]
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.save_pretrained(folder, max_shard_size="20KB" if shape.sharded else "1GB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(PolicySpec(str(checkpoint)), torch.device("cpu"), seed=0)


@pytest.fixture
def in_float64(loaded: LoadedModel) -> LoadedModel:
    return replace(loaded, model=loaded.model.double(), dtype=torch.float64)


LORA = {"rank": 4, "alpha": 8.0}


def plain_logprobs(model: Any, batch: Batch, i: int) -> torch.Tensor:
    """[response] the oracle: one plain forward of transition i alone."""
    ids = torch.from_numpy(batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))[None]
    logits = model(input_ids=ids).logits[0]
    logprobs = torch.log_softmax(
        logits.to(torch.promote_types(logits.dtype, torch.float32)) / float(batch.temperature_N[i]), -1
    )
    start = int(batch.prompt_lengths_N[i])
    return logprobs[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]


def make_batch(
    loaded: LoadedModel | None, *, groups: int = 2, members: int = 3, seed: int = 0, noise: float = 0.0
) -> Batch:
    """Ragged random transitions, 1 to 3 turns each; behaviour as the model computes it, plus noise."""
    rng = np.random.default_rng(seed)
    prompts, responses, masks, groups_N, rollouts, turns, values = [], [], [], [], [], [], []
    for rollout in range(groups * members):
        value = float(rng.choice([0.0, 1.0, 0.3]))
        for turn in range(1 + rollout % 3):
            prompts.append(rng.integers(3, 300, int(rng.integers(1, 40))))
            responses.append(rng.integers(3, 300, int(rng.integers(1, 12))))
            mask = rng.random(len(responses[-1])) < 0.8
            mask[0] = True
            masks.append(mask)
            groups_N.append(rollout // members)
            rollouts.append(rollout)
            turns.append(turn)
            values.append(value)
    count = len(prompts)
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    batch = Batch(
        tokens_T=np.concatenate([t for pair in zip(prompts, responses, strict=True) for t in pair]).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lengths_N=np.array([len(p) for p in prompts], dtype=np.int64),
        response_offsets=np.concatenate([[0], np.cumsum([len(r) for r in responses])]).astype(np.int64),
        behaviour_logprobs_R=np.full(sum(len(r) for r in responses), -1.0, dtype=np.float32),
        mask_R=np.concatenate(masks),
        temperature_N=rng.choice([0.7, 1.0, 1.3], count).astype(np.float32),
        values_N=np.array(values),
        kind=CreditKind.RETURN,
        group_N=np.array(groups_N, dtype=np.int64),
        rollout_N=np.array(rollouts, dtype=np.int64),
        turn_N=np.array(turns, dtype=np.int64),
        version_N=np.zeros(count, dtype=np.int64),
        scores_N=np.array(values),
        keys=tuple(TransitionKey(f"r{r}", 0, f"c{r}-{t}", 0) for r, t in zip(rollouts, turns, strict=True)),
    )
    if loaded is None:
        return batch
    with torch.no_grad():
        behaviour = np.concatenate([plain_logprobs(loaded.model, batch, i).numpy() for i in range(count)])
    behaviour = behaviour + noise * rng.standard_normal(len(behaviour))
    return replace(batch, behaviour_logprobs_R=behaviour.astype(np.float32))


def reordered(batch: Batch, order: NDArray[np.int64]) -> Batch:
    from agl_core.learning.batch import subset

    return subset(batch, order)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """A copy of every weight."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


RATE = OptimizerSection(learning_rate=1e-2)


def trainer_of(loaded: LoadedModel, settings: OptimizerSection = RATE, **more: Any) -> PolicyTrainer:
    return PolicyTrainer(loaded, settings, **({"tokens_per_micro_batch": 100} | more))


def grpo(**options: Any) -> Grpo:
    return Grpo(GrpoOptions(**({"beta": 0.0} | options)))
