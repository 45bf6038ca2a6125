"""Proof that training saw what was sampled: for each trained token its id, version and two log-probabilities.

A token is proved exact if all of this holds:

- the model server returned its id and its log-probability, and named the policy version that sampled it;
- the call in the store has the very tokens and log-probabilities that were in the batch (`digest`);
- the version that was trained is the one that sampled;
- training computed the same log-probability for it, but for rounding (`TOLERANCES`): with another id, prompt, weights
  or temperature it would be another.

A token of an earlier version may be exact too; two versions have different log-probabilities, so that proves nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from agl_core.protocols import UpdateResult
from agl_core.types import Batch, Logprobs, Recomputed, Tokens, TrainingRecord, Transition

TOLERANCES: Mapping[str, float] = {"float64": 1e-3, "float32": 1e-3, "bfloat16": 0.5}
"""Nats by which rounding may change a log-probability, by the numbers that are computed with.

Measured with SmolLM2-135M on a CPU, sampled with keys and values kept and recomputed in batches, 2,700 tokens: float32
at most 3e-5, bfloat16 at most 0.38 (0.21 for 99% of them). A wrong id is further off with float32, and with bfloat16
unless it was about as likely (docs/exactness.md). One update at the usual rate moved the median token by 0.02: with
float32 the tolerance shows also other weights, with bfloat16 the version rests on the server's word.
"""


class Proof(StrEnum):
    """How much is proved of a trained token. Each member but the first says what is missing."""

    EXACT = "exact"
    DIFFERENT = "different"
    """Training computed another log-probability than the server."""
    OTHER_VERSION = "other_version"
    """The server named another version than the one that was trained, mostly an earlier one, or none."""
    OTHER_TOKENS = "other_tokens"
    """The call has other tokens or log-probabilities than were trained on."""
    NOT_KNOWN = "not_known"
    """One of the two log-probabilities: recorded texts were not sampled, and an engine may not say what it computed."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The proof of one response's tokens, T of them, in one training step."""

    recomputed_T: Logprobs
    """Training's log-probabilities; NaN where a token has no weight in the loss."""
    proofs_T: Sequence[Proof | None]
    """None where a token has no weight in the loss."""

    @property
    def counts(self) -> Counter[Proof]:
        return Counter(proof for proof in self.proofs_T if proof is not None)

    @property
    def text(self) -> str:
        """How many tokens were trained on, the share of them that is proved exact, and the others by what is missing.

        >>> Certificate(np.zeros(4, np.float32), [Proof.EXACT, None, Proof.DIFFERENT, Proof.EXACT]).text
        '3 tokens trained on: 2 exact (66.67%), 1 different'
        """
        counts = self.counts
        total, exact = counts.total(), counts.pop(Proof.EXACT, 0)
        missing = "".join(f", {count} {proof}" for proof, count in counts.items())
        return f"{total} tokens trained on: {exact} exact ({100 * exact / max(total, 1):.4g}%){missing}"


def certify(transition: Transition, record: TrainingRecord) -> Certificate | None:
    """The proof that `record` has of each of the tokens. None if they were not trained on."""
    ids, sampled_T, recomputed = transition.response_ids, transition.logprobs, record.recomputed
    if record.dropped is not None or ids is None or transition.prompt_ids is None:
        return None
    if recomputed is None:
        mask_T = np.ones(len(ids), np.bool_) if transition.mask is None else transition.mask
        missing = [Proof.NOT_KNOWN if trained else None for trained in mask_T]
        return Certificate(np.full(len(ids), np.nan, np.float32), missing)
    logprobs_T = recomputed.logprobs
    doubt: Proof | None = None
    close_T = np.zeros(len(logprobs_T), np.bool_)
    if sampled_T is None:
        doubt = Proof.NOT_KNOWN
    elif digest(transition.prompt_ids, ids, sampled_T) != recomputed.digest or len(ids) != len(logprobs_T):
        doubt = Proof.OTHER_TOKENS
    elif transition.version != recomputed.version:
        doubt = Proof.OTHER_VERSION
    else:
        tolerance = TOLERANCES.get(recomputed.precision, TOLERANCES["float32"])
        # Logits are divided by the temperature, and so are the differences that rounding makes.
        close_T = np.abs(logprobs_T - sampled_T) * min(1.0, transition.temperature) <= tolerance
    proofs = [doubt or (Proof.EXACT if close else Proof.DIFFERENT) for close in close_T]
    trained = ~np.isnan(logprobs_T)
    return Certificate(logprobs_T, [proof if in_loss else None for proof, in_loss in zip(proofs, trained, strict=True)])


def digest(prompt_ids: Tokens, response_ids: Tokens, logprobs: Logprobs) -> str:
    """Names the tokens of a transition with their log-probabilities: another array has another name.

    >>> ids, logprobs = np.array([1, 2], np.int32), np.zeros(2, np.float32)
    >>> digest(ids[:0], ids, logprobs) == digest(ids[:1], ids[1:], logprobs)
    False
    """
    lengths = np.array([len(prompt_ids), len(response_ids)])
    arrays = (lengths, prompt_ids, response_ids, logprobs)
    dtypes = ("<i8", "<i4", "<i4", "<f4")
    data = b"".join(array.astype(dtype).tobytes() for array, dtype in zip(arrays, dtypes, strict=True))
    return blake2b(data, digest_size=8).hexdigest()


def recomputed_in(batch: Batch, result: UpdateResult) -> list[Recomputed | None]:
    """[N] what an update computed for each transition of its batch; None where it was not trained on."""
    return [
        None if logprobs is None else Recomputed(result.version - 1, _digest_of(batch, i), result.precision, logprobs)
        for i, logprobs in enumerate(result.logprobs_N or [None] * len(batch))
    ]


def _digest_of(batch: Batch, i: int) -> str:
    tokens: NDArray[np.int32] = batch.tokens_T[batch.offsets[i] : batch.offsets[i + 1]]
    prompt = batch.prompt_lengths_N[i]
    logprobs = batch.behaviour_logprobs_R[batch.response_offsets[i] : batch.response_offsets[i + 1]]
    return digest(tokens[:prompt], tokens[prompt:], logprobs)
