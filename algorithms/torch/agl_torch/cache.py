"""The slot cache: keys and values of every row in one preallocated block per layer.

A slot holds one token sequence: its ids (on the host) and its keys and values (on the device). Rows in progress
occupy the first slots, so that a decoding step sees them as a view, without gathering; finished rows stay behind
them until their place is needed, least recently used first. `arrange` alone changes which slot holds what.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LAYER_TYPE_CACHE_MAPPING, DynamicLayer, DynamicSlidingWindowLayer

from agl_core.errors import EngineError
from agl_core.types import Tokens
from agl_torch.loading import LoadedModel


class LayerShape(NamedTuple):
    """The memory of one layer for one token."""

    heads: int
    key_dim: int
    value_dim: int


class Placement(NamedTuple):
    """The content that a slot is to have: the first `length` tokens of what slot `source` holds now."""

    source: int
    length: int


EMPTY = Placement(-1, 0)


def shared_prefixes(rows_SC: NDArray[np.int32], tokens: Tokens) -> NDArray[np.int64]:
    """[S] how many first tokens each row has in common with `tokens`."""
    width = min(len(tokens), rows_SC.shape[1])
    differs = rows_SC[:, :width] != tokens[:width]
    shared: NDArray[np.int64] = np.where(differs.any(1), differs.argmax(1), width)
    return shared


class SlotCache:
    """Slots of equal capacity, as many as `max_bytes` allows and at most `max_slots`."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
        max_slots: int,
        capacity: int,
    ) -> None:
        self.bytes_per_token = sum(s.heads * (s.key_dim + s.value_dim) for s in layers) * dtype.itemsize
        self._layers, self._dtype, self._device = tuple(layers), dtype, device
        self._max_bytes, self._max_slots = max_bytes, max_slots
        self._clock = 0
        self.allocate(capacity)

    def allocate(self, capacity: int) -> None:
        """Forget everything, and hold `capacity` tokens per slot from now on."""
        self.capacity, self.slots = capacity, self.slots_at(capacity)
        self._keys, self._values = [], []  # gives the old memory back before the new is taken
        self._keys = [self._zeros(s.heads, s.key_dim) for s in self._layers]
        self._values = [self._zeros(s.heads, s.value_dim) for s in self._layers]
        self.tokens: NDArray[np.int32] = np.zeros((self.slots, capacity + 1), np.int32)
        """[slots, capacity + 1]; slot s holds the keys and values of tokens[s, :lengths[s]]. A row in progress has its
        last token after these, yet to be fed."""
        self.lengths: NDArray[np.int64] = np.zeros(self.slots, np.int64)
        self._used: NDArray[np.int64] = np.zeros(self.slots, np.int64)

    def _zeros(self, heads: int, dim: int) -> Tensor:
        """A block; not uninitialised memory, because a masked NaN would still spoil a sum.

        On a CPU it takes only the pages that are written, where `torch.zeros` would write them all.
        """
        shape = (self.slots, self.capacity, heads, dim)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        size = math.prod(shape)
        pages = mmap.mmap(-1, max(1, size) * self._dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self._dtype)[:size].view(shape)

    def slots_at(self, capacity: int) -> int:
        """How many slots there would be if each held `capacity` tokens."""
        return min(self._max_slots, self._max_bytes // (capacity * self.bytes_per_token))

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self._keys, *self._values))

    def release(self) -> None:
        """Forget everything and give its memory back, until `allocate`."""
        self._keys, self._values = [], []
        self.lengths[:] = 0

    def touch(self, slot: int) -> None:
        """Note that a slot was of use now."""
        self._clock += 1
        self._used[slot] = self._clock

    def longest_prefix(self, prompt: Tokens) -> tuple[int, int]:
        """(slot, n): the slot that shares the longest prefix with `prompt`, and the prefix's length n."""
        rows = int(np.flatnonzero(self.lengths).max(initial=0)) + 1
        shared = np.minimum(shared_prefixes(self.tokens[:rows, : self.capacity], prompt), self.lengths[:rows])
        slot = int(shared.argmax())
        return slot, int(shared[slot])

    def whole(self, slot: int) -> Placement:
        """All that a slot holds."""
        return Placement(slot, int(self.lengths[slot]))

    def arrange(self, front: Sequence[Placement], slots: int | None = None) -> None:
        """Fill the first slots by `front`, and keep what other slots hold behind it, most recently used first.

        A slot whose whole content stands in `front` has moved there, and is not kept a second time; of another, `front`
        has a copy. Only the first `slots` slots (default: all) are used.
        """
        slots = self.slots if slots is None else slots
        source: NDArray[np.int64] = np.arange(self.slots)
        lengths: NDArray[np.int64] = np.zeros(self.slots, np.int64)
        kept = self.lengths > 0
        for slot, (origin, length) in enumerate(front):
            if length:
                source[slot], lengths[slot] = origin, length
                kept[origin] &= length < self.lengths[origin]
                if kept[origin]:
                    self.touch(origin)
        idle = np.flatnonzero(kept)
        idle = idle[np.argsort(-self._used[idle], kind="stable")][: slots - len(front)]
        staying = {int(slot) for slot in idle if len(front) <= slot < slots}
        free = (slot for slot in range(len(front), slots) if slot not in staying)
        for slot in idle.tolist():
            to = slot if slot in staying else next(free)
            source[to], lengths[to] = slot, self.lengths[slot]
        self._move(source, lengths)

    def _move(self, source: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        used = self._used[source]
        to = np.flatnonzero((source != np.arange(self.slots)) & (lengths > 0))
        self.lengths, self._used = lengths, used
        if len(to) == 0:
            return
        width = int(lengths[to].max())
        self.tokens[to, : width + 1] = self.tokens[source[to], : width + 1]
        to_t = torch.from_numpy(to).to(self._device)
        from_t = torch.from_numpy(source[to]).to(self._device)
        for block in (*self._keys, *self._values):
            block[:, :width].index_copy_(0, to_t, block[:, :width].index_select(0, from_t))

    def resize(self, capacity: int, front: int) -> None:
        """Hold `capacity` tokens per slot; the first `front` slots are kept, and as many others as there is room."""
        slots = self.slots_at(capacity)
        if slots < self.slots:
            self.arrange([*map(self.whole, range(front))], slots)
        keys, values, tokens, lengths, used = self._keys, self._values, self.tokens, self.lengths, self._used
        rows, width = min(slots, self.slots), min(capacity, self.capacity)
        self.capacity, self.slots = capacity, slots
        # One block at a time, so that old and new do not stand in memory together.
        for blocks in (keys, values):
            for layer, old in enumerate(blocks):
                new = self._zeros(*old.shape[2:])
                new[:rows, :width] = old[:rows, :width]
                blocks[layer] = new
                del old
        self.tokens = np.zeros((slots, capacity + 1), np.int32)
        self.tokens[:rows, : width + 1] = tokens[:rows, : width + 1]
        self.lengths, self._used = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self.lengths[:rows], self._used[:rows] = lengths[:rows], used[:rows]


class SlotView(Cache):
    """The `past_key_values` of one forward pass: writes new keys and values into slots, shows each slot's past.

    The pass computes `counts[b]` new tokens of slot `slots[b]` from `starts[b]` on, padded on the left to the largest
    count. By `mask` a query sees every position up to its own.
    """

    def __init__(
        self, cache: SlotCache, slots: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> None:
        super().__init__(layers=[])
        device = cache._device
        self._keys, self._values = cache._keys, cache._values
        width = int(counts.max())
        column_Q = np.arange(width)
        positions_BQ = starts[:, None] + column_Q - (width - counts)[:, None]
        real_BQ = column_Q >= (width - counts)[:, None]
        targets_BQ = slots[:, None] * cache.capacity + positions_BQ
        self._span = int((starts + counts).max())
        self._targets_T = torch.from_numpy(targets_BQ[real_BQ]).to(device)
        self._real_T = None if real_BQ.all() else torch.from_numpy(np.flatnonzero(real_BQ)).to(device)
        contiguous = bool((np.diff(slots) == 1).all())
        self._rows = (
            slice(int(slots[0]), int(slots[0]) + len(slots)) if contiguous else torch.from_numpy(slots).to(device)
        )
        positions = np.where(real_BQ, positions_BQ, 0)
        self.positions_BQ = torch.from_numpy(positions).to(device)
        """[B, Q] int64: the position of each input; 0 for pads."""
        ids_BQ = np.where(real_BQ, cache.tokens[slots[:, None], positions], 0)
        self.inputs_BQ = torch.from_numpy(ids_BQ.astype(np.int64)).to(device)
        """[B, Q] int64: the token ids to compute."""

    def mask(self, dtype: torch.dtype) -> Tensor:
        """[B, 1, Q, span]: 0 where a query may look, the lowest number elsewhere."""
        sees = torch.arange(self._span, device=self.positions_BQ.device) <= self.positions_BQ[..., None]
        return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, torch.finfo(dtype).min)[
            :, None
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store [B, heads, Q, dim] and return [B, heads, span, dim]."""
        return self._store(self._keys[layer_idx], key_states), self._store(self._values[layer_idx], value_states)

    def _store(self, block_SCHD: Tensor, states_BHQD: Tensor) -> Tensor:
        new_THD = states_BHQD.transpose(1, 2).flatten(0, 1)
        if self._real_T is not None:
            new_THD = new_THD.index_select(0, self._real_T)
        block_SCHD.flatten(0, 1).index_copy_(0, self._targets_T, new_THD)
        return block_SCHD[self._rows, : self._span].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._span - self.inputs_BQ.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._span, 0


_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-2, 0.5
"""How far the log-probability of a token may be from that of a plain forward pass; wrong attention differs by more."""
_LONGEST_WINDOW = 2048
"""The check at the start goes beyond windows of fewer tokens; more would take long on a CPU."""


@torch.inference_mode()
def cache_layers(loaded: LoadedModel) -> tuple[list[LayerShape], torch.dtype]:
    """The cache of each layer per token, and its type.

    EngineError for a model whose tokens do not see all earlier ones by attention alone (recurrent layers, a sliding
    window shorter than the context), and for one that needs other inputs than positions and a mask of the sampler's.
    """
    model, text, context = loaded.model, loaded.model.config.get_text_config(), loaded.context_length
    refused = f"{type(model).__name__} cannot be sampled from by the torch engine"
    # Not by `DynamicCache(config)`, which forgets the layers of a configuration that shares none of its keys.
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    for number, kind in enumerate(kinds):
        layer = LAYER_TYPE_CACHE_MAPPING.get(kind, DynamicLayer)
        if layer not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise EngineError(
                f"{refused}: layer {number} keeps a {layer.__name__}, and only full attention is supported."
            )
        if window is not None and window < context and layer is DynamicSlidingWindowLayer:
            raise EngineError(
                f"{refused}: layer {number} sees a sliding window of {window} tokens, and the context is {context}; "
                f"set engine.torch.max_context to at most {window}."
            )
    cache = DynamicCache()
    model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=loaded.device), past_key_values=cache, use_cache=True)
    filled = [
        (layer.keys, layer.values)
        for layer in cache.layers
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    ]
    if not filled or len(filled) < len(cache.layers):
        raise EngineError(f"{refused}: a layer cached nothing in a forward pass.")
    shapes = [LayerShape(keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in filled]
    dtype = filled[0][0].dtype
    _try_out(loaded, shapes, dtype, refused)
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


def _try_out(loaded: LoadedModel, shapes: list[LayerShape], dtype: torch.dtype, refused: str) -> None:
    """Compute rows of two lengths in the slot cache: a prompt, a token, and some more, in one row beyond each short
    window that the configuration names. EngineError if that fails, or is not what the model says about each row alone.
    """
    model, device, text = loaded.model, loaded.device, loaded.model.config.get_text_config()
    named = [
        size for name, size in text.to_dict().items() if ("window" in name or "chunk" in name) and type(size) is int
    ]
    beyond = max((size for size in named if 2 < size < min(loaded.context_length - 5, _LONGEST_WINDOW)), default=2)
    tolerance = _TOLERANCE if dtype.itemsize >= 4 else _LOW_PRECISION_TOLERANCE
    cache = SlotCache(shapes, dtype=dtype, device=device, max_bytes=1 << 40, max_slots=2, capacity=8 + beyond)
    cache.tokens[:] = np.arange(cache.tokens.size).reshape(cache.tokens.shape) % text.vocab_size
    slots, ends = np.arange(2), np.zeros(2, np.int64)
    for counts in np.array([[4, 2], [1, 1], [beyond, 3]]):
        try:
            logprobs_BV = next_logits(model, SlotView(cache, slots, ends, counts), dtype).float().log_softmax(-1)
        except Exception as error:
            raise EngineError(
                f"{refused}: it does not run with the sampler's cache and mask ({type(error).__name__}: {error})."
            ) from error
        ends += counts
        for slot, end in enumerate(ends):
            ids = torch.from_numpy(cache.tokens[slot, :end].astype(np.int64))[None].to(device)
            expected_V = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
            likeliest = expected_V.argmax()
            gap = float(abs(logprobs_BV[slot, likeliest] - expected_V[likeliest]))
            if not gap <= tolerance:
                raise EngineError(
                    f"{refused}: with the sampler's cache and mask, a log-probability is {gap:.2g} from that of the "
                    f"model's own forward pass."
                )
