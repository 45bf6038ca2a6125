"""Find out by one forward pass what a model's layers cache, and refuse what the slot cache cannot hold."""

from __future__ import annotations

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from agl_core.errors import EngineError
from agl_torch.models import attention
from agl_torch.sampling.cache import LayerShape
from agl_torch.sampling.types import SampledModel


@torch.inference_mode()
def cache_layers(loaded: SampledModel) -> tuple[list[LayerShape], torch.dtype]:
    """What each layer caches per token, and in which type.

    Raises EngineError for a model whose attention the sampler cannot run: recurrent layers, a sliding window
    shorter than the context, an attention implementation that takes no mask of its own.
    """
    model, config = loaded.model, loaded.model.config
    if config._attn_implementation not in (attention.NAME, "sdpa", "eager"):
        raise EngineError(
            f"{type(model).__name__} was loaded with attn_implementation={config._attn_implementation!r}; the torch "
            "engine's sampler needs 'sdpa' (or 'eager')."
        )
    cache = DynamicCache(config=config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.device), past_key_values=cache, use_cache=True)
    shapes = []
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise EngineError(
                f"Layer {number} of {type(model).__name__} keeps a {type(layer).__name__}; the torch engine can only "
                "sample from models whose every layer is full attention."
            )
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        if window is not None and window < loaded.context_length:
            raise EngineError(
                f"Layer {number} of {type(model).__name__} sees a sliding window of {window} tokens and the context "
                f"is {loaded.context_length}: set context_length to at most {window}."
            )
        shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        dtype = layer.keys.dtype
    if not shapes:
        raise EngineError(f"{type(model).__name__} cached nothing in a forward pass: it is no causal language model.")
    return shapes, dtype
