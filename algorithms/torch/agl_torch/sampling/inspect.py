"""Find out what a model's layers cache, refuse what the slot cache cannot hold, and try the rest out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from agl_core.errors import EngineError
from agl_torch.models import attention
from agl_torch.sampling.cache import LayerShape, SlotCache, SlotView
from agl_torch.sampling.types import SampledModel

_TOLERANCES = {torch.float32: 1e-2, torch.float64: 1e-2}
_TOLERANCE = 0.5
"""How far the log-probability of a token may be from that of a plain forward pass, by type; with fewer digits than
float32's it depends much on what shares a pass. Wrong attention differs by more."""


@torch.inference_mode()
def cache_layers(loaded: SampledModel) -> tuple[list[LayerShape], torch.dtype]:
    """What each layer caches per token, and in which type.

    Raises EngineError for a model that the sampler cannot run: recurrent layers, a sliding window shorter than the
    context, an attention implementation that takes no mask of its own, an attention that needs more than positions and
    a mask.
    """
    model, config = loaded.model, loaded.model.config
    name = type(model).__name__
    if config._attn_implementation not in (attention.NAME, "sdpa", "eager"):
        raise EngineError(
            f"{name} was loaded with attn_implementation={config._attn_implementation!r}; the torch "
            "engine's sampler needs 'sdpa' (or 'eager')."
        )
    if problem := attention.hides_tokens(config, loaded.context_length):
        raise EngineError(f"{name} cannot be sampled from by the torch engine: {problem}.")
    cache = DynamicCache(config=config)
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.device), past_key_values=cache, use_cache=True)
    shapes = []
    for number, layer in enumerate(cache.layers):
        if not isinstance(layer, DynamicLayer) or layer.keys is None or layer.values is None:
            raise EngineError(f"Layer {number} of {name} cached nothing: the torch engine cannot sample from it.")
        shapes.append(LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]))
        dtype = layer.keys.dtype
    if not shapes:
        raise EngineError(f"{name} cached nothing in a forward pass: it is no causal language model.")
    _try_out(loaded, shapes, dtype)
    return shapes, dtype


def next_logits(model: object, view: SlotView, dtype: torch.dtype) -> Tensor:
    """[B, vocabulary] for the token after the last one of each row."""
    logits: Tensor = model(  # type: ignore[operator]
        input_ids=view.inputs_BQ,
        attention_mask=view.mask(dtype),
        position_ids=view.positions_BQ,
        past_key_values=view,
        use_cache=True,
        logits_to_keep=1,
    ).logits
    return logits[:, -1]


def _try_out(loaded: SampledModel, shapes: list[LayerShape], dtype: torch.dtype) -> None:
    """Compute rows of two lengths in the slot cache: a prompt, a token, and some more. EngineError if that fails, or is
    not what the model says about each row alone."""
    model, device = loaded.model, loaded.device
    cache = SlotCache(shapes, dtype=dtype, device=device, max_bytes=1 << 30, max_slots=2, capacity=8)
    cache.tokens[:] = (
        np.arange(cache.tokens.size).reshape(cache.tokens.shape) % model.config.get_text_config().vocab_size
    )
    slots, ends = np.arange(2), np.zeros(2, np.int64)
    for counts in np.array([[4, 2], [1, 1], [2, 3]]):
        try:
            found_BV = next_logits(model, cache.view(slots, ends, counts), dtype).float().log_softmax(-1)
        except Exception as error:
            raise EngineError(
                f"{type(model).__name__} cannot be sampled from by the torch engine: it does not run with the "
                f"sampler's cache and mask ({type(error).__name__}: {error})."
            ) from error
        ends += counts
        for slot, end in enumerate(ends):
            ids = torch.from_numpy(cache.tokens[slot, :end].astype(np.int64))[None].to(device)
            expected_V = model(input_ids=ids, use_cache=False).logits[0, -1].float().log_softmax(-1)
            likeliest = expected_V.argmax()
            gap = float(abs(found_BV[slot, likeliest] - expected_V[likeliest]))
            if not gap <= _TOLERANCES.get(dtype, _TOLERANCE):
                raise EngineError(
                    f"{type(model).__name__} cannot be sampled from by the torch engine: with the sampler's cache and "
                    f"mask, a log-probability is {gap:.2g} from that of the model's own forward pass."
                )
