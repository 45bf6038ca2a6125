"""Programs under `agl run` that look at what is imported: agl changes neither what is there nor in which order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from agl_core.capture.attaching import SITE, bootstrap_variables
from agl_core.capture.requests import HTTP_LIBRARIES
from agl_core.testing.server import StackInThread, stack_in_thread
from agl_core.types import AttemptKey

FOREIGN = (
    "sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names) - {'__main__', 'sitecustomize'})"
)


def ran(program: str, folder: Path, base_url: str = "http://127.0.0.1:9", key: str = "k", rollout: str = "r") -> Any:
    """What the program prints as its last line (JSON), with warnings shown as errors of the test."""
    (folder / "reports").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(folder), "NO_PROXY": "*"}
    environment |= bootstrap_variables(AttemptKey(rollout, 0), base_url, key, folder / "reports", environment)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_site(name: str) -> Any:
    """A name of our sitecustomize, which cannot be imported beside that of a virtual environment."""
    found: dict[str, Any] = {"__file__": str(SITE / "sitecustomize.py"), "__name__": "ours"}
    source = (SITE / "sitecustomize.py").read_text().replace("_import_next()\nfinally", "pass\nfinally")
    exec(compile(source, "sitecustomize", "exec"), found)
    return found[name]


def test_a_program_starts_and_imports_http_libraries_without_anything_of_agl(tmp_path: Path) -> None:
    program = f"""
        import json, sys
        started = {FOREIGN}
        import http.client, urllib.request
        before = {FOREIGN}
        import certifi, h11, httpcore, idna, anyio, httpx
        after = {FOREIGN}
        print(json.dumps([started, before, after]))
    """
    under_agl = ran(program, tmp_path)
    plain = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert under_agl == json.loads(plain.stdout)
    assert not {"agl_core", "pydantic", "numpy"} & set(under_agl[2])


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


@pytest.mark.parametrize("framework", ["httpx", "a_framework"])
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
        print(json.dumps([[type(each).__name__ for each in _loader.get_plugins()], "agl_core" in sys.modules]))
    """
    plugins, attached = ran(program, tmp_path)
    assert plugins == ["Plugin"]
    assert attached == (framework == "a_framework"), "agl is attached as soon as that is safe"


@pytest.fixture(scope="module")
def served() -> Any:
    with stack_in_thread() as stack:
        yield stack


CLIENTS = {
    "httpx": "import httpx; httpx.post(url, json=body, headers=headers, trust_env=False)",
    "httpx2": "import httpx2; httpx2.post(url, json=body, headers=headers, trust_env=False)",
    "urllib3.connectionpool": "import requests; requests.post(url, json=body, headers=headers)",
    "http.client": "import urllib.request as u; u.urlopen(u.Request(url, json.dumps(body).encode(), headers)).read()",
    "aiohttp.client": """
        import aiohttp, asyncio
        async def main():
            async with aiohttp.ClientSession() as session:
                async with session.post(url, json=body, headers=headers) as reply:
                    await reply.read()
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("library", CLIENTS)
def test_the_first_request_of_each_library_attaches(library: str, tmp_path: Path, served: StackInThread) -> None:
    stack, key = served.stack, served.key
    program = f"""
import json, sys
url = "{stack.server.base_url}/v1/chat/completions"
body = {{"model": "default", "messages": [{{"role": "user", "content": "hi"}}]}}
headers = {{"Authorization": "Bearer none", "Content-Type": "application/json"}}
{textwrap.dedent(CLIENTS[library])}
print(json.dumps("agl_core" in sys.modules))
"""
    assert ran(program, tmp_path, stack.server.base_url, stack.key(key), key.rollout)
    assert not list((tmp_path / "reports").iterdir()), "nothing failed"


def test_the_bootstrap_knows_the_same_libraries_and_what_agl_imports() -> None:
    assert tuple(of_site("_SENDING")) == HTTP_LIBRARIES
    program = f"import sys, agl_core.capture.attaching; print(*{FOREIGN})"
    done = subprocess.run([sys.executable, "-S", "-c", _with_path(program)], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if not name.startswith(("_", "sitecustomize"))}
    assert imported - of_site("_NEEDED") == set()


def _with_path(program: str) -> str:
    """Without `site`, whose .pth files may import anything."""
    return f"import sys; sys.path[:] = {sys.path!r}; {program}"
