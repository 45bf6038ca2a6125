"""Python processes of commands: agl attaches itself where an HTTP library or a framework is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agl_core.capture.attaching import bootstrap_variables
from agl_core.types import AttemptKey

FOREIGN = (
    "sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'__main__', 'sitecustomize'})"
)


def run_program(program: str, folder: Path) -> Any:
    """The program's last line of output, as JSON; a warning of its own fails the test."""
    (folder / "reports").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_PROXY": "*"}
    attempt, url = AttemptKey("r", 0), "http://127.0.0.1:9"
    environment |= bootstrap_variables(attempt, url, "key", folder / "reports", environment)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_program_without_http_has_nothing_of_agl(tmp_path: Path) -> None:
    program = f"import json, sys, http.client, urllib.request, idna; print(json.dumps({FOREIGN}))"
    assert "agl_core" not in run_program(program, tmp_path)


PLUGIN = """
    import colorsys
    import {framework}
    from pydantic import BaseModel

    class Settings(BaseModel):
        name: str = "x"

    class Plugin:
        def new_schema_validator(self, *args, **kwargs):
            return None, None, None

    plugin = Plugin()
"""


@pytest.mark.parametrize("framework", ["httpx2", "a_framework"])
def test_a_plugin_of_pydantic_that_is_loaded_in_its_import_stays(tmp_path: Path, framework: str) -> None:
    """As Logfire's: pydantic imports it while it is imported itself, and it imports what agl waits for."""
    (tmp_path / "the_plugin.py").write_text(textwrap.dedent(PLUGIN.format(framework=framework)))
    (tmp_path / "a_framework.py").write_text("")
    info = tmp_path / "the_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: the-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[pydantic]\nthe_plugin = the_plugin:plugin\n[agl.frameworks]\na_framework = the_plugin\n"
    )
    program = """
        import json, sys
        import pydantic

        class Model(pydantic.BaseModel):
            x: int

        from pydantic.plugin import _loader
        import pydantic.version
        import wave
        import idna
        print(json.dumps([[type(plugin).__name__ for plugin in _loader.get_plugins()], "agl_core" in sys.modules]))
    """
    plugins, attached = run_program(program, tmp_path)
    assert (plugins, attached) == (["Plugin"], True), "agl is attached as soon as that is safe"


def test_a_library_that_sends_in_a_submodule_attaches(tmp_path: Path) -> None:
    assert run_program("import json, sys, requests; print(json.dumps('agl_core' in sys.modules))", tmp_path)
    assert not list((tmp_path / "reports").iterdir()), "nothing failed"
