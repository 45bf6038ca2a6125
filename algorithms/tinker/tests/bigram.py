"""A Tinker service of one model, whose logits depend on the token before alone; gradients are torch's own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tinker
import torch

VOCABULARY = 24


class Now:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self, timeout: float | None = None) -> Any:
        return self._value


class Bigrams:
    """A training client. The gradient of a step is divided as the settings say."""

    def __init__(self, *, by_targets: bool = False, by_rows: bool = False) -> None:
        generator = torch.Generator().manual_seed(3)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self._by_targets, self._by_rows = by_targets, by_rows
        self._adam = torch.optim.AdamW([self.logits])
        self._rows = 0
        self._saved: dict[str, Any] = {}

    def logprobs(self, datum: tinker.Datum) -> torch.Tensor:
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
        before = torch.tensor(datum.model_input.to_ints())
        return torch.log_softmax(self.logits[before], dim=-1).gather(1, targets[:, None])[:, 0]

    def forward(self, data: Sequence[tinker.Datum], loss_fn: str) -> Now:
        assert loss_fn == "cross_entropy"
        outputs = [{"logprobs": SimpleNamespace(data=self.logprobs(datum).tolist())} for datum in data]
        return Now(SimpleNamespace(loss_fn_outputs=outputs))

    def forward_backward(self, data: Sequence[tinker.Datum], loss_fn: str) -> Now:
        assert loss_fn == "importance_sampling"
        for datum in data:
            given = {name: torch.tensor(value.data) for name, value in datum.loss_fn_inputs.items()}
            ratio = (self.logprobs(datum) - given["logprobs"]).exp()
            loss = -(ratio * given["advantages"]).sum()
            (loss / len(given["advantages"]) if self._by_targets else loss).backward()
        self._rows += len(data)
        return Now(None)

    def optim_step(self, adam: tinker.AdamParams) -> Now:
        assert self.logits.grad is not None
        if self._by_rows:
            self.logits.grad /= self._rows
        if adam.grad_clip_norm:
            torch.nn.utils.clip_grad_norm_([self.logits], adam.grad_clip_norm)
        group = self._adam.param_groups[0]
        group |= {"lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps}
        group["weight_decay"] = adam.weight_decay
        self._adam.step()
        self._adam.zero_grad()
        self._rows = 0
        return Now(SimpleNamespace(metrics=None))

    def save_state(self, name: str) -> Now:
        self._saved[name] = (self.logits.detach().clone(), copy.deepcopy(self._adam.state_dict()))
        return Now(SimpleNamespace(path=name))

    def load_state_with_optimizer(self, path: str) -> Now:
        logits, adam = self._saved[path]
        with torch.no_grad():
            self.logits.copy_(logits)
        self._adam.load_state_dict(copy.deepcopy(adam))
        return Now(None)
