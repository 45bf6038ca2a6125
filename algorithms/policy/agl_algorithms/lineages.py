"""Which transitions of a rollout continue each other exactly, so that one row of tokens has them all.

An agent sends its conversation again with each call, so the prompt of a turn usually begins with prompt and response of
the turn before. Such transitions are a chain: the tokens of its last one contain all the others, and each response
token has the same tokens before it as in its transition alone. One row therefore has the loss and the gradient of all
of them, each response with its own advantage and weights. Sub-agents, edited histories and summaries begin new chains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agl_core.types import Batch


def lineages(batch: Batch, chosen: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """The `chosen` transitions in chains, each from its shortest transition to its longest.

    A transition continues the chain whose prompt and response are exactly the beginning of its prompt; the longest such
    chain if there are several. What a chain continues with is one transition: the next sibling begins another chain.

    A chain is of one rollout, so of one optimizer step (`agl_algorithms.prepared.minibatches`), and of one temperature.
    """
    lengths_N = np.diff(batch.offsets)
    chains: list[list[int]] = []
    ends: dict[tuple[int, float], list[tuple[bytes, list[int]]]] = {}
    # By length: what a prompt may begin with comes before it, and of the ends that fit the last one is the longest.
    for i in chosen[np.argsort(lengths_N[chosen], kind="stable")].tolist():
        start, end = batch.offsets[i : i + 2]
        prompt = batch.tokens_T[start : start + batch.prompt_lengths_N[i]].tobytes()
        open_ends = ends.setdefault((int(batch.rollout_N[i]), float(batch.temperature_N[i])), [])
        continued = next((place for place in reversed(open_ends) if prompt.startswith(place[0])), None)
        if continued is None:
            chain = [i]
            chains.append(chain)
        else:
            open_ends.remove(continued)
            chain = continued[1]
            chain.append(i)
        open_ends.append((batch.tokens_T[start:end].tobytes(), chain))
    return [np.array(chain, np.int64) for chain in chains]
