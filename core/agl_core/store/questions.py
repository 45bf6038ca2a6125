"""Questions to a store that can cross a wire."""

from __future__ import annotations

from collections.abc import Sequence

from agl_core.store.interface import Record, Store
from agl_core.types import AttemptKey
from agl_core.wire.operators import AttemptsQuery, RecordsQuery, RolloutQuery, RolloutsQuery, RunsQuery, StoreQuestion


async def answer(store: Store, question: StoreQuestion) -> Sequence[Record]:
    """What the store answers; StoreRefusedError if it has no answer."""
    match question:
        case RunsQuery():
            return await store.runs()
        case RolloutsQuery():
            wanted = {name: getattr(question, name) for name in RolloutsQuery.model_fields if name != "kind"}
            return await store.rollouts(**wanted)
        case RolloutQuery(prefix=prefix):
            return [await store.rollout(prefix)]
        case AttemptsQuery(rollout=rollout):
            return await store.attempts(rollout)
        case RecordsQuery(attempts=attempts):
            keys = [AttemptKey(each.rollout, each.attempt) for each in attempts]
            return await _recorded(store, question, keys)


async def _recorded(store: Store, question: RecordsQuery, keys: Sequence[AttemptKey]) -> Sequence[Record]:
    match question.kind:
        case "calls":
            return await store.calls(keys)
        case "outcomes":
            return await store.outcomes(keys)
        case "rewards":
            return await store.rewards(keys)
        case "uses":
            return await store.uses(keys)
