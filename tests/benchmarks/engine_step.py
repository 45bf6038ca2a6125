"""How long the torch engine takes for a step of GRPO: it samples 16 · 8 replies, scores them, and makes one update.

    python tests/benchmarks/engine_step.py

The prompts have 60 tokens, the replies 32; once they are free, and once they have to be JSON of a schema. Times are CPU
seconds, the best of five steps, so that other programs disturb them little.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tables import table
from transformers import LlamaConfig, LlamaForCausalLM

from agl_algorithms.grpo import Grpo
from agl_algorithms.plugin import GrpoOptions
from agl_chat.backends import Request
from agl_core.config.sections import OptimizerSection
from agl_core.learning.transitions import grammar_of
from agl_core.testing.engines import Row, batch_of
from agl_torch import attention
from agl_torch.batching import tokens_per_pass
from agl_torch.loading import LoadedModel
from agl_torch.sampler import Sampler
from agl_torch.trainer import PolicyTrainer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tiny_tokenizers import make_tokenizer

STEPS, PROMPTS, GROUP, PROMPT, RESPONSE = 5, 16, 8, 60, 32
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
    "required": ["name"],
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}
"""No reply is complete before its last token."""


def make_model() -> LoadedModel:
    """0.9M random weights, which never end a response."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=True, attn_implementation="sdpa",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    attention.use(model)
    tokenizer = make_tokenizer("llama", "own")
    return LoadedModel(model, tokenizer, torch.device("cpu"), torch.float32, frozenset(), context_length=256)


def measure(schema: object) -> dict[str, float]:
    """CPU seconds of sampling and update; replies are JSON of the schema, if there is one."""
    grammar = grammar_of({"guided_json": schema})
    model = make_model()
    if grammar is not None:  # It allows the end token only after many more tokens.
        model = replace(model, eos_ids=frozenset({model.tokenizer.convert_tokens_to_ids("<|eot_id|>")}))
    tokens = tokens_per_pass(model.model, model.device)
    trainer = PolicyTrainer(model, OptimizerSection(learning_rate=1e-5), tokens_per_micro_batch=tokens)
    sampler, grpo = Sampler(model), Grpo(GrpoOptions(beta=0.0))
    prompts = np.random.default_rng(0).integers(2, model.vocabulary, (PROMPTS, PROMPT)).astype(np.int32)
    best = {"sampling": np.inf, "update": np.inf}
    for step in range(1, STEPS + 1):
        started, rows = time.process_time(), dict[int, list[Row]]()
        for number, prompt in enumerate(prompts):
            sampler.submit(Request(str(number), prompt, max_tokens=RESPONSE, n=GROUP, seed=step, grammar=grammar))
        while not sampler.idle:
            for generated in sampler.step():
                number = int(generated.request.id)
                # Rewards that differ, so that every reply is trained on.
                rows[number] = [
                    Row(prompts[number], reply.ids, reply.logprobs, float(np.mean(reply.ids)))
                    for reply in generated.responses
                ]
        sampled = time.process_time()
        batch = batch_of([row for number in range(PROMPTS) for row in rows[number]])
        batch.grammar_N[:] = grammar
        result = trainer.update(replace(batch, step=step, group_N=np.arange(len(batch)) // GROUP), grpo)
        sampler.new_version(result.version)
        if result.metrics["transitions_trained"] != PROMPTS * GROUP:
            raise RuntimeError(f"{result.metrics['transitions_trained']:g} replies were trained on, not all")
        best["sampling"] = min(best["sampling"], sampled - started)
        best["update"] = min(best["update"], time.process_time() - sampled)
    return best


def main() -> None:
    torch.set_num_threads(1)
    free, held = measure(None), measure(SCHEMA)
    tokens = PROMPTS * GROUP * RESPONSE
    rows = (
        f"{part} | {free[part]:.2f} | {held[part]:.2f} | {tokens / free[part]:,.0f} | {tokens / held[part]:,.0f}"
        for part in free
    )
    print(table("part | CPU s | of JSON | tokens per CPU s | of JSON", rows))


if __name__ == "__main__":
    main()
