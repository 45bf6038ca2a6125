"""Attention of the models that are sampled and trained here: transformers' own, and two ways that it lacks.

- Over cached keys, query heads of a group share keys and values without a copy for each: transformers repeats them
  where there is a mask, and over a long cache that copy costs more than the attention.
- Along the branches of a prefix tree, each branch sees the tokens on its own way from the root and nothing else. No
  mask of the whole tree is made, and what other branches hide is not computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """Consecutive tokens of a prefix tree, which see the tokens of `seen`, and themselves causally."""

    start: int
    end: int
    seen: tuple[tuple[int, int], ...]
    """Runs [start, end) of earlier tokens, from the root on."""

    def moved(self, offset: int) -> Branch:
        """The same branch of a tree whose first token is at `offset`."""
        seen = tuple((start + offset, end + offset) for start, end in self.seen)
        return Branch(self.start + offset, self.end + offset, seen)


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How the attention of one row follows its branches.

    Keys are cut where any branch starts, ends or leaves another. Cutting a tensor once, instead of a slice for each
    branch, keeps the backward pass from making a gradient of the whole row for each.
    """

    queries: list[int]
    """Tokens of each branch."""
    keys: list[int]
    """Tokens of each piece."""
    seen: list[list[int]]
    """The pieces that each branch sees, itself included."""
    mask: Callable[[int, int, int], Tensor]
    """[1, 1, group · new, seen + new] additive, for the query heads of a group; made once for all layers."""


def use(model: Any) -> None:
    """Let a model attend this way. One that was loaded with another attention than 'sdpa' keeps its own."""
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # torch's own attention caps no scores, and says nothing.
    elif model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation(NAME)


def follows_branches(model: Any) -> bool:
    """True if the model takes the inputs that `branch_inputs` makes."""
    return bool(model.config._attn_implementation == NAME)


def branch_inputs(branches: Sequence[Branch], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A model's arguments for one row of tokens that these branches cover in order."""
    runs = [(*branch.seen, (branch.start, branch.end)) for branch in branches]
    cuts = sorted({bound for path in runs for run in path for bound in run})
    piece = {bound: number for number, bound in enumerate(cuts)}
    pieces = _Pieces(
        queries=[branch.end - branch.start for branch in branches],
        keys=[end - start for start, end in pairwise(cuts)],
        seen=[[number for start, end in path for number in range(piece[start], piece[end])] for path in runs],
        mask=functools.cache(functools.partial(_mask, device, dtype)),
    )
    # Any mask of four dimensions keeps the model from making its own.
    return {"branches": pieces, "attention_mask": torch.zeros(1, 1, 1, 1, device=device)}


def _mask(device: torch.device, dtype: torch.dtype, group: int, new: int, seen: int) -> Tensor:
    hidden = torch.full((new, seen + new), torch.finfo(dtype).min, dtype=dtype, device=device)
    return hidden.triu_(seen + 1).repeat(group, 1)[None, None]


def _attention(
    module: torch.nn.Module,
    query_BHQD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    branches: _Pieces | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if branches is not None:
        output = _along_branches(query_BHQD, key_BKTD, value_BKTD, branches, scaling)
    elif attention_mask is not None:
        group = 1 if query_BHQD.shape[2] == 1 else query_BHQD.shape[1] // key_BKTD.shape[1]  # One query: it broadcasts.
        output = _grouped(query_BHQD, key_BKTD, value_BKTD, attention_mask.repeat(1, 1, group, 1), scaling)
    else:
        attended, _ = sdpa_attention_forward(module, query_BHQD, key_BKTD, value_BKTD, None, scaling=scaling, **kwargs)
        return attended, None
    return output.transpose(1, 2).contiguous(), None


def _along_branches(query: Tensor, key: Tensor, value: Tensor, branches: _Pieces, scaling: float | None) -> Tensor:
    keys, values = torch.split(key, branches.keys, 2), torch.split(value, branches.keys, 2)
    group, outputs = query.shape[1] // key.shape[1], []
    for new, seen in zip(torch.split(query, branches.queries, 2), branches.seen, strict=True):
        key, value = (torch.cat([pieces[number] for number in seen], 2) for pieces in (keys, values))
        if key.shape[2] == new.shape[2]:
            output = scaled_dot_product_attention(new, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            mask = branches.mask(group, new.shape[2], key.shape[2] - new.shape[2])
            output = _grouped(new, key, value, mask, scaling)
        outputs.append(output)
    return torch.cat(outputs, 2)


def _grouped(query_BHQD: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """The query heads that share a key head stand side by side in the query axis, as in `mask` [B, 1, group · Q, T]."""
    batch, heads, queries, size = query_BHQD.shape
    group = heads // key.shape[1]
    output: Tensor = scaled_dot_product_attention(
        query_BHQD.reshape(batch, key.shape[1], group * queries, size), key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(batch, heads, queries, -1)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
