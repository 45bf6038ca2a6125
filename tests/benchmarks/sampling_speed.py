"""What sampling takes, against transformers' own `generate`: the same rows, by the engine's sampler and by `generate`.

16 prompts of 60 tokens, 8 responses of 32 tokens each, all at once. Both draw from the whole distribution; the sampler
also gives the log-probability of every token. Times are CPU seconds of one thread, the better of some alternating
rounds, so that other programs disturb the ratio little.

    python tests/benchmarks/sampling_speed.py [--rounds N] [--large]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from update_layouts import asked, best_of, make_model

from agl_torch.sampling.sampler import Sampler
from agl_torch.sampling.types import Request

PROMPTS, EACH, PROMPT, RESPONSE = 16, 8, 60, 32


@dataclass(frozen=True)
class Loaded:
    """A model with random weights that never ends a response."""

    model: Any
    device: torch.device
    eos_ids: frozenset[int] = frozenset()
    context_length: int = 256


def by_sampler(sampler: Sampler, prompts: list[Any]) -> int:
    """Returns how many tokens were sampled."""
    sampler.new_version(sampler.version + 1)  # Nothing is left of the round before.
    for number, prompt in enumerate(prompts):
        sampler.submit(Request(str(number), prompt, max_tokens=RESPONSE, n=EACH))
    tokens = 0
    while not sampler.idle:
        tokens += sum(len(each.ids) for generated in sampler.step() for each in generated.responses)
    return tokens


@torch.inference_mode()
def by_generate(model: Any, prompts: list[Any]) -> int:
    """Returns how many tokens were sampled."""
    rows = torch.from_numpy(np.stack(prompts)).long()
    options = {"do_sample": True, "top_k": 0, "num_return_sequences": EACH, "pad_token_id": 0, "eos_token_id": None}
    out = model.generate(rows, attention_mask=torch.ones_like(rows), max_new_tokens=RESPONSE, **options)
    return int(out[:, PROMPT:].numel())


def measure(sample: Callable[[], int]) -> float:
    """CPU seconds."""
    start = time.process_time()
    if (tokens := sample()) != PROMPTS * EACH * RESPONSE:
        raise RuntimeError(f"{tokens} tokens were sampled, {PROMPTS * EACH * RESPONSE} were to be")
    return time.process_time() - start


def main() -> None:
    rounds, models = asked(__doc__, rounds=5)
    print("| model | CPU s, `generate` | CPU s, sampler | times as fast |")
    print("|---|---|---|---|")
    for name, shape in models:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, shape["vocab_size"], PROMPT).astype(np.int32) for _ in range(PROMPTS)]
        plain, model = make_model(**shape).eval(), make_model(**shape).eval()
        plain.set_attn_implementation("sdpa")
        sampler = Sampler(Loaded(model, torch.device("cpu")))
        ways = {"generate": partial(by_generate, plain, prompts), "sampler": partial(by_sampler, sampler, prompts)}
        best = best_of(rounds, {way: partial(measure, sample) for way, sample in ways.items()})
        ratio = best["generate"] / best["sampler"]
        print(f"| {name} | {best['generate']:.2f} | {best['sampler']:.2f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
