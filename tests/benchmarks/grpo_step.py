"""What a step of GRPO takes, against TRL's: sampling 16 · 8 replies of one turn, scoring them, and one update.

Both begin with the same model of 0.9M random weights and the same prompts, and reward the replies alike: prompts of 60
tokens, replies of 32. It has no agent and no server, whose work TRL does not do: this is what the engine takes. Times
are CPU seconds of one thread, those of the best of five steps. It runs where both are installed, after `make oracles`:

    .venv-oracles/bin/python tests/benchmarks/grpo_step.py
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from sampling_speed import EACH, PROMPT, PROMPTS, RESPONSE, Loaded
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from update_layouts import MODELS, batch_of, make_model

from agl_algorithms.grpo import Grpo
from agl_algorithms.options import GrpoOptions
from agl_core.config.policies import OptimizerSection
from agl_core.types import Batch
from agl_torch.sampling.sampler import Sampler
from agl_torch.sampling.types import Request, Response
from agl_torch.training.trainer import PolicyTrainer

RATE = 1e-5
TOKENS = 16_384
STEPS = 5


@dataclass(frozen=True)
class Trained(Loaded):
    """What a trainer also wants to know of the model."""

    tokenizer: Any = None
    dtype: torch.dtype = torch.float32
    has_adapter: bool = False
    size: int = 0
    vocabulary: int = 0


def reward(ids: Any) -> float:
    """Different for each reply of a group, so that all are trained on."""
    return float(np.mean(ids))


def ours(model: Any, prompts: list[Any]) -> list[float]:
    """The engine's sampler and trainer, as its one thread uses them."""
    size, vocabulary = sum(each.numel() for each in model.parameters()), model.config.vocab_size
    loaded: Any = Trained(model.eval(), torch.device("cpu"), size=size, vocabulary=vocabulary)
    trainer = PolicyTrainer(loaded, OptimizerSection(learning_rate=RATE), tokens_per_micro_batch=TOKENS)
    sampler, grpo, seconds = Sampler(loaded), Grpo(GrpoOptions(beta=0.0)), list[float]()
    for number in range(STEPS):
        began = time.process_time()
        for group, prompt in enumerate(prompts):
            sampler.submit(Request(str(group), prompt, max_tokens=RESPONSE, n=EACH, seed=number))
        replies: dict[int, tuple[Response, ...]] = {}
        while not sampler.idle:
            replies |= {int(each.request.id): each.responses for each in sampler.step()}
        result = trainer.update(sampled_batch(prompts, [replies[group] for group in range(PROMPTS)]), grpo)
        sampler.new_version(trainer.version)
        seconds.append(time.process_time() - began)
        if result.metrics["transitions_trained"] != PROMPTS * EACH:
            raise RuntimeError(f"{result.metrics['transitions_trained']:g} replies were trained on, not all")
    return seconds


def sampled_batch(prompts: list[Any], groups: list[tuple[Response, ...]]) -> Batch:
    replies = [reply for group in groups for reply in group]
    numbers, rewards = np.arange(len(replies)), np.array([reward(reply.ids) for reply in replies])
    return replace(
        batch_of([prompt for prompt in prompts for _ in range(EACH)], [reply.ids for reply in replies]),
        step=1,
        behaviour_logprobs_R=np.concatenate([reply.logprobs for reply in replies]).astype(np.float32),
        values_N=rewards,
        scores_N=rewards,
        group_N=numbers // EACH,
        rollout_N=numbers,
    )


class Clock(TrainerCallback):
    """CPU seconds of each step of transformers' trainer."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self._began)


def theirs(model: Any, prompts: list[Any]) -> list[float]:
    """TRL's trainer with transformers' `generate`, which ends no reply before its last token."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(model.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", padding_side="left")
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, report_to="none", save_strategy="no", logging_strategy="no", disable_tqdm=True,
            use_cpu=True, bf16=False, gradient_checkpointing=False, max_steps=STEPS, learning_rate=RATE, beta=0.0,
            per_device_train_batch_size=PROMPTS * EACH, num_generations=EACH, max_completion_length=RESPONSE,
            generation_kwargs={"min_new_tokens": RESPONSE},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            train_dataset=Dataset.from_list([{"prompt": " ".join(f"w{token}" for token in ids)} for ids in prompts]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    return clock.seconds


def main() -> None:
    torch.set_num_threads(1)
    shape = MODELS["0.9M"]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, shape["vocab_size"], PROMPT).astype(np.int32) for _ in range(PROMPTS)]
    plain = make_model(**shape)
    plain.set_attn_implementation("sdpa")
    trl, agl = min(theirs(plain, prompts)), min(ours(make_model(**shape), prompts))
    print("| CPU s, TRL | CPU s, agl | ratio |")
    print("|---|---|---|")
    print(f"| {trl:.2f} | {agl:.2f} | {agl / trl:.2f} |")


if __name__ == "__main__":
    main()
