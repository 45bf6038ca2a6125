"""The run's side of the veRL engine: `agl_verl.process` is veRL's driver.

Imports neither veRL, Ray nor torch: a run's own process stays small, and Ray never runs inside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from agl_core.engines.host import ProcessEngine
from agl_core.errors import ConfigError
from agl_core.protocols import EngineContext
from agl_verl.cluster.faults import KILLED, remedy_of
from agl_verl.options import VerlOptions


class VerlEngine(ProcessEngine[VerlOptions]):
    """veRL on Ray; see `agl_core.protocols.Engine`.

    engine = VerlEngine(VerlOptions(), context)
    upstream = await engine.start()
    result = await engine.update("default", batch, "grpo", {})
    await engine.stop()
    """

    module = "agl_verl.process"
    seconds_to_end = 30.0  # Ray ends with it.

    def __init__(self, options: VerlOptions, context: EngineContext) -> None:
        super().__init__(options, context)
        if len(context.policies) != 1:
            raise ConfigError(
                f"The veRL engine trains one policy, and the run has {len(context.policies)} "
                f"({', '.join(context.policies)}). Use the torch engine for several, or leave one."
            )

    @property
    def seconds_to_start(self) -> float:
        return self._options.start_timeout

    def remedy(self, lines: Sequence[str], exit_code: int | None) -> str | None:
        """What to do about the errors of veRL, Ray and vLLM that people meet."""
        return remedy_of(*reversed(lines)) or (KILLED if exit_code == -9 else None)

    def describe(self, *, whole: bool = False) -> str:
        """What differs from veRL's defaults, or the whole configuration, and what it would take, memory too."""
        from agl_verl.config.chosen import built, choose
        from agl_verl.config.composing import as_text, compose, differences
        from agl_verl.config.mapping import Resources
        from agl_verl.config.memory import described
        from agl_verl.cpu.mending import is_wanted

        options = self._options
        on_cpu = is_wanted(options.device, options.address)
        algorithm = built(choose(self._context))
        composed = compose(options, self._context, algorithm=algorithm, cpu=on_cpu)
        said = [f"It would take {Resources.of(options, cpu=on_cpu)}."]
        if not on_cpu:
            [spec] = self._context.policies.values()
            said += described(options, spec, algorithm)
        shown = as_text(composed if whole else differences(composed))
        if not whole:
            said.insert(0, "Above is what differs from veRL's defaults; --whole shows all of its configuration.")
        return shown + "".join(f"# {line}\n" for line in said)
