"""TRL's side of each comparison: its own trainer from rewards to the gradient. Runs in the oracles' environment only.

The trainer is a real one, on a tiny checkpoint made here. What an agent and a model would bring is scripted: responses
by `rollout_func`, rewards by a reward function, log-probabilities by the one overridden method.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from .oracle_batches import Batch

Outputs = dict[str, Tensor]


class ScriptedTrainer(GRPOTrainer):
    """TRL's trainer, told what the log-probabilities are."""

    batch: Batch
    current_NL: Tensor

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any
    ) -> tuple[Tensor, Tensor, None]:
        if model is self.ref_model:
            logprobs_NL = self.batch.padded("reference")
        else:
            logprobs_NL = self.current_NL if torch.is_grad_enabled() else self.batch.padded("old")
        assert logprobs_NL.shape == input_ids[:, -logits_to_keep:].shape
        return logprobs_NL, torch.zeros_like(logprobs_NL), None


def grpo(batch: Batch, importance: tuple[str, float] | None = None, **settings: Any) -> Outputs:
    """One transition per rollout, groups of one size; `importance` is vLLM's correction: its mode and its maximum."""
    rows = batch.transitions
    members = sum(row.group == 0 for row in rows)
    with tempfile.TemporaryDirectory() as folder, _float64():
        model, tokenizer = _tiny_checkpoint(Path(folder))
        config = GRPOConfig(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=len(rows),
            num_generations=members,
            max_completion_length=max(len(row.mask) for row in rows),
            num_iterations=2,  # so that the log-probabilities before the update are asked for
            **settings,
        )
        trainer = ScriptedTrainer(
            model=str(model),
            args=config,
            reward_funcs=lambda **_: batch.of_each("value"),
            train_dataset=Dataset.from_list([{"prompt": "p"}]),
            processing_class=tokenizer,
            rollout_func=lambda prompts, _: {
                "prompt_ids": [[0]] * len(prompts),
                "completion_ids": [[1] * len(row.mask) for row in rows],
                "logprobs": [list(row.behaviour) for row in rows],
                "env_mask": [[int(counts) for counts in row.mask] for row in rows],
            },
        )
        trainer.batch, trainer.current_NL = batch, batch.padded("current").requires_grad_()
        trainer.current_gradient_accumulation_steps = 1  # set by its training loop
        trainer.model.train()
        if importance is not None:
            # vLLM itself is not asked for anything: its weights count as synchronised, its samples are the script's.
            trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
            trainer.vllm_importance_sampling_mode, trainer.vllm_importance_sampling_clip_max = importance
        inputs = trainer._generate_and_score_completions([{"prompt": "p"}] * len(rows))
        loss = trainer.compute_loss(trainer.model, inputs)
    (gradient_NL,) = torch.autograd.grad(loss, trainer.current_NL)
    return {
        "advantages": batch.spread(inputs["advantages"].double()),
        "loss": loss.detach(),
        "gradient": batch.unpadded(gradient_NL),
    }


def grpo_summed(batch: Batch, **settings: Any) -> Outputs:
    """`dr_grpo`, which is the token mean but for a factor: responses · longest length, by tokens that count."""
    outputs = grpo(batch, loss_type="dr_grpo", **settings)
    rows_NL = batch.padded("mask")
    factor = rows_NL.numel() / rows_NL.sum()
    return outputs | {"loss": factor * outputs["loss"], "gradient": factor * outputs["gradient"]}


def _tiny_checkpoint(folder: Path) -> tuple[Path, PreTrainedTokenizerFast]:
    words = Tokenizer(WordLevel({"p": 0, "r": 1, "<pad>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=3, num_key_value_heads=1, **shape)).save_pretrained(folder / "model")
    return folder / "model", tokenizer


@contextlib.contextmanager
def _float64() -> Iterator[None]:
    """The trainer makes tensors of the log-probabilities of a rollout in the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
