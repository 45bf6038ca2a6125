"""The component of this package: the table `[optimize]`."""

from __future__ import annotations

from agl_core import hookimpl
from agl_core.kinds import CONFIG_TABLE, Register


@hookimpl
def register_components(register: Register) -> None:
    from agl_prompts.config import OptimizeSection

    register(CONFIG_TABLE, "optimize", lambda options: options, options=OptimizeSection, doc=OptimizeSection.__doc__)
