"""What the learner trains on: sessions of real use, and beside them rollouts of tasks, so that it does not forget."""

from __future__ import annotations

from agl_core.deployment.sessions import SessionSource
from agl_core.protocols import DrawContext
from agl_core.training.progress import Phase
from agl_core.training.rollouts.collect import Collected, warn_of_failed_rules
from agl_core.training.rollouts.experience import Drawn, Experience


class MixedExperience:
    """Each update gets the sessions of its step, each a group of one, and groups of rollouts of tasks."""

    def __init__(self, sessions: SessionSource, tasks: Experience | None) -> None:
        self._sessions, self._tasks = sessions, tasks

    @property
    def begun(self) -> int:
        return 0 if self._tasks is None else self._tasks.begun

    @property
    def unfinished(self) -> list[int]:
        return [] if self._tasks is None else self._tasks.unfinished

    async def draw(self, updates_left: int, context: DrawContext, phase: Phase) -> Drawn:
        """The groups of the next update; rollouts begin once there are enough sessions, and so are up to date."""
        taken = await self._sessions.take(context.step, phase)
        groups = [[each.episode] for each in taken.scored]
        errors = [error for each in taken.scored for error in each.reward_errors]
        warn_of_failed_rules(Collected(groups, errors))
        tasks = Drawn([]) if self._tasks is None else await self._tasks.draw(updates_left, context, phase)
        return Drawn(
            groups=[*tasks.groups, *groups],
            reward_errors=[*tasks.reward_errors, *errors],
            weights=[*tasks.weights, *taken.weights],
            new=[*tasks.new, *(episode for [episode] in groups)],
            rollouts=[*tasks.rollouts, *(each.rollout for each in taken.scored)],
            replayed=tasks.replayed,
            buffered=tasks.buffered,
            carried_over=tasks.carried_over,
            in_flight=tasks.in_flight,
            metrics=taken.metrics,
        )

    async def cancel(self) -> None:
        """Cancel running rollouts. Sessions go on."""
        if self._tasks is not None:
            await self._tasks.cancel()
