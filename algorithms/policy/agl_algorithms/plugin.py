"""What this package registers. Importing it imports no torch; building an algorithm does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_algorithms.options import GrpoOptions, PpoOptions, ReinforceOptions, TimeOptions
from agl_core import Need, hookimpl

if TYPE_CHECKING:
    from agl_algorithms.interface import Algorithm
    from agl_core.plugins import Register


def build_grpo(options: GrpoOptions) -> Algorithm:
    """Advantages relative to the group, clipped ratio, KL to the initial weights (arXiv 2402.03300)."""
    from agl_algorithms.grpo import Grpo

    return Grpo(options)


def grpo_needs(options: GrpoOptions) -> frozenset[Need]:
    """Groups, ids and returns; a reference model only with a KL term."""
    reference = {Need.REFERENCE} if options.beta > 0 else set()
    return frozenset({Need.GROUPS, Need.TOKEN_IDS, Need.RETURNS} | reference)


def build_reinforce(options: ReinforceOptions) -> Algorithm:
    """Returns normalised over the batch, clipped ratio, neither critic nor groups (arXiv 2501.03262)."""
    from agl_algorithms.reinforce import Reinforce

    return Reinforce(options)


def build_ppo(options: PpoOptions) -> Algorithm:
    """A learned critic, advantages by GAE, clipped ratio and clipped value loss (arXiv 1707.06347)."""
    from agl_algorithms.ppo import Ppo

    return Ppo(options)


def reinforce_needs(options: TimeOptions) -> frozenset[Need]:
    """Ids, and returns or (across calls) rewards; a reference model only with a KL term."""
    reference = {Need.REFERENCE} if options.beta > 0 else set()
    credited = Need.REWARDS if options.across_calls else Need.RETURNS
    return frozenset({Need.TOKEN_IDS, credited} | reference)


def ppo_needs(options: PpoOptions) -> frozenset[Need]:
    """What REINFORCE++ needs, and a critic."""
    return reinforce_needs(options) | {Need.CRITIC}


@hookimpl
def register_algorithms(register: Register) -> None:
    register("grpo", build_grpo, options=GrpoOptions, needs=grpo_needs)
    register("reinforce++", build_reinforce, options=ReinforceOptions, needs=reinforce_needs)
    register("ppo", build_ppo, options=PpoOptions, needs=ppo_needs)
