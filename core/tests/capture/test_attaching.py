"""Adapters are attached when their framework is imported, and their failures break nothing."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agl_core
from agl_core.capture import Identity


class FakeAdapter:
    def __init__(self, framework: str, error: Exception | None = None, agent: str | None = None) -> None:
        self.framework, self.error, self.agent, self.calls = framework, error, agent, 0

    def attach(self) -> Any:
        self.calls += 1
        if self.error:
            raise self.error
        return (lambda: Identity(self.agent)) if self.agent else None


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
    adapter = FakeAdapter(framework)
    agl_core.attach([adapter])
    assert importlib.util.find_spec(framework) is not None
    assert adapter.calls == 0
    importlib.import_module(f"{framework}.part")
    agl_core.attach([adapter])
    assert adapter.calls == 1
    agl_core.attach([adapter]).detach()
    agl_core.attach([adapter])
    assert adapter.calls == 2, "at once: it is imported already"


def test_an_adapter_that_fails_is_reported_and_the_import_works(
    framework: str, caplog: pytest.LogCaptureFixture
) -> None:
    attachment = agl_core.attach([FakeAdapter(framework, RuntimeError("wrong version"))])
    assert importlib.import_module(framework).READY
    assert attachment.failed[framework] == "RuntimeError: wrong version"
    assert "wrong version" in caplog.text


def test_a_framework_that_fails_to_import_fails_as_before(framework: str, tmp_path: Path) -> None:
    (tmp_path / framework / "__init__.py").write_text("raise OSError('half installed')\n")
    adapter = FakeAdapter(framework)
    agl_core.attach([adapter])
    with pytest.raises(OSError, match="half installed"):
        importlib.import_module(framework)
    assert adapter.calls == 0


def test_http_libraries_imported_later_are_stamped_and_nothing_is_imported_early() -> None:
    program = """
        import sys
        import agl_core
        from agl_core.capture import AttemptContext, Recording, identify, running

        class Adapter:
            framework = "colorsys"

            def attach(self):
                from agl_core.capture import Identity

                return lambda: Identity("named")

        agl_core.attach([Adapter()])
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
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
