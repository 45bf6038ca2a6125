"""For all tests of the repository: how many examples are drawn, how long a test may take, and one thread a process.

What tests of several packages share is public, in `agl_core.testing`, or, if plugin authors do not need it, in
`tests/support`. What one package's tests share lies beside them and is imported relatively (`from .road import …`,
`from ..posting import …`). This needs no `__init__.py`, because pytest names each test module by its path. A module
that is a script too is run by its name, as `python -m tests.faults.full_disk` is; `tests/__init__.py` is for these. No
test adds to `sys.path`.
"""

from __future__ import annotations

import importlib.util
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing_aids import certificates_read_once

VERL = Path(__file__).parent / "algorithms" / "verl"

STORM_TIMEOUT = 600

if "PYTEST_XDIST_WORKER" in os.environ:  # Tests run on every core already.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if importlib.util.find_spec("typer"):
    from agl_core.cli import add_installed, app

    add_installed(app)  # Tests call `app`, without `main`.

if importlib.util.find_spec("hypothesis"):  # The oracles' environment has none.
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "fuzz", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
    )
    # Few, and the same each time: what fails is the change's. `make fuzz` draws others, and more.
    settings.register_profile("repeatable", settings.get_profile("fuzz"), max_examples=25, derandomize=True)
    settings.load_profile("fuzz" if os.environ.get("AGL_FUZZ") else "repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # A driver of somebody else is played without pytest-timeout too.
    for item in items if config.pluginmanager.hasplugin("timeout") else ():
        if item.get_closest_marker("storm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(STORM_TIMEOUT))


@pytest.fixture(scope="session", autouse=True)
def certificates() -> Iterator[None]:
    """Hundreds of clients are made, and none of them speaks TLS."""
    with certificates_read_once():
        yield


@pytest.fixture(scope="module")
def agl_verl_is_installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Its entry points are found, here and in what is started from here; veRL, Ray and vLLM are not there."""
    site = tmp_path_factory.mktemp("site")
    project = tomllib.loads((VERL / "pyproject.toml").read_text())["project"]
    installed = site / f"agl_verl-{project['version']}.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agl-verl\nVersion: {project['version']}\n")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"]["agl"].items())
    (installed / "entry_points.txt").write_text(f"[agl]\n{points}")
    with pytest.MonkeyPatch.context() as patch:
        for folder in (VERL, site):
            patch.syspath_prepend(folder)
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield
