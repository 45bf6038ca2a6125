"""Attention over cached keys without copying them once per query head.

transformers' own sdpa function repeats keys and values for grouped-query attention when there is a mask; over a long
cache that copy costs more than the attention. Here the query heads of a group stand side by side in the query axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

_NAME = "agl_grouped"


def _grouped_attention(
    module: torch.nn.Module,
    query_BHQD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    batch, heads, queries, dim = query_BHQD.shape
    kv_heads = key_BKTD.shape[1]
    group = heads // kv_heads
    output = torch.nn.functional.scaled_dot_product_attention(
        query_BHQD.reshape(batch, kv_heads, group * queries, dim),
        key_BKTD,
        value_BKTD,
        attn_mask=attention_mask if queries == 1 else attention_mask.repeat(1, 1, group, 1),
        scale=scaling,
    )
    return output.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


@contextmanager
def grouped_attention(model: Any) -> Iterator[None]:
    """Within this context a model that was loaded with 'sdpa' attends this way; it needs a 4D additive mask."""
    if model.config._attn_implementation != "sdpa":
        yield
        return
    AttentionInterface.register(_NAME, _grouped_attention)
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = "sdpa"
