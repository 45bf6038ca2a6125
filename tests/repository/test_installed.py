"""The distributions as others get them: wheels in an empty environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from testing_aids import run_command

import agl_core

from .conftest import DISTRIBUTIONS, ROOT

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a release of today's version would publish, made by the release's own commands."""
    folder = tmp_path_factory.mktemp("dist")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run_command(
        "bash", "-ec", "\n".join(commands), cwd=ROOT, PATH=path, DIST=str(folder), TAG=f"v{agl_core.__version__}"
    )
    return folder


def test_a_release_has_each_distribution_with_its_types_and_licence(dist: Path) -> None:
    wheels = {file.name.split("-")[0]: ZipFile(file) for file in dist.glob("*.whl")}
    sources = {file.name.split("-")[0]: _licence_of(file) for file in dist.glob("*.tar.gz")}
    licence = (ROOT / "LICENSE").read_bytes()

    assert set(wheels) == set(sources) == {distribution.package for distribution in DISTRIBUTIONS.values()}
    for distribution in DISTRIBUTIONS.values():
        name, package = distribution.package, distribution.folder / distribution.package
        shown = [file for folder in ("templates", "static") for file in package.rglob(f"{folder}/*")]
        files = {str(file.relative_to(distribution.folder)) for file in [*distribution.sources, *shown]}
        assert files | {f"{name}/py.typed"} <= set(wheels[name].namelist())
        version = distribution.project["version"]
        assert wheels[name].read(f"{name}-{version}.dist-info/licenses/LICENSE") == licence
        assert sources[name] == licence
        assert b"](.." not in wheels[name].read(f"{name}-{version}.dist-info/METADATA")


def _licence_of(sdist: Path) -> bytes:
    with tarfile.open(sdist) as archive:
        file = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/LICENSE")
        assert file
        return file.read()


def test_a_tag_of_another_version_publishes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TAG": "v0.0.0", "DIST": str(tmp_path)}
    refused = subprocess.run(["make", "dist"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert "Not of version v0.0.0: " in refused.stderr
    assert refused.returncode != 0
    assert not list(tmp_path.iterdir())


def test_core_and_an_adapter_in_an_empty_environment_bring_no_torch(tmp_path: Path) -> None:
    """Installed from the clone, as the README says."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip")
    run_command(
        *pip, "install", "--quiet", "-c", ROOT / "constraints.txt", ROOT / "core", ROOT / "adapters" / "langchain"
    )

    installed = {package["name"].lower() for package in json.loads(run_command(*pip, "list", "--format=json"))}
    assert {"agl-core", "agl-langchain", "langchain-core"} <= installed
    assert not installed & {"torch", "transformers", "starlette", "uvicorn", "aiohttp", "langgraph", "openai"}

    modules = "agl_langchain, agl_core.client.worker, agl_core.config, agl_core.store, agl_core.cli"
    run_command(python, "-c", f"import {modules}")
    listed = {p["name"]: p["origin"] for p in json.loads(run_command(python.parent / "agl", "plugins", "--json"))}
    assert listed["langchain"].startswith("agl-langchain ")
    assert "identical" in listed
    (tmp_path / "rules.py").write_text("import agl_core\n@agl_core.reward_rule\ndef always(episode):\n    return 1.0\n")
    saving = (
        "import agl_core; from agl_core.testing import episodes as make; agl_core.save_episodes('{}', [make.episode()])"
    )
    run_command(python, "-c", saving.format(tmp_path / "episodes.jsonl"))
    trying = ("reward", "try", tmp_path / "rules.py", "--run", tmp_path / "episodes.jsonl", "--json")
    (tried,) = json.loads(run_command(python.parent / "agl", *trying))
    assert tried["rewards"] == {"always": 1.0}
    refused = subprocess.run(
        [python.parent / "agl", "train", "train.toml"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},  # So that the message is one line.
        check=False,
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
    tmp_path: Path,
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(PIP)
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "install", f"VENV={tmp_path}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
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
