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
    """A training client. The gradient of a step is divided as the settings say. It samples too, and is its own state of
    now: one that is not trained is a reference or a teacher."""

    def __init__(self, *, by_targets: bool = False, by_rows: bool = False, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
        self._by_targets, self._by_rows = by_targets, by_rows
        self._adam = torch.optim.AdamW([self.logits])
        self._rows = 0
        self.saved: dict[str, Any] = {}
        self.passes: list[str] = []
        """The passes over rows that were asked for."""
        self.broken = False
        """It computes what is no number."""

    def renewed(self, spec: Any, seed: int) -> Bigrams:
        """A new client, which can load what this one saved."""
        client = Bigrams(by_targets=self._by_targets, by_rows=self._by_rows)
        client.saved = self.saved
        return client

    def logprobs(self, datum: tinker.Datum) -> torch.Tensor:
        targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].data)
        before = torch.tensor(datum.model_input.to_ints())
        return torch.log_softmax(self.logits[before], dim=-1).gather(1, targets[:, None])[:, 0]

    def forward(self, data: Sequence[tinker.Datum], loss_fn: str) -> Now:
        assert loss_fn == "cross_entropy"
        return self._outputs("forward", data)

    def forward_backward(self, data: Sequence[tinker.Datum], loss_fn: str) -> Now:
        for datum in data:
            given = {name: torch.tensor(value.data) for name, value in datum.loss_fn_inputs.items()}
            targets, logprobs = given.pop("target_tokens"), self.logprobs(datum)
            if loss_fn == "importance_sampling":
                loss = -((logprobs - given.pop("logprobs")).exp() * given.pop("advantages")).sum()
                divisor = torch.tensor(float(len(targets)))
            else:
                assert loss_fn == "cross_entropy"
                divisor = given["weights"].sum().clamp(min=1e-9)  # As skyrl-tx.
                loss = -(logprobs * given.pop("weights")).sum()
            assert not given, "a service refuses inputs that a loss does not have"
            (loss / divisor if self._by_targets else loss).backward()
        self._rows += len(data)
        return self._outputs(loss_fn, data)

    def compute_logprobs(self, prompt: tinker.ModelInput) -> Now:
        tokens = torch.tensor(prompt.to_ints())
        logprobs = torch.log_softmax(self.logits[tokens[:-1]], dim=-1).gather(1, tokens[1:, None])[:, 0]
        return Now([None, *logprobs.tolist()])

    def _outputs(self, name: str, data: Sequence[tinker.Datum]) -> Now:
        self.passes.append(name)
        nothing = torch.nan if self.broken else 0.0
        if self.broken and self.logits.grad is not None:
            self.logits.grad += torch.nan
        outputs = [{"logprobs": SimpleNamespace(data=(self.logprobs(datum) + nothing).tolist())} for datum in data]
        return Now(SimpleNamespace(loss_fn_outputs=outputs))

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
        self.saved[name] = (self.logits.detach().clone(), copy.deepcopy(self._adam.state_dict()))
        return Now(SimpleNamespace(path=name))

    def load_state_with_optimizer(self, path: str) -> Now:
        logits, adam = self.saved[path]
        with torch.no_grad():
            self.logits.copy_(logits)
        self._adam.load_state_dict(copy.deepcopy(adam))
        return Now(None)
