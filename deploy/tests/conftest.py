"""Lets the tests beside it import `deployed`, and has agl-verl installed for them, without what it runs on."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

VERL = Path(__file__).parents[2] / "algorithms" / "verl"


@pytest.fixture(scope="module", autouse=True)
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
