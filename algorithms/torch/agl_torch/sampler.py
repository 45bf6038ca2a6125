"""Continuous batching over a slot cache: one thread, one step at a time.

Every step admits waiting rows, prefills them so that a shared prefix is computed once and little is padded, and decodes
one token for each row in progress; a row that is complete leaves at once. A row is one response: a request for `n`
responses makes `n` rows.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_chat.backends import Generation, Request, SampledToken
from agl_core.apis.errors import ApiError
from agl_core.errors import EngineError
from agl_core.types import FinishReason
from agl_torch.cache import EMPTY, Placement, SlotCache, SlotView, cache_layers, next_logits, shared_prefixes
from agl_torch.grammars import Constraint, Grammars, unpack
from agl_torch.loading import LoadedModel
from agl_torch.requests import Job, Row, choose, distort

_FIRST_CAPACITY = 256
_SLOTS_PER_ROW = 4
"""Slots in all, for each row that may be in progress: how many finished rows are remembered."""


class Sampler:
    """Answers requests with one set of weights. Not thread-safe: one thread drives it.

    `cache_bytes` bounds the keys and values; `max_rows` how many responses are decoded at the same time;
    `prefill_tokens` the prompt tokens of one forward pass, and about those of one step. With `deterministic`, every
    row is computed by itself and from its own prompt alone, so that not one bit of it depends on what else is in
    flight.

        sampler.submit(Request("a", prompt_ids, max_tokens=16))
        while not sampler.idle:
            for generated in sampler.step():
                ...
    """

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        *,
        cache_bytes: int = 1 << 30,
        max_rows: int = 256,
        prefill_tokens: int = 4096,
        deterministic: bool = False,
    ) -> None:
        self.counters = Counter(tokens_prefilled=0, tokens_reused=0, tokens_decoded=0, preempted=0)
        """Since the start: prompt tokens computed (also again), or taken from the cache; response tokens, forced ones
        included; how often a slot was given up."""
        self.version = 0
        """The version of the weights, which each generation is marked with."""
        self._loaded = loaded
        self._model, self._device, self._eos_ids = loaded.model, loaded.device, loaded.eos_ids
        self._context = loaded.context_length
        self._max_rows, self._prefill_tokens, self._deterministic = max_rows, prefill_tokens, deterministic
        layers, self._dtype = cache_layers(loaded)
        self._cache = SlotCache(
            layers,
            dtype=self._dtype,
            device=self._device,
            max_bytes=cache_bytes,
            max_slots=_SLOTS_PER_ROW * max_rows,
            capacity=1,
        )
        if self._cache.slots_at(self._context) < 1:
            raise EngineError(
                f"{cache_bytes / 2**20:.1f} MiB of keys and values are too few for one response of {self._context} "
                f"tokens, the model's context, of {self._cache.bytes_per_token / 2**20:.3g} MiB each."
            )
        self._cache.allocate(min(_FIRST_CAPACITY, self._context))
        self._peak = 0
        self._waiting: deque[Row] = deque()
        self._active: list[Row] = []
        """Row i of these is in slot i."""

    @property
    def idle(self) -> bool:
        return not self._active and not self._waiting

    @property
    def grammars(self) -> Grammars:
        return self._loaded.grammars

    @property
    def cache_nbytes(self) -> int:
        return self._cache.nbytes

    def submit(self, request: Request) -> None:
        """Queue a request. EngineError if its prompt leaves no room for a response, ApiError if its grammar cannot be
        enforced, or it names a token that there is not."""
        length = len(request.prompt_ids)
        if not 0 < length < self._context:
            raise EngineError(
                f"Request {request.id}: a prompt of {length} tokens; it must have 1 to {self._context - 1}, "
                f"since the model's context is {self._context} tokens."
            )
        asked, vocabulary = request.distortions, self._loaded.vocabulary
        tokens = [*asked.get("allowed_token_ids", ()), *map(int, asked.get("logit_bias", ()))]
        if max(tokens, default=0) >= vocabulary:
            raise ApiError(400, f"There is no token {max(tokens)}: the model has {vocabulary}.", code="invalid_value")
        job = Job(request)
        limit = min(request.max_tokens, self._context - length)
        job.rows = [Row(job, choice, limit) for choice in range(request.n)]
        if request.grammar is not None:
            for row in job.rows:
                row.constraint = self.grammars.start(request.grammar, request.prompt_ids)
        self._waiting.extend(job.rows)

    @torch.inference_mode()
    def abort(self, request_id: str) -> None:
        """Forget a request; it will not be among the finished. An unknown or finished one is no error."""
        self._waiting = deque(row for row in self._waiting if row.request.id != request_id)
        if any(row.request.id == request_id for row in self._active):
            self._keep([row for row in self._active if row.request.id != request_id])

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget every request and the whole cache: what an error in the middle of a step leaves cannot be trusted."""
        self._waiting.clear()
        self._active = []
        self._cache.allocate(min(_FIRST_CAPACITY, self._context))

    def release(self) -> None:
        """Give the cache's memory to an update, after which none of it could be used; `new_version` takes it again."""
        self._check_drained()
        self._cache.release()

    @torch.inference_mode()
    def new_version(self, version: int) -> None:
        """The weights are now this version; what was cached for the old one is dropped."""
        self._check_drained()
        self.version = version
        self._cache.allocate(self._rounded(max(self._peak, _FIRST_CAPACITY)))
        self._peak = 0

    def _check_drained(self) -> None:
        if self._active or any(row.started for waiting in self._waiting for row in waiting.job.rows):
            raise EngineError("The weights were to change while responses were in progress; drain the sampler first.")

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Admit and prefill what fits, decode one token for every row in progress; return what is complete."""
        touched: list[Job] = []
        budget = self._prefill_tokens
        while budget > 0 and (phase := self._next_phase(budget)):
            budget -= self._prefill(phase)
            touched += self._retire()
        if self._active:
            self._make_room()
            self._decode()
            touched += self._retire()
        return [self._generated(job) for job in dict.fromkeys(touched) if job.complete]

    # Admission.

    def _next_phase(self, budget: int) -> list[tuple[Row, Placement]]:
        """Rows to prefill now, each with what it can copy. Rows that can soon copy from these wait for the next.

        No row joins once there are `budget` tokens to compute, so that rows in progress do not wait long.
        """
        phase: list[tuple[Row, Placement]] = []
        if not self._waiting or not self._fits(self._waiting[0]):
            return phase
        cache, room = self._cache, min(self._max_rows, self._cache.slots) - len(self._active)
        before = np.full((min(room, len(self._waiting)), cache.capacity), -1, np.int32)
        later = deque[Row]()
        while self._waiting and len(phase) < room and budget > 0:
            row = self._waiting[0]
            if (row.longest if self._deterministic else len(row)) > cache.capacity:
                break
            self._waiting.popleft()
            tokens, slot, shared = row.tokens, 0, 0
            if not self._deterministic:
                slot, shared = cache.longest_prefix(tokens)
                shared = min(shared, len(tokens) - 1)
                soon = int(shared_prefixes(before[: len(phase)], tokens).max(initial=0))
                if min(soon, len(tokens) - 1) > shared + MIN_SHARED:
                    later.append(row)
                    continue
            before[len(phase), : len(tokens)] = tokens
            phase.append((row, Placement(slot, shared) if shared else EMPTY))
            budget -= len(tokens) - shared
        self._waiting.extendleft(reversed(later))
        return phase

    def _fits(self, row: Row) -> bool:
        """True if the next row can be admitted, with longer slots if it needs them."""
        need, active = row.longest if self._deterministic else len(row), len(self._active)
        if active >= self._max_rows:
            return False
        if need > self._cache.capacity:
            capacity = self._rounded(need)
            if self._cache.slots_at(capacity) <= active:
                return False
            self._cache.resize(capacity, front=active)
        return active < self._cache.slots

    def _rounded(self, tokens: int) -> int:
        """The next power of two, up to the context."""
        return min(1 << (tokens - 1).bit_length(), self._context)

    def _prefill(self, phase: Sequence[tuple[Row, Placement]]) -> int:
        """Compute the prompts of these rows and sample each one's first token; return how many tokens that took."""
        cache, first = self._cache, len(self._active)
        cache.arrange([*map(cache.whole, range(first)), *(placement for _, placement in phase)])
        rows = [row for row, _ in phase]
        starts, counts = [], []
        for slot, (row, placement) in enumerate(phase, first):
            cache.tokens[slot, : len(row)] = row.tokens
            starts.append(placement.length)
            counts.append(len(row) - placement.length)
            self._count(row, starts[-1], counts[-1])
        self._active += rows
        slots = range(first, len(self._active))
        for part in passes(slots, starts, counts, max_tokens=self._prefill_tokens, alone=self._deterministic):
            self._forward(part.rows, part.starts, part.counts, sample=part.last)
        return sum(counts)

    def _count(self, row: Row, reused: int, prefilled: int) -> None:
        self.counters["tokens_reused"] += reused
        self.counters["tokens_prefilled"] += prefilled
        if not row.started:
            row.started = True
            row.job.reused += reused
            row.job.prefilled += prefilled

    # Decoding.

    def _make_room(self) -> None:
        """See that every row's next token can be cached; if need be, the newest rows give up their slots."""
        cache, need = self._cache, max(map(len, self._active))
        if need <= cache.capacity:
            return
        capacity = self._rounded(need)
        room = cache.slots_at(capacity)
        if len(self._active) > room:
            preempted = self._active[room:]
            self.counters["preempted"] += len(preempted)
            self._keep(self._active[:room])
            self._waiting.extendleft(reversed(preempted))
        cache.resize(capacity, front=len(self._active))

    def _decode(self) -> None:
        slots = np.arange(len(self._active))
        for part in np.split(slots, len(slots)) if self._deterministic else [slots]:
            self._forward(part, self._cache.lengths[part], np.ones(len(part), np.int64), sample=True)

    def _forward(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64], *, sample: bool
    ) -> None:
        """Compute `counts` tokens of each slot from `starts` on and, if asked, append the next token of each."""
        view = SlotView(self._cache, slots, starts, counts)
        logits_BV = next_logits(self._model, view, self._dtype)
        self._cache.lengths[slots] = starts + counts
        self._peak = max(self._peak, int((starts + counts).max()))
        if sample:
            self._append(slots, logits_BV)

    def _append(self, slots: NDArray[np.int64], logits_BV: Tensor) -> None:
        rows = [self._active[slot] for slot in slots]
        decided = self._constrain(rows, logits_BV)
        distorted_BV = None
        if any(row.request.distortions for row in rows):
            distorted_BV = torch.stack([distort(logits_V, row) for logits_V, row in zip(logits_BV, rows, strict=True)])
        ids_B, logprobs_B, logprobs_BV = choose(
            logits_BV,
            self._tensor([row.request.temperature for row in rows], torch.float32),
            self._tensor([row.request.top_p for row in rows], torch.float64),
            self._tensor([next(row.uniforms) if row.request.temperature else 0.0 for row in rows], torch.float64),
            self._tensor([row.forced_id for row in rows], torch.int64),
            distorted_BV,
        )
        advancing: list[tuple[Constraint, int]] = []
        for place, (row, token, logprob) in enumerate(zip(rows, ids_B.tolist(), logprobs_B.tolist(), strict=True)):
            likeliest: dict[int, float] = {}
            if row.request.top:
                best = logprobs_BV[place].topk(min(row.request.top, logprobs_BV.shape[1]))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                likeliest = {other: value for other, value in pairs if value > -math.inf}
            forced = row.forced_id >= 0
            sampled = SampledToken(row.choice, token, logprob, likeliest, not forced and place not in decided)
            self._cache.tokens[slots[place], len(row)] = token
            row.sampled.append(sampled)
            row.finish_reason = self._finish_reason(row, token, forced)
            if row.constraint is not None and row.finish_reason is None:
                advancing.append((row.constraint, token))
            if row.request.watch:
                row.request.watch(sampled)
        if advancing:
            self.grammars.advance(advancing)
        self.counters["tokens_decoded"] += len(rows)

    def _constrain(self, rows: Sequence[Row], logits_BV: Tensor) -> set[int]:
        """Forbid tokens that a row's grammar does not allow; returns which rows have no choice but one token."""
        places = [place for place, row in enumerate(rows) if row.constraint is not None]
        if not places:
            return set()
        packed = np.stack([row.constraint.allowed for row in rows if row.constraint is not None])
        allowed = unpack(torch.from_numpy(packed).to(self._device), logits_BV.shape[1])
        logits_BV[places] = logits_BV[places].masked_fill(~allowed, -math.inf)
        return {place for place, count in zip(places, np.bitwise_count(packed).sum(1), strict=True) if count == 1}

    def _tensor(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _finish_reason(self, row: Row, token: int, forced: bool) -> FinishReason | None:
        if not forced and (token in self._eos_ids or (row.request.stop and row.request.stop(row.ids))):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(row.sampled) >= row.limit else None

    # Leaving.

    def _retire(self) -> list[Job]:
        """Take complete rows out of the front; return their requests."""
        done = [row for row in self._active if row.finish_reason is not None]
        if done:
            self._keep([row for row in self._active if row.finish_reason is None])
        return [row.job for row in done]

    def _keep(self, rows: Sequence[Row]) -> None:
        """Let only these rows stay in progress, with as little moving as can be."""
        slot_of, staying = {row: slot for slot, row in enumerate(self._active)}, set(rows)
        for row, slot in slot_of.items():
            if row not in staying:
                self._cache.touch(slot)
                if self._deterministic:
                    self._cache.lengths[slot] = 0
        movers = [row for row in rows if slot_of[row] >= len(rows)]
        self._active = [row if row in staying else movers.pop() for row in self._active[: len(rows)]]
        self._cache.arrange([self._cache.whole(slot_of[row]) for row in self._active])

    def _generated(self, job: Job) -> Generation:
        return Generation(
            request=job.request,
            responses=tuple(row.response for row in job.rows),
            version=self.version,
            prefilled=job.prefilled,
            reused=job.reused,
        )


MIN_SHARED = 16
"""A row waits one pass for another of the same pass if that spares it more tokens than this."""
PAD_SHARE = 0.25
"""Rows are computed together while the shortest misses at most this share of the longest …"""
PAD_TOKENS = 16
"""… or this many tokens."""


class Pass(NamedTuple):
    """A stretch of tokens to compute for several rows at once."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    last: bool
    """True if it ends at each row's last token, whose logits are wanted."""


def passes(
    rows: Sequence[int], starts: Sequence[int], counts: Sequence[int], *, max_tokens: int, alone: bool
) -> Iterable[Pass]:
    """Cut the prefill of `rows` into passes of at most `max_tokens` inputs, pads included; `alone`: of one row each."""
    short: list[tuple[int, int, int]] = []
    for row, start, count in zip(rows, starts, counts, strict=True):
        while count > max_tokens:
            yield _one_pass([(max_tokens, row, start)], last=False)
            start, count = start + max_tokens, count - max_tokens
        short.append((count, row, start))
    if not alone:
        short.sort(reverse=True)
    first = 0
    for end in range(1, len(short) + 1):
        longest = short[first][0]
        fits = end < len(short) and not alone and (end - first + 1) * longest <= max_tokens
        if fits and longest - short[end][0] <= max(PAD_TOKENS, PAD_SHARE * longest):
            continue
        yield _one_pass(short[first:end], last=True)
        first = end


def _one_pass(batch: Sequence[tuple[int, int, int]], *, last: bool) -> Pass:
    in_order = sorted(batch, key=lambda entry: entry[1])
    counts, rows, starts = (np.array(column, np.int64) for column in zip(*in_order, strict=True))
    return Pass(rows, starts, counts, last)
