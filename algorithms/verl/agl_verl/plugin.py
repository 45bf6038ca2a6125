"""What this package registers with agl. Importing it imports neither veRL, Ray, vLLM nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core import Capability, CreditKind, hookimpl, kinds
from agl_core.kinds import Register
from agl_verl.config.native import NAMES, build_native, needs, options_of
from agl_verl.options import VerlOptions

if TYPE_CHECKING:
    from agl_core.protocols import Engine, EngineContext


def build_engine(options: VerlOptions, context: EngineContext) -> Engine:
    """veRL on Ray with vLLM serving: one machine or a cluster."""
    from agl_verl.engine import VerlEngine

    return VerlEngine(options, context)


@hookimpl
def register_components(register: Register) -> None:
    provides = {Capability.TOKEN_IDS, Capability.REFERENCE, Capability.CRITIC, Capability.OWN_ALGORITHMS}
    register(kinds.ENGINE, "verl", build_engine, options=VerlOptions, provides=provides)
    for name in NAMES:
        register(kinds.ALGORITHM, name, build_native, options=options_of(name), needs=needs, takes=CreditKind.RETURN)
