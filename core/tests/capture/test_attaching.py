"""Adapters are attached when their framework is imported, here and in a command's processes; failures break nothing."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from testing_aids import run_python

import agl_core
from agl_core.capture import AttemptContext, Identity, Recording, current_identity, identify, running, watch
from agl_core.capture.attaching import bootstrap_variables
from agl_core.types import AttemptKey


def fake_adapter(framework: str, error: Exception | None = None) -> mock.Mock:
    return mock.Mock(framework=framework, attach=mock.Mock(return_value=None, side_effect=error))


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """A package that can be imported once."""
    name = f"framework_{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("READY = True\n")
    (tmp_path / name / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    agl_core.attach([]).detach()
    for module in (name, f"{name}.part"):
        sys.modules.pop(module, None)


def test_an_adapter_is_attached_once_when_its_framework_is_imported(framework: str) -> None:
    adapter = fake_adapter(framework)
    agl_core.attach([adapter])
    assert importlib.util.find_spec(framework) is not None
    assert adapter.attach.call_count == 0
    importlib.import_module(f"{framework}.part")
    agl_core.attach([adapter])
    assert adapter.attach.call_count == 1
    agl_core.attach([adapter]).detach()
    agl_core.attach([adapter])
    assert adapter.attach.call_count == 2, "at once: it is imported already"


def test_what_an_adapter_watches_ends_when_it_is_detached() -> None:
    class Agent:
        def run(self) -> Identity | None:
            return current_identity()

    class OwnAgent(Agent):
        pass

    def naming(agent: str) -> Any:
        return SimpleNamespace(framework="json", attach=lambda: watch(OwnAgent, "run", lambda _: identify(agent)))

    for name in ("first", "second"):
        attachment = agl_core.attach([naming(name)])
        with running(AttemptContext("r", 0, "http://127.0.0.1:9", "key", Recording())):
            assert OwnAgent().run() == Identity(name)
            attachment.detach()
            assert OwnAgent().run() is None
    assert "run" not in vars(OwnAgent), "it inherits again"


def test_an_adapter_that_fails_is_reported_and_the_import_works(
    framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = agl_core.attach([fake_adapter(framework, RuntimeError("wrong version"))])
    assert importlib.import_module(framework).READY
    assert attachment.failed[framework] == "RuntimeError: wrong version"
    assert "wrong version" in caplog.text


def test_an_adapter_of_a_module_that_the_framework_does_not_have_says_so_once(
    framework: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "namespace" / framework).mkdir(parents=True)
    names = ("{}.gone", "{}.gone.deep", "{}.part", "not_{}.part", "namespace.gone")
    attachment = agl_core.attach(fake_adapter(name.format(framework)) for name in names)
    importlib.import_module(framework)
    importlib.import_module("namespace")
    importlib.import_module(f"{framework}.part")
    assert attachment.failed.keys() == {f"{framework}.gone", f"{framework}.gone.deep"}
    assert caplog.text.count(f"the {framework} that is installed has no module {framework}.gone,") == 2
    assert f"install the version of {framework} that it is made for" in caplog.text


def test_a_framework_that_fails_to_import_fails_as_before(framework: str, tmp_path: Path) -> None:
    (tmp_path / framework / "__init__.py").write_text("raise OSError('half installed')\n")
    adapter = fake_adapter(framework)
    agl_core.attach([adapter])
    with pytest.raises(OSError, match="half installed"):
        importlib.import_module(framework)
    assert adapter.attach.call_count == 0


def test_http_libraries_imported_later_are_stamped_and_nothing_is_imported_early() -> None:
    program = """
        import sys
        import agl_core
        from agl_core.capture import AttemptContext, Identity, Recording, running

        agl_core.attach([agl_core.adapter("colorsys")(lambda: lambda: Identity("named"))])
        early = sorted({"httpx", "httpx2", "torch", "langchain_core", "openai"} & set(sys.modules))
        assert early == [], early
        import colorsys
        import httpx
        import httpx2

        for library in (httpx, httpx2):
            seen = []
            transport = library.MockTransport(lambda r: seen.append(r.headers) or library.Response(200))
            with running(AttemptContext("r", 0, "http://h", "k", Recording())):
                library.Client(transport=transport).get("http://h/v1")
            assert (seen[0]["x-agl-rollout"], seen[0]["x-agl-agent"]) == ("r/0", "named"), seen
    """
    run_python(program)


# Python processes of commands: agl attaches itself where an HTTP library or a framework is imported.


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


@pytest.mark.parametrize(("imports", "attached"), [("http.client, urllib.request, idna", False), ("requests", True)])
def test_agl_attaches_where_a_library_of_http_is_imported_and_nowhere_else(
    imports: str, attached: bool, tmp_path: Path
) -> None:
    program = f"import json, sys, {imports}; print(json.dumps('agl_core' in sys.modules))"
    assert run_program(program, tmp_path) is attached
    assert not list((tmp_path / "reports").iterdir()), "nothing failed"


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
    """Logfire's is such a one: pydantic imports it while it is imported itself, and it imports what agl waits for."""
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
