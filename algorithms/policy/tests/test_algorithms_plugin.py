"""The package as a plugin: what it brings, what it needs, and that a check of it costs no torch."""

from __future__ import annotations

import subprocess
import sys

from agl_algorithms import plugin
from agl_algorithms.grpo import Grpo
from agl_core import Need
from agl_core.plugins import Kind, Plugins


def test_grpo_is_registered_with_its_needs() -> None:
    plugins = Plugins()
    plugins.register(plugin, "test")
    grpo = plugins.components(Kind.ALGORITHM)["grpo"]
    assert isinstance(grpo.build(grpo.options()), Grpo)
    always = {Need.GROUPS, Need.TOKEN_IDS, Need.RETURNS}
    assert grpo.needs(grpo.options()) == always | {Need.REFERENCE}
    assert grpo.needs(grpo.options(beta=0)) == always
    assert all(field.description for field in grpo.options.model_fields.values())


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, agl_algorithms.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
