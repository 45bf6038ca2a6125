"""The rollouts that training learns from: groups are begun ahead, and the first complete ones are drawn.

    planned ──▶ queued, running ──▶ complete, in the buffer ──▶ drawn for an update
               └──────────── at most `in_flight` groups ────┘

If as many groups are in flight as an update takes, each step waits for exactly the groups that it began: this is the
synchronous loop. If there are more, the others run on while the weights are updated, and carry over to later steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agl_core.errors import PluginError
from agl_core.protocols import Buffer, DrawContext, DrawnGroup
from agl_core.training.metrics import Phase
from agl_core.training.rollouts import Collected, Collector, Scored, reward_note, warn_of_failed_rules
from agl_core.types import Episode, Rollout


@dataclass(frozen=True)
class Drawn(Collected):
    """The groups of one update."""

    weights: list[float] = field(default_factory=list)
    """The weight of each group in the loss."""
    new: list[Episode] = field(default_factory=list)
    """The episodes of the groups that no earlier update had."""
    rollouts: list[Rollout] = field(default_factory=list)
    """The rollouts of `new`."""
    replayed: int = 0
    """Groups that an earlier update also had."""
    buffered: int = 0
    """Groups that the buffer holds afterwards."""
    carried_over: int = 0
    """Groups of the update that were under way before its step began."""
    in_flight: int = 0
    """Groups that run during the update."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the step."""
    note: str = ""
    """What the line of the step says of it."""


class Source(Protocol):
    """Where the groups of updates come from."""

    @property
    def begun(self) -> int:
        """How many groups of rollouts were begun."""

    @property
    def unfinished(self) -> list[int]:
        """The positions of the groups that were begun and that no update has had."""

    async def draw(self, updates_left: int, context: DrawContext, phase: Phase) -> Drawn:
        """The groups of the next update; waits until there are enough."""

    async def cancel(self) -> None:
        """Cancel running groups; they stay unfinished."""


class Experience:
    """Keeps groups in flight and draws them for updates. `plan` makes the group at a position (0, 1, …) of training.

    A resumed run passes `begun`, the number of groups that were begun, and `unfinished`, the positions of those that no
    update has had; these are begun again first.
    """

    def __init__(
        self,
        collector: Collector,
        buffer: Buffer,
        plan: Callable[[int], list[Rollout]],
        *,
        per_update: int,
        in_flight: int,
        begun: int = 0,
        unfinished: Iterable[int] = (),
    ) -> None:
        self._collector, self._buffer, self._plan = collector, buffer, plan
        self._per_update, self._in_flight = per_update, in_flight
        self.begun = begun
        self._again = sorted(unfinished)
        self._position: dict[str, int] = {}
        self._running: dict[str, dict[str, Scored | None]] = {}
        """By group: its rollouts in the order of the members, each with its scored episode once it is done."""
        self._complete: dict[str, list[Scored]] = {}
        """By group: those in the buffer that were not drawn yet."""

    @property
    def unfinished(self) -> list[int]:
        """The positions of the groups that were begun and that no update has had."""
        return sorted([*self._again, *(self._position[name] for name in self._under_way)])

    async def draw(self, updates_left: int, context: DrawContext, phase: Phase) -> Drawn:
        """The groups of the next update, in the order of their plan; waits until enough are complete.

        No more groups are begun than `updates_left` (this one included) can use.
        """
        before = set(self._under_way)
        most = min(self._in_flight, updates_left * self._per_update)
        arrived: list[Episode] = []
        await self._begin(most)
        while (groups := self._buffer.draw(self._per_update, context)) is None:
            arrived += await self._receive()
            phase.advance(self._share_complete(), reward_note(arrived))
            await self._begin(most)
        drawn = self._drawn(groups, before)
        warn_of_failed_rules(Collected([drawn.new], drawn.reward_errors))
        return drawn

    async def cancel(self) -> None:
        if waiting := self._waiting:
            await self._collector.queue.cancel(waiting)

    @property
    def _under_way(self) -> list[str]:
        return [*self._running, *self._buffer.pending]

    @property
    def _waiting(self) -> set[str]:
        """The rollouts that are not done."""
        return {id for rollouts in self._running.values() for id, scored in rollouts.items() if scored is None}

    async def _begin(self, most: int) -> None:
        """Begin groups until `most` are under way."""
        rollouts: list[Rollout] = []
        for _ in range(most - len(self._under_way)):
            position = self._again.pop(0) if self._again else self.begun
            self.begun = max(self.begun, position + 1)
            group = self._plan(position)
            self._position[group[0].group] = position
            self._running[group[0].group] = dict.fromkeys(rollout.id for rollout in group)
            rollouts += group
        if rollouts:
            await self._collector.queue.enqueue(rollouts)

    async def _receive(self) -> list[Episode]:
        """Wait for rollouts; groups that they complete go into the buffer."""
        finished = await self._collector.finished(self._waiting)
        for scored in finished:
            self._running[scored.rollout.group][scored.rollout.id] = scored
        for name, rollouts in list(self._running.items()):
            done = [scored for scored in rollouts.values() if scored is not None]
            if len(done) == len(rollouts):
                self._complete[name] = await self._collector.complete(done)
                del self._running[name]
                self._buffer.add([scored.episode for scored in self._complete[name]])
        return [scored.episode for scored in finished]

    def _drawn(self, groups: Sequence[DrawnGroup], before: set[str]) -> Drawn:
        by_name = {group.episodes[0].group: group for group in groups}
        new = by_name.keys() & self._complete.keys()
        if len(by_name) < len(groups) or not new:
            what = "no new group" if not new else "a group twice"
            raise PluginError(
                f"The buffer gave an update {what} ({', '.join(by_name) or 'it gave none'}). Fix its `draw`: each "
                f"group once, at least one of them new (docs/plugins.md, Buffer)."
            )
        names = sorted(by_name, key=self._position.__getitem__)
        first_time = [scored for name in names for scored in self._complete.pop(name, ())]
        self._complete = {name: self._complete[name] for name in self._buffer.pending}
        return Drawn(
            groups=[list(by_name[name].episodes) for name in names],
            weights=[by_name[name].weight for name in names],
            reward_errors=[error for scored in first_time for error in scored.reward_errors],
            new=[scored.episode for scored in first_time],
            rollouts=[scored.rollout for scored in first_time],
            replayed=len(by_name) - len(new),
            buffered=len(self._buffer),
            carried_over=len(before & by_name.keys()),
            in_flight=len(self._under_way),
        )

    def _share_complete(self) -> float:
        """The share that is done of the groups nearest to completion, as many as an update takes."""
        shares = [sum(map(bool, group.values())) / len(group) for group in self._running.values()]
        nearest = sorted([1.0] * len(self._buffer.pending) + shares)[-self._per_update :]
        return sum(nearest) / self._per_update
