"""What this package registers. Importing it imports no torch; building an algorithm does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_algorithms.options import GrpoOptions
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


@hookimpl
def register_algorithms(register: Register) -> None:
    register("grpo", build_grpo, options=GrpoOptions, needs=grpo_needs)
