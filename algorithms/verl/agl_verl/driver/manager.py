"""The door by which transitions enter veRL: an agent-loop manager that has already got its rollouts.

veRL asks its manager to roll out prompts and put what came of them into TransferQueue. agl's agents were rolled out
elsewhere, by workers that know nothing of Ray; their transitions wait here until veRL asks for their groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from agl_verl.driver.rows import Row

PARTITION = "train"


class TransitionManager:
    """Hands over groups of rows, each when veRL asks for it by its uid."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Row]] = {}

    @classmethod
    def create(cls, config: Any, llm_client: Any, **handles: Any) -> TransitionManager:
        """As veRL makes its managers; agents reach the servers over HTTP, so no client is needed here."""
        return cls()

    def await_groups(self, rows: Iterable[Row]) -> list[str]:
        """Keep the rows of the next update; returns the uids of their groups."""
        self._waiting = {}
        for row in rows:
            self._waiting.setdefault(row.group, []).append(row)
        return list(self._waiting)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Put the rows of these groups into TransferQueue, and say that each group is complete."""
        for uid in list(prompts["uid"]):
            rows = self._waiting.pop(uid)
            tq.kv_batch_put(
                keys=[row.key for row in rows],
                fields=list_of_dict_to_tensordict([row.fields for row in rows]),
                tags=[row.tag for row in rows],
                partition_id=PARTITION,
            )
            tq.kv_put(key=uid, partition_id=PARTITION, tag={"status": "finished"})
