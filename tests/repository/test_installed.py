"""The distributions as others get them: wheels in an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]


def run(*command: str | Path, **environment: str) -> str:
    """Run a command that must succeed; returns what it printed."""
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def wheels(distributions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for distribution in distributions.values():
        run(
            sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, distribution.folder
        )  # fmt: skip
    return folder


def test_every_distribution_makes_a_wheel_with_its_types(wheels: Path, distributions: dict[str, Any]) -> None:
    from zipfile import ZipFile

    packed = {file.name.split("-")[0]: set(ZipFile(file).namelist()) for file in wheels.glob("*.whl")}

    assert set(packed) == {distribution.package for distribution in distributions.values()}
    for distribution in distributions.values():
        sources = {str(file.relative_to(distribution.folder)) for file in distribution.sources}
        package = distribution.folder / distribution.package
        shown = [file for name in ("templates", "static") for file in package.rglob(f"{name}/*")]
        assert sources | {str(file.relative_to(distribution.folder)) for file in shown} <= packed[distribution.package]
        assert f"{distribution.package}/py.typed" in packed[distribution.package]


def test_core_and_an_adapter_in_an_empty_environment_bring_no_torch(root: Path, tmp_path: Path) -> None:
    """Installed from the clone, as the README says."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(
        *(python, "-m", "pip", "install", "--quiet", "-c", root / "constraints.txt"),
        *(root / "core", root / "adapters" / "langchain"),
    )

    installed = {package["name"].lower() for package in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    assert {"agl-core", "agl-langchain", "langchain-core"} <= installed
    assert not installed & {"torch", "transformers", "starlette", "uvicorn", "aiohttp", "langgraph", "openai"}

    run(
        python,
        "-c",
        "import agl_langchain, agl_core.client.connection, agl_core.config, agl_core.store, agl_core.cli",
    )
    listed = {p["name"]: p["origin"] for p in json.loads(run(python.parent / "agl", "plugins", "--json"))}
    assert listed["langchain"].startswith("agl-langchain ")
    assert "identical" in listed
    (tmp_path / "rules.py").write_text("import agl_core\n@agl_core.reward_rule\ndef always(episode):\n    return 1.0\n")
    saving = (
        "import agl_core; from agl_core.testing import episodes as make; agl_core.save_episodes('{}', [make.episode()])"
    )
    run(python, "-c", saving.format(tmp_path / "episodes.jsonl"))
    trying = ("reward", "try", tmp_path / "rules.py", "--run", tmp_path / "episodes.jsonl", "--json")
    (tried,) = json.loads(run(python.parent / "agl", *trying))
    assert tried["rewards"] == {"always": 1.0}
    refused = subprocess.run(
        [python.parent / "agl", "train", "train.toml"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "pip install agl-server" in refused.stderr


PIP = """#!/bin/sh
echo "$PIP_CONSTRAINT: $(grep -c '^cuda-toolkit<0' "$PIP_CONSTRAINT")" >>"$(dirname "$0")/reads"
grep -q '^cuda-toolkit<0' "$PIP_CONSTRAINT" || exit 0
echo 'The conflict is caused by:'
echo '    torch 2.13.0 depends on cuda-toolkit[cublas]==13.0.2; platform_system == "Linux"'
echo '    The user requested (constraint) cuda-toolkit<0'
echo 'ERROR: ResolutionImpossible'
exit 1
"""
"""A pip whose index has only the CUDA build of torch."""


def test_make_install_takes_the_cuda_build_where_there_is_no_other_and_says_so(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PIP)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path}", f"PYTHON={sys.executable}"],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CPU build of torch, so its CUDA build is installed" in done.stdout
    assert "PIP_EXTRA_INDEX_URL" in done.stdout
    reads = (python.parent / "reads").read_text().splitlines()
    assert reads == ["constraints.txt: 1", f"{tmp_path}/constraints.txt: 0"]
    assert (tmp_path / ".installed").exists()
