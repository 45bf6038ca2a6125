"""The algorithms that this package registers. Importing this module imports no torch; building an algorithm does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_algorithms.options import GrpoOptions, PpoOptions, ReinforceOptions
from agl_core import hookimpl, kinds

if TYPE_CHECKING:
    from agl_algorithms.interface import Algorithm
    from agl_core.kinds import Register


def build_grpo(options: GrpoOptions) -> Algorithm:
    """Advantages relative to the group, clipped ratio, KL to the initial weights (arXiv 2402.03300)."""
    from agl_algorithms.grpo import Grpo

    return Grpo(options)


def build_reinforce(options: ReinforceOptions) -> Algorithm:
    """Returns normalised over the batch, clipped ratio, neither critic nor groups (arXiv 2501.03262)."""
    from agl_algorithms.reinforce import Reinforce

    return Reinforce(options)


def build_ppo(options: PpoOptions) -> Algorithm:
    """A learned critic, advantages by GAE, clipped ratio and clipped value loss (arXiv 1707.06347)."""
    from agl_algorithms.ppo import Ppo

    return Ppo(options)


@hookimpl
def register_components(register: Register) -> None:
    register(kinds.ALGORITHM, "grpo", build_grpo, options=GrpoOptions, needs=GrpoOptions.needs, takes=GrpoOptions.takes)
    register(
        kinds.ALGORITHM,
        "reinforce++",
        build_reinforce,
        options=ReinforceOptions,
        needs=ReinforceOptions.needs,
        takes=ReinforceOptions.takes,
    )
    register(kinds.ALGORITHM, "ppo", build_ppo, options=PpoOptions, needs=PpoOptions.needs, takes=PpoOptions.takes)
