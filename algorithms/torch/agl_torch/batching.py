"""How transitions are laid out in forward passes, how large these may be, and what a pass yields.

Turns of one rollout continue each other and the rollouts of a group answer the same prompt, so most tokens of a batch
are repeated. A tree holds each once, in depth-first order. A token sees the tokens on the way from the root to
itself, at its own depth as position: exactly what it would see in its transition alone, so loss and gradient are the
same (the layout of Tree Training, arXiv 2511.00413).

A `MicroBatch` is a rectangle of trees that do not branch, of similar length, padded on the right to its own longest,
for which the model's own causal attention is right; or it is one row of trees that branch, where each branch attends
along its own path (`agl_torch.attention`). Each branch costs an operation, so small models do not share short prefixes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from agl_core.errors import EngineError
from agl_core.types import Batch
from agl_torch.attention import Branch, branch_inputs, follows_branches
from agl_torch.grammars import unpack

LOGITS_PER_MICRO_BATCH = 2**28
"""Response tokens × vocabulary of one pass: 1 GiB of float32 logits. Bounds memory with large vocabularies."""
LOGITS_AT_ONCE = 2**24
"""Logits that exist at the same time where that is possible: 64 MiB of float32, in a few copies."""
SMALLEST_SHARE = 0.5
"""A path shorter than this share of the longest goes to another micro-batch: at most half is pads."""
ACTIVATIONS_ON_CPU = 2**29
"""Bytes of one training pass."""
TOKENS_ON_CPU = 1280
"""Tokens of one training pass at most. With more, a small model's activations leave the caches: page faults took an
eighth of the time in an update of 5,000 tokens."""
ACTIVATIONS_ON_GPU = 1 / 8
CACHE = 1 / 10
"""Shares of the device's memory."""
_PROBED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a forward pass."""

    tokens: int
    """Pads included; a transition that is longer goes alone."""
    vocabulary: int
    """Outputs for each response token."""
    hidden_size: int | None
    """Decides when sharing a prefix pays. None: the model's attention cannot follow branches."""

    @property
    def responses(self) -> int:
        """Most response tokens."""
        return max(1, LOGITS_PER_MICRO_BATCH // self.vocabulary)

    @classmethod
    def of(cls, model: Any, tokens: int) -> Limits:
        """For a causal LM that sees all earlier tokens, as the sampler makes sure."""
        vocabulary, hidden_size = model.get_output_embeddings().weight.shape
        return cls(tokens, vocabulary, hidden_size if follows_branches(model) else None)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass over n transitions in B trees of at most L tokens. R counts their response tokens."""

    transitions_n: Tensor
    """[n] int64: which transitions of the batch."""
    tokens_R: Tensor
    """[R] int64: where their response tokens, one transition's after the other's, lie in response-aligned arrays."""
    input_ids: Tensor
    """[B, L] int64, padded on the right."""
    depth_BL: Tensor | None
    """Position ids; None where no tree branches: they are then 0, 1, …"""
    branches: tuple[Branch, ...]
    """Branches of the single row, in order; none if no tree branches."""
    row_R: Tensor
    column_R: Tensor
    """[R] int64: row and column of the hidden state that predicts the response token."""
    targets_R: Tensor
    """[R] int64: the response tokens."""
    temperature_R: Tensor
    tokens: int
    """Prompt and response tokens of all transitions together."""


class TokenScores(NamedTuple):
    """The model's scores of response tokens, under each transition's own temperature."""

    logprobs_R: Tensor
    """[R] at least float32; carries the gradient."""
    entropy_R: Tensor
    """[R] of the distribution over all that is allowed, in nats; carries the gradient if that was asked for."""
    is_top_R: Tensor
    """[R] bool: True where no token is more likely."""


def micro_batches(
    batch: Batch, chosen: NDArray[np.int64], limits: Limits, device: torch.device
) -> Iterator[MicroBatch]:
    """Forward passes that cover each of the `chosen` transitions once, largest trees first."""
    trees = [grow(batch, transitions) for transitions in plan_trees(batch, chosen, limits)]
    trees.sort(key=lambda tree: (tree.is_path, len(tree)), reverse=True)
    responses = [int(batch.response_lengths_N[tree.transitions_n].sum()) for tree in trees]
    start = 0
    for end in range(1, len(trees) + 1):
        if end == len(trees) or not _fit(trees[start : end + 1], sum(responses[start : end + 1]), limits):
            yield _lay_out(batch, trees[start:end], device)
            start = end


def _fit(trees: Sequence[Tree], responses: int, limits: Limits) -> bool:
    """True if these trees, largest first, go into one pass: all are paths, or none is."""
    if responses > limits.responses or trees[0].is_path != trees[-1].is_path:
        return False
    if not trees[0].is_path:
        return sum(map(len, trees)) <= limits.tokens
    longest = len(trees[0])
    return len(trees) * longest <= limits.tokens and len(trees[-1]) >= SMALLEST_SHARE * longest


def _lay_out(batch: Batch, trees: Sequence[Tree], device: torch.device) -> MicroBatch:
    transitions = np.concatenate([tree.transitions_n for tree in trees])
    sizes = list(map(len, trees))
    if trees[0].is_path:
        shape, places = (len(trees), max(sizes)), [(row, 0) for row in range(len(trees))]
    else:
        shape, places = (1, sum(sizes)), [(0, start) for start in accumulate(sizes[:-1], initial=0)]
    ids, depth = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for tree, (row, start) in zip(trees, places, strict=True):
        ids[row, start : start + len(tree)] = tree.tokens_L
        depth[row, start : start + len(tree)] = tree.depth_L
    paths = [start + path for tree, (_, start) in zip(trees, places, strict=True) for path in tree.paths_n]
    prompts, responses = batch.prompt_lengths_N[transitions], batch.response_lengths_N[transitions]
    transition_R = np.repeat(np.arange(len(transitions)), responses)
    offset_R = np.arange(int(responses.sum())) - np.repeat(np.cumsum(responses) - responses, responses)
    row_n = np.repeat([row for row, _ in places], [len(tree.transitions_n) for tree in trees])
    predicting = np.concatenate([path[prompt - 1 : -1] for path, prompt in zip(paths, prompts, strict=True)])
    predicted = np.concatenate([path[prompt:] for path, prompt in zip(paths, prompts, strict=True)])

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        transitions_n=on_device(transitions),
        tokens_R=on_device(batch.response_offsets[transitions][transition_R] + offset_R),
        input_ids=on_device(ids),
        depth_BL=None if trees[0].is_path else on_device(depth),
        branches=()
        if trees[0].is_path
        else tuple(
            branch.moved(start) for tree, (_, start) in zip(trees, places, strict=True) for branch in tree.branches
        ),
        row_R=on_device(row_n[transition_R]),
        column_R=on_device(predicting),
        targets_R=on_device(ids[row_n[transition_R], predicted]),
        temperature_R=on_device(batch.temperature_N[transitions][transition_R].astype(np.float32)),
        tokens=int(np.diff(batch.offsets)[transitions].sum()),
    )


def score(
    model: Any, micro: MicroBatch, packed_RW: Tensor | None = None, *, entropy_gradient: bool = False
) -> TokenScores:
    """Scores of each response token among those that `packed_RW` allows (`grammars.unpack`).

    Logits exist at response positions only; many exist for a part of these at a time, and once more in the backward
    pass. A model whose forward changes the logits after the output layer (scaling, capping) gets its logits whole.
    """
    head = model.get_output_embeddings()
    part = LOGITS_AT_ONCE // head.weight.shape[0]
    if 0 < part < len(micro.targets_R):
        hidden_RH, logits_1V = _forward(model, micro, slice(0, 1))
        if torch.equal(head(hidden_RH[:1]), logits_1V):
            columns = [torch.split(column, part) for column in (hidden_RH, micro.targets_R, micro.temperature_R)]
            packed = [None] * len(columns[0]) if packed_RW is None else torch.split(packed_RW, part)

            def scores_of(hidden_RH: Tensor, *rows: Any) -> TokenScores:
                return _scores(head(hidden_RH), *rows, entropy_gradient=entropy_gradient)

            scores = [checkpoint(scores_of, *rows, use_reentrant=False) for rows in zip(*columns, packed, strict=True)]
            return TokenScores(*(torch.cat(column) for column in zip(*scores, strict=True)))
    _, logits_RV = _forward(model, micro, slice(None))
    return _scores(logits_RV, micro.targets_R, micro.temperature_R, packed_RW, entropy_gradient=entropy_gradient)


def _forward(model: Any, micro: MicroBatch, positions: slice) -> tuple[Tensor, Tensor]:
    """The hidden states of all response positions before the output layer, and the logits of some of them."""
    hidden: list[Tensor] = []

    def select(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden.append(arguments[0][micro.row_R, micro.column_R])
        return (hidden[0][positions], *arguments[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        logits = model(**_inputs(micro, model.dtype)).logits
    finally:
        hook.remove()
    return hidden[0], logits


def _scores(
    logits_RV: Tensor, targets_R: Tensor, temperature_R: Tensor, packed_RW: Tensor | None, *, entropy_gradient: bool
) -> TokenScores:
    logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32)) / temperature_R[:, None]
    if packed_RW is not None:
        logits_RV = logits_RV.masked_fill(~unpack(packed_RW, logits_RV.shape[1]), -torch.inf)
    normalizer_R = torch.logsumexp(logits_RV, dim=-1)
    target_R = logits_RV.gather(-1, targets_R[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        shifted_RV = logits_RV - normalizer_R[:, None]
        # A forbidden token has probability 0 and log-probability -inf: bounded, it adds 0 to sum and gradient.
        entropy_R = -(shifted_RV.exp() * shifted_RV.clamp(min=torch.finfo(shifted_RV.dtype).min)).sum(-1)
    return TokenScores(target_R - normalizer_R, entropy_R, target_R.detach() >= logits_RV.detach().amax(-1))


def read_values(backbone: Any, head: Any, micro: MicroBatch) -> Tensor:
    """[R] the scalar output of `head` for the hidden states that predict the response tokens."""
    hidden = backbone(**_inputs(micro, backbone.dtype)).last_hidden_state
    selected = hidden[micro.row_R, micro.column_R]
    values: Tensor = head(selected.to(head.weight.dtype))
    return values[:, 0]


def _inputs(micro: MicroBatch, dtype: torch.dtype) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": micro.input_ids, "use_cache": False}
    if micro.branches:
        inputs |= {"position_ids": micro.depth_BL, **branch_inputs(micro.branches, micro.input_ids.device, dtype)}
    return inputs


COPYING, BRANCHING = 13, 80_000
"""The cost of copying the keys and values of a branch's token, and of a branch by itself, measured on a CPU, in
tokens of a model of hidden size 1. A larger model computes hidden² fewer in that time, but copies hidden as many."""


@dataclass(frozen=True, slots=True)
class Tree:
    """The L tokens of n transitions, shared prefixes once."""

    transitions_n: NDArray[np.int64]
    """[n] indices in the batch."""
    tokens_L: NDArray[np.int64]
    depth_L: NDArray[np.int64]
    """[L] the position of each token in its transition."""
    branches: tuple[Branch, ...]
    """In the order of the tokens; a single path is one branch."""
    paths_n: tuple[NDArray[np.int64], ...]
    """n × [its length] indices of each transition's tokens."""

    def __len__(self) -> int:
        return len(self.tokens_L)

    @property
    def is_path(self) -> bool:
        """True if each token sees all tokens before it, as in a transition alone."""
        return len(self.branches) == 1


def plan_trees(batch: Batch, chosen: NDArray[np.int64], limits: Limits) -> list[NDArray[np.int64]]:
    """The `chosen` transitions in trees, each in the order of its paths, and of one transition or within the limits.

    Transitions that continue each other are a chain, which costs what its last one does. A chain branches off the tree
    before it if that costs less than computing the whole chain apart.
    """
    trees: list[NDArray[np.int64]] = []
    lengths, responses = np.diff(batch.offsets), batch.response_lengths_N
    order, shared = _by_prefix(batch, chosen)
    continues = [i > 0 and shared[i] == lengths[order[i - 1]] for i in range(len(order))]
    chain_lengths = lengths[order]
    for i in range(len(order) - 2, -1, -1):
        if continues[i + 1]:
            chain_lengths[i] = chain_lengths[i + 1]
    start = tokens = response_tokens = 0
    for i, row in enumerate(order):
        new = int(lengths[row]) - shared[i]
        if i > start and (
            tokens + new > limits.tokens
            or response_tokens + int(responses[row]) > limits.responses
            or not (continues[i] or _pays(shared[i], int(chain_lengths[i]), limits.hidden_size))
        ):
            trees.append(order[start:i])
            start, tokens, response_tokens = i, 0, 0
        tokens += new if i > start else int(lengths[row])
        response_tokens += int(responses[row])
    if len(order):
        trees.append(order[start:])
    return trees


def grow(batch: Batch, transitions: NDArray[np.int64]) -> Tree:
    """The tree of these transitions, in the order of `plan_trees`."""
    tokens: list[NDArray[np.int32]] = []
    depths: list[NDArray[np.int64]] = []
    paths: list[NDArray[np.int64]] = []
    branches: list[Branch] = []
    size, path, before = 0, np.zeros(0, np.int64), np.zeros(0, np.int32)
    for row in transitions:
        ids = _ids(batch, int(row))
        same = _shared(before, ids)
        end = size + len(ids) - same
        if branches and same == len(before):
            branches[-1] = replace(branches[-1], end=end)
        elif same < len(ids):
            branches.append(Branch(size, end, _runs(path[:same])))
        path = np.concatenate([path[:same], np.arange(size, end)])
        tokens.append(ids[same:])
        depths.append(np.arange(same, len(ids)))
        paths.append(path)
        size, before = end, ids
    return Tree(
        transitions_n=transitions,
        tokens_L=np.concatenate(tokens).astype(np.int64),
        depth_L=np.concatenate(depths),
        branches=tuple(branches),
        paths_n=tuple(paths),
    )


def _runs(places: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Ascending places as runs [start, end)."""
    if not len(places):
        return ()
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in np.split(places, cuts))


def _by_prefix(batch: Batch, chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], Sequence[int]]:
    """The chosen transitions in the order of their tokens, and how many each shares with the one before: the most."""
    keys = [_ids(batch, int(row)).astype(">u4").tobytes() for row in chosen]  # Big-endian bytes compare as the ids do.
    order = chosen[np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)]
    ids = [_ids(batch, int(row)) for row in order]
    return order, [0] + [_shared(one, other) for one, other in pairwise(ids)]


def _ids(batch: Batch, row: int) -> NDArray[np.int32]:
    return batch.tokens_T[batch.offsets[row] : batch.offsets[row + 1]]


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """The length of the common prefix."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length


def _pays(shared: int, length: int, hidden_size: int | None) -> bool:
    """True if a path of `length` tokens is cheaper as a branch, since it spares more tokens than a branch costs."""
    if hidden_size is None:
        return False
    return shared > COPYING * (length - shared) / hidden_size + BRANCHING / hidden_size**2


def device_memory(device: torch.device) -> int:
    """Bytes of memory, used and free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tokens_per_pass(model: Any, device: torch.device) -> int:
    """The tokens of a training pass whose activations take the share of memory meant for them."""
    if device.type == "cuda":
        return max(1, int(ACTIVATIONS_ON_GPU * device_memory(device) / activation_bytes(model, device)))
    return max(1, min(TOKENS_ON_CPU, int(ACTIVATIONS_ON_CPU / activation_bytes(model, device))))


def activation_bytes(model: Any, device: torch.device) -> float:
    """Bytes per token kept for the backward pass, without logits and weights, measured on a few tokens."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # holding it, so that no other gets its address
        return tensor

    def one_position(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0][:, :1], *arguments[1:])

    hook = model.get_output_embeddings().register_forward_pre_hook(one_position)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            ids = torch.zeros(1, _PROBED_TOKENS, dtype=torch.long, device=device)
            model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights) / _PROBED_TOKENS


def recompute_layers(model: Any) -> None:
    """Compute each layer's activations again in the backward pass instead of keeping them.

    transformers does this in train mode alone, in which some models have dropout or noise of their own.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise EngineError(
            f"{type(model).__name__} has no layers that can be recomputed: set engine.torch.gradient_checkpointing = "
            f"false."
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*arguments, **settings)
    return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **settings)
