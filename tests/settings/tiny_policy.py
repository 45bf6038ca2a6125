"""A policy of two layers with random weights, and batches to train it on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from agl_core.types import Batch, CreditKind, TransitionKey

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


def make_batch(seed: int, *, groups: int = 3, members: int = 3) -> Batch:
    """Ragged random transitions, one to three turns each; in the last group all values are equal."""
    rng = np.random.default_rng(seed)
    rows = [(i // members, i, turn) for i in range(groups * members) for turn in range(1 + i % 3)]
    prompts, responses = rng.integers(2, 30, len(rows)), rng.integers(1, 9, len(rows))
    scores = np.array([0.5 if i // members == groups - 1 else float(i % 2) for i in range(groups * members)])
    group_N, rollout_N, turn_N = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    total = int(responses.sum())
    return Batch(
        tokens_T=rng.integers(1, VOCABULARY, int((prompts + responses).sum())).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(prompts + responses)]),
        prompt_lengths_N=prompts,
        response_offsets=np.concatenate([[0], np.cumsum(responses)]),
        behaviour_logprobs_R=rng.normal(-4.0, 0.5, total).astype(np.float32),
        mask_R=np.ones(total, np.bool_),
        temperature_N=np.ones(len(rows), np.float32),
        values_N=scores[rollout_N],
        kind=CreditKind.RETURN,
        group_N=group_N,
        rollout_N=rollout_N,
        turn_N=2 * turn_N,  # Between two trained calls there is one that is not.
        version_N=np.zeros(len(rows), np.int64),
        scores_N=scores[rollout_N],
        keys=tuple(TransitionKey(f"r{r}", 0, f"c{r}-{t}", 0) for _, r, t in rows),
    )
