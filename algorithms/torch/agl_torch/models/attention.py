"""The attention of the models that are sampled and trained here: transformers' own, and what it does not have.

- Over cached keys, query heads of a group share keys and values without a copy for each: transformers repeats them
  where there is a mask, and over a long cache that copy costs more than the attention.
- Along the branches of a prefix tree, each branch sees the tokens on its own way from the root and nothing else. No
  mask of the whole tree is made, and what is hidden is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "agl"
"""Its name in a model's configuration while the model is in memory; it is not saved."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens of a prefix tree that follow each other. They see the tokens of `seen`, and themselves causally."""

    start: int
    end: int
    seen: tuple[tuple[int, int], ...]
    """Runs [start, end) of earlier tokens, from the root on."""

    def moved(self, offset: int) -> Branch:
        """The same branch of a tree whose first token is at `offset`."""
        seen = tuple((start + offset, end + offset) for start, end in self.seen)
        return Branch(self.start + offset, self.end + offset, seen)


def use(model: Any) -> None:
    """Let a model attend this way. One that was loaded with another attention than 'sdpa' keeps its own."""
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation(NAME)


def follows_branches(model: Any) -> bool:
    """Whether the model can be given `branches`, a sequence of `Branch` that covers its one row of tokens."""
    return bool(model.config._attn_implementation == NAME)


def branch_inputs(branches: Sequence[Branch], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The model's arguments for one row of trees."""
    masks = [_mask(branch, device, dtype) for branch in branches]
    # Any mask of four dimensions keeps the model from making its own.
    return {"branches": tuple(zip(branches, masks, strict=True)), "attention_mask": torch.zeros(1, 1, 1, 1)}


def _mask(branch: Branch, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """[new, seen + new] additive; None for a root, which plain causal attention serves."""
    if not branch.seen:
        return None
    new, seen = branch.end - branch.start, sum(end - start for start, end in branch.seen)
    hidden = torch.ones(new, seen + new, dtype=torch.bool, device=device).triu_(seen + 1)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)


def _attention(
    module: torch.nn.Module,
    query_BHQD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    branches: Sequence[tuple[Branch, Tensor | None]] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if branches:
        outputs = [_branch(query_BHQD, key_BKTD, value_BKTD, branch, mask, scaling) for branch, mask in branches]
        return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None
    if attention_mask is None:
        attended, _ = sdpa_attention_forward(module, query_BHQD, key_BKTD, value_BKTD, None, scaling=scaling, **kwargs)
        return attended, None
    return _grouped(query_BHQD, key_BKTD, value_BKTD, attention_mask, scaling).transpose(1, 2).contiguous(), None


def _branch(
    query: Tensor, key: Tensor, value: Tensor, branch: Branch, mask: Tensor | None, scaling: float | None
) -> Tensor:
    runs = (*branch.seen, (branch.start, branch.end))
    query = query[:, :, branch.start : branch.end]
    key, value = (torch.cat([each[:, :, start:end] for start, end in runs], 2) for each in (key, value))
    if mask is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return _grouped(query, key, value, mask[None, None], scaling)


def _grouped(query_BHQD: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """The query heads that share a key head stand side by side in the query axis. `mask` is [B, 1, Q, T]."""
    batch, heads, queries, dim = query_BHQD.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    output = scaled_dot_product_attention(
        query_BHQD.reshape(batch, kv_heads, group * queries, dim),
        key,
        value,
        attn_mask=mask if queries == 1 else mask.repeat(1, 1, group, 1),
        scale=scaling,
    )
    return output.reshape(batch, heads, queries, -1)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
