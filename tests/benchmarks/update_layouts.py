"""What sharing prefixes saves in an update: forward and backward passes over the same transitions in two layouts.

*rows*: each rollout is one causal row, which is what one concatenated sequence costs. *trees*: rollouts of a group are
one tree wherever that is expected to pay. Both give the same loss and gradient, to rounding. Times are CPU seconds of
one thread, the better of some alternating rounds, so that other programs disturb the ratio little.

    python tests/benchmarks/update_layouts.py [--rounds N] [--large]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agl_core.types import Batch, CreditKind, TransitionKey
from agl_torch.models import attention
from agl_torch.training.batching import Limits, micro_batches, score

Measured = TypeVar("Measured", float, tuple[float, int])

SHAPES = {
    "one turn, prompt 60, response 16": (60, 16, 0, 1),
    "six turns, prompt 200, response 40, observation 60": (200, 40, 60, 6),
    "six turns, prompt 1000, response 40, observation 60": (1000, 40, 60, 6),
}
MODELS = {
    "0.9M": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "heads": 4},
    "135M": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "heads": 9},
}


def make_model(vocab_size: int, hidden_size: int, heads: int, **shape: int) -> Any:
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3), max_position_embeddings=4096, tie_word_embeddings=True,
        attn_implementation="sdpa", **shape,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    attention.use(model)
    return model


def make_batch(groups: int, vocabulary: int, prompt: int, response: int, observation: int, turns: int) -> Batch:
    """Groups of eight rollouts of one prompt; each turn continues the one before."""
    rng = np.random.default_rng(0)
    prompts: list[Any] = []
    replies: list[Any] = []
    for _ in range(groups):
        task = rng.integers(0, vocabulary, prompt)
        for _ in range(8):
            conversation = task
            for _ in range(turns):
                prompts.append(conversation)
                replies.append(rng.integers(0, vocabulary, response))
                conversation = np.concatenate([conversation, replies[-1], rng.integers(0, vocabulary, observation)])
    return batch_of(prompts, replies)


def batch_of(prompts: Sequence[Any], replies: Sequence[Any]) -> Batch:
    """All of one group, with nothing but their tokens; replies are equally long."""
    count, response = len(prompts), len(replies[0])
    tokens = [np.concatenate(both) for both in zip(prompts, replies, strict=True)]
    zeros = np.zeros(count, np.int64)
    return Batch(
        step=0,
        kind=CreditKind.RETURN,
        tokens_T=np.concatenate(tokens).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum([len(each) for each in tokens])]).astype(np.int64),
        prompt_lengths_N=np.array([len(each) for each in prompts], np.int64),
        response_offsets=np.arange(count + 1, dtype=np.int64) * response,
        behaviour_logprobs_R=np.zeros(count * response, np.float32),
        mask_R=np.ones(count * response, np.bool_),
        temperature_N=np.ones(count, np.float32),
        values_N=np.zeros(count),
        group_N=zeros,
        rollout_N=zeros,
        turn_N=zeros,
        version_N=zeros,
        scores_N=np.zeros(count),
        keys=tuple(TransitionKey(f"r{i}", 0, "c", 0) for i in range(count)),
    )


def measure(model: Any, batch: Batch, limits: Limits) -> tuple[float, int]:
    """CPU seconds of a pass forward and backward, and the tokens that were computed."""
    start, computed = time.process_time(), 0
    for micro in micro_batches(batch, np.arange(len(batch)), limits, torch.device("cpu")):
        score(model, micro).logprobs_R.sum().backward()
        computed += micro.computed
    model.zero_grad()
    return time.process_time() - start, computed


def asked(description: str | None, rounds: int) -> tuple[int, list[tuple[str, dict[str, int]]]]:
    """The rounds and the models that the command line asks for; torch gets one thread."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--large", action="store_true", help="also a model of 135M parameters (4 GiB, minutes)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    return options.rounds, [(name, shape) for name, shape in MODELS.items() if options.large or name != "135M"]


def best_of(rounds: int, ways: Mapping[str, Callable[[], Measured]]) -> dict[str, Measured]:
    """The least that each way took, in alternating rounds."""
    measured = [{way: measure() for way, measure in ways.items()} for _ in range(rounds)]
    return {way: min(each[way] for each in measured) for way in ways}


def main() -> None:
    rounds, models = asked(__doc__, rounds=3)
    print("| model | transitions of a group | tokens, rows | tokens, trees | CPU s, rows | CPU s, trees | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, shape in models:
        model = make_model(**shape)
        for described, (prompt, response, observation, turns) in SHAPES.items():
            groups = (16 if turns == 1 else 4) if name != "135M" else 1
            batch = make_batch(groups, shape["vocab_size"], prompt, response, observation, turns)
            sharing = Limits.of(model, 16_384 if name != "135M" else 4096, model.config.max_position_embeddings)
            layouts = {"rows": replace(sharing, hidden_size=None), "trees": sharing}
            best = best_of(rounds, {each: partial(measure, model, batch, limits) for each, limits in layouts.items()})
            (rows, row_tokens), (trees, tree_tokens) = best["rows"], best["trees"]
            cells = name, described, row_tokens, tree_tokens, f"{rows:.2f}", f"{trees:.2f}", f"{trees / rows:.2f}"
            print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()
