"""TRL's side of each comparison: its own trainer from rewards to the gradient. Runs in the oracles' environment only.

The trainer is a real one, on a tiny checkpoint made here. What an agent and a model would bring is scripted: responses
by `rollout_func`, rewards by a reward function, log-probabilities by the one overridden method.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

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


def dpo(batch: Batch, beta: float) -> Outputs:
    """TRL's own loss with the given log-probabilities of pairs; a row is a rollout with all its calls."""
    rollouts: dict[int, list[int]] = {}
    for place, row in enumerate(batch.transitions):
        rollouts.setdefault(row.rollout, []).append(place)
    score = {rollout: batch.transitions[places[0]].value for rollout, places in rollouts.items()}
    groups: dict[int, list[int]] = {}
    for row in batch.transitions:
        groups.setdefault(row.group, []).append(row.rollout)
    pairs: list[tuple[int, int]] = []
    for members in groups.values():
        best, worst = max(members, key=score.__getitem__), min(members, key=score.__getitem__)
        pairs += [(best, worst)] if score[best] > score[worst] else []

    current_R = batch.flat("current").requires_grad_()
    mask_R, reference_R = batch.flat("mask"), batch.flat("reference")
    lengths = [len(row.mask) for row in batch.transitions]

    def rows_of(values_R: Tensor) -> Tensor:
        """[2P, L] the better rollouts', then the worse ones', 0 in the pads."""
        parts = values_R.split(lengths)
        sides = [[torch.cat([parts[i] for i in rollouts[pair[side]]]) for pair in pairs] for side in (0, 1)]
        return torch.nn.utils.rnn.pad_sequence(sides[0] + sides[1], batch_first=True)

    def scripted(values_R: Tensor) -> Any:
        logprobs = rows_of(values_R * mask_R)
        others = {name: torch.zeros_like(logprobs).detach() for name in ("entropy", "mean_logits")}
        return lambda **_: SimpleNamespace(log_probs=logprobs, is_top1=logprobs > 0, aux_loss=None, **others)

    trainer = DPOTrainer.__new__(DPOTrainer)
    gather = {name: lambda value: value for name in ("gather", "gather_for_metrics", "unwrap_model")}
    settings = {
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "ref_model": scripted(reference_R), "args": DPOConfig(use_cpu=True, bf16=False),
        "beta": beta, "loss_types": ["sigmoid"], "loss_weights": [1.0], "f_divergence_type": "reverse_kl",
        "ld_alpha": None, "aux_loss_enabled": False, "precompute_ref_logps": False, "use_weighting": False,
        "accelerator": SimpleNamespace(device="cpu", **gather), "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    vars(trainer).update(settings)
    completion = torch.nn.functional.pad(rows_of(mask_R), (1, 0))
    inputs = {"completion_mask": completion, "input_ids": completion.long(), "attention_mask": completion}
    loss = trainer._compute_loss(scripted(current_R), inputs, False)
    measured = trainer._metrics["train"]
    return {
        "loss": loss.detach(),
        "gradient": torch.autograd.grad(loss, current_R)[0],
        "accuracy": torch.tensor(measured["rewards/accuracies"]).mean().double(),
        "margin": torch.tensor(measured["rewards/margins"], dtype=torch.float64).mean(),
    }


def sft(batch: Batch, threshold: float | None = None) -> Outputs:
    """TRL's own loss with the given log-probabilities: of all rollouts, or of those with at least this return."""
    values: dict[int, list[float]] = {}
    for row in batch.transitions:
        values.setdefault(row.rollout, []).append(row.value)
    mean = {rollout: sum(of_rollout) / len(of_rollout) for rollout, of_rollout in values.items()}
    chosen_N = torch.tensor([threshold is None or mean[row.rollout] >= threshold for row in batch.transitions])
    mask_NL = batch.padded("mask").bool() & chosen_N[:, None]
    current_NL = batch.padded("current").requires_grad_()
    trainer = SFTTrainer.__new__(SFTTrainer)
    accelerator = {"parallelism_config": None, "num_processes": 1, "gather_for_metrics": lambda value: value}
    settings = {
        "model": SimpleNamespace(training=True), "accelerator": SimpleNamespace(**accelerator),
        "args": SFTConfig(use_cpu=True, bf16=False, loss_type="nll"), "aux_loss_enabled": False,
        "compute_loss_func": None, "label_smoother": None, "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0, "_tp_size": 1,
    }  # fmt: skip
    vars(trainer).update(settings)
    outputs = {"label_mask": mask_NL, "is_top1": mask_NL, "entropy": torch.zeros_like(current_NL).detach()}

    def model(**_: Any) -> Any:
        return SimpleNamespace(log_probs=current_NL * mask_NL, **outputs)

    loss = trainer.compute_loss(model, {"attention_mask": mask_NL})
    return {"loss": loss.detach(), "gradient": batch.unpadded(torch.autograd.grad(loss, current_NL)[0])}


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
