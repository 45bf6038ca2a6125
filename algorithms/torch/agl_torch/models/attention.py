"""The attention of the models that are sampled and trained here: transformers' own, and what it does not have.

- Over cached keys, query heads of a group share keys and values without a copy for each: transformers repeats them
  where there is a mask, and over a long cache that copy costs more than the attention.
- Along the branches of a prefix tree, each branch sees the tokens on its own way from the root and nothing else. No
  mask of the whole tree is made, and what is hidden is not computed. On a CPU a long branch needs no mask at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""What `scaled_dot_product_attention` calls on a CPU."""
_MANY_PAIRS = 8192
"""Pairs of tokens from which on a mask costs more than two attentions, measured on a CPU."""
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


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How the attention of one row follows its branches.

    Keys are cut where any branch starts, ends or leaves another. Cutting a tensor once, instead of a slice for each
    branch, keeps the backward pass from making a gradient of the whole row for each.
    """

    queries: list[int]
    """How many tokens each branch has."""
    keys: list[int]
    """How many tokens each piece has."""
    seen: list[list[int]]
    """For each branch the pieces that it sees, itself included."""
    masks: list[Tensor | None]
    """For each branch, [new, seen + new] additive; None for a root, and for a long branch on a CPU."""


def use(model: Any) -> None:
    """Let a model attend this way. One that was loaded with another attention than 'sdpa' keeps its own."""
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        model.set_attn_implementation(NAME)


def hides_tokens(config: Any, context_length: int) -> str | None:
    """Why a token of a context of this length does not see all tokens before it by attention alone; None if it does."""
    for number, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"layer {number} keeps a {type(layer).__name__}, and only full attention is supported"
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if window is not None and window < context_length:
            return (
                f"layer {number} sees a sliding window of {window} tokens, and the context is {context_length}; set "
                f"engine.torch.max_context to at most {window}"
            )
    return None


def follows_branches(model: Any, context_length: int) -> bool:
    """Whether the model takes the inputs that `branch_inputs` makes, of sequences of at most this length."""
    return bool(model.config._attn_implementation == NAME) and hides_tokens(model.config, context_length) is None


def branch_inputs(branches: Sequence[Branch], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A model's arguments for one row of tokens that these branches cover in order."""
    runs = [(*branch.seen, (branch.start, branch.end)) for branch in branches]
    cuts = sorted({place for each in runs for run in each for place in run})
    piece = {place: number for number, place in enumerate(cuts)}
    pieces = _Pieces(
        queries=[branch.end - branch.start for branch in branches],
        keys=[end - start for start, end in pairwise(cuts)],
        seen=[[number for start, end in each for number in range(piece[start], piece[end])] for each in runs],
        masks=[_mask(branch, device, dtype) if _is_masked(branch, device) else None for branch in branches],
    )
    # Any mask of four dimensions keeps the model from making its own.
    return {"branches": pieces, "attention_mask": torch.zeros(1, 1, 1, 1, device=device)}


def _is_masked(branch: Branch, device: torch.device) -> bool:
    new = branch.end - branch.start
    pairs = new * (new + sum(end - start for start, end in branch.seen))
    return bool(branch.seen) and (device.type != "cpu" or pairs < _MANY_PAIRS)


def _mask(branch: Branch, device: torch.device, dtype: torch.dtype) -> Tensor:
    new, seen = branch.end - branch.start, sum(end - start for start, end in branch.seen)
    hidden = torch.full((new, seen + new), torch.finfo(dtype).min, dtype=dtype, device=device)
    return hidden.triu_(seen + 1)


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
        output = _grouped(query_BHQD, key_BKTD, value_BKTD, attention_mask, scaling)
    else:
        attended, _ = sdpa_attention_forward(module, query_BHQD, key_BKTD, value_BKTD, None, scaling=scaling, **kwargs)
        return attended, None
    return output.transpose(1, 2).contiguous(), None


def _along_branches(query: Tensor, key: Tensor, value: Tensor, branches: _Pieces, scaling: float | None) -> Tensor:
    keys, values = torch.split(key, branches.keys, 2), torch.split(value, branches.keys, 2)
    outputs = []
    for new, seen, mask in zip(torch.split(query, branches.queries, 2), branches.seen, branches.masks, strict=True):
        key, value = (torch.cat([pieces[number] for number in seen], 2) for pieces in (keys, values))
        if mask is not None:
            outputs.append(_grouped(new, key, value, mask[None, None], scaling))
        elif key.shape[2] == new.shape[2]:
            outputs.append(
                scaled_dot_product_attention(new, key, value, is_causal=True, scale=scaling, enable_gqa=True)
            )
        else:
            outputs.append(_seen_and_own(new, key, value, scaling))
    return torch.cat(outputs, 2)


def _seen_and_own(query_BHQD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float | None) -> Tensor:
    """Of the last Q of T tokens, on a CPU: over those before them whole, and over themselves causally."""
    own, group = query_BHQD.shape[2], query_BHQD.shape[1] // key_BKTD.shape[1]
    (seen_keys, own_keys), (seen_values, own_values) = (
        torch.split(each, [each.shape[2] - own, own], 2) for each in (key_BKTD, value_BKTD)
    )
    own_keys, own_values = (each.repeat_interleave(group, 1) for each in (own_keys, own_values))
    output: Tensor = _SeenAndOwn.apply(query_BHQD, seen_keys, seen_values, own_keys, own_values, scaling)  # type: ignore[no-untyped-call]
    return output


class _SeenAndOwn(torch.autograd.Function):
    """Two attentions as one softmax, which costs no mask and computes nothing that is hidden.

    torch's attention on a CPU also gives the logarithm of each softmax's sum: by its share of both sums, each part
    counts in the output. Given the output and the sum of both, the backward pass of each part is that of the whole.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_BHQD: Tensor,
        seen_keys_BKSD: Tensor,
        seen_values_BKSD: Tensor,
        own_keys_BHQD: Tensor,
        own_values_BHQD: Tensor,
        scaling: float | None,
    ) -> Tensor:
        grouped = _side_by_side(query_BHQD, seen_keys_BKSD.shape[1])
        seen, seen_sum = _FORWARD(grouped, seen_keys_BKSD, seen_values_BKSD, scale=scaling)
        own, own_sum = _FORWARD(query_BHQD, own_keys_BHQD, own_values_BHQD, is_causal=True, scale=scaling)
        seen, seen_sum = seen.reshape(own.shape), seen_sum.reshape(own_sum.shape)
        sum_BHQ = torch.logaddexp(seen_sum, own_sum)
        seen_share, own_share = ((each - sum_BHQ).exp().to(own.dtype)[..., None] for each in (seen_sum, own_sum))
        output_BHQD: Tensor = seen * seen_share + own * own_share
        ctx.save_for_backward(
            query_BHQD, seen_keys_BKSD, seen_values_BKSD, own_keys_BHQD, own_values_BHQD, output_BHQD, sum_BHQ
        )
        ctx.scaling = scaling
        return output_BHQD

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, seen_keys, seen_values, own_keys, own_values, output, sum_BHQ = ctx.saved_tensors
        [gradient] = gradients
        of_query, of_own_keys, of_own_values = _BACKWARD(
            gradient, query, own_keys, own_values, output, sum_BHQ, 0.0, True, scale=ctx.scaling
        )
        grouped = [_side_by_side(each, seen_keys.shape[1]) for each in (gradient, query, output, sum_BHQ)]
        gradient, query, output, sum_BHQ = grouped
        more_of_query, of_seen_keys, of_seen_values = _BACKWARD(
            gradient, query, seen_keys, seen_values, output, sum_BHQ, 0.0, False, scale=ctx.scaling
        )
        return (
            of_query + more_of_query.reshape(of_query.shape),
            of_seen_keys,
            of_seen_values,
            of_own_keys,
            of_own_values,
            None,
        )


def _side_by_side(of_queries: Tensor, kv_heads: int) -> Tensor:
    """[B, heads, Q, …] as [B, kv_heads, group * Q, …]: the heads that share a key head."""
    batch, heads, queries = of_queries.shape[:3]
    return of_queries.reshape(batch, kv_heads, heads // kv_heads * queries, *of_queries.shape[3:])


def _grouped(query_BHQD: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """The query heads that share a key head stand side by side in the query axis. `mask` is [B, 1, Q, T]."""
    _, heads, queries, _ = query_BHQD.shape
    output: Tensor = scaled_dot_product_attention(
        _side_by_side(query_BHQD, key.shape[1]),
        key,
        value,
        attn_mask=mask if queries == 1 else mask.repeat(1, 1, heads // key.shape[1], 1),
        scale=scaling,
    )
    return output.reshape(*query_BHQD.shape[:3], -1)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
