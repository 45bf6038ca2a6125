"""The runner `command` as deploy/containers has it, with Podman and kubectl: part of `make test-harnesses`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest

from .test_sandbox import PROBE, Attempt, urls  # noqa: F401

TEXT = Path(__file__).parents[3] / "deploy" / "containers" / "podman.toml"


@pytest.mark.skipif(shutil.which("podman") is None, reason="the package podman is missing")
@pytest.mark.timeout(300)
async def test_podman_has_the_gateway_and_its_folders_alone(tmp_path: Path, urls: list[str]) -> None:  # noqa: F811
    attempt, image = Attempt(tmp_path), tmp_path / "image"
    for folder in ("usr", "etc", "proc", "sys", "dev", "run", "tmp"):
        (image / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64"):
        (image / link).symlink_to(f"usr/{link}")
    workspace = tomllib.loads(TEXT.read_text())["workspace"]
    *wrap, image_name = workspace["wrap"]
    assert image_name == "AGENTS"
    workspace["wrap"] = [*wrap, "--volume=/usr:/usr:ro", "--rootfs", str(image)]
    if os.getuid() == 0:
        workspace["wrap"].remove("--userns=keep-id")
    hidden = [str(attempt.root / "other_attempt"), "/home"]
    command = ["python3", "-c", PROBE, *urls, *hidden]
    variables = {"HOME": str(attempt.home)}
    status, output = await attempt.start(command, gateway=urls[0], variables=variables, **workspace)
    assert status == 3, output
    seen = json.loads(output[output.index("{") :])
    assert (seen["gateway"], seen["other"]) == ("/v1", "URLError")
    assert seen["paths"] == ["FileNotFoundError"] * 2
    assert (attempt.workspace / "made").exists()
    assert (attempt.home / "made").exists()
    process = await asyncio.create_subprocess_exec("podman", "ps", "--all", "--quiet", stdout=asyncio.subprocess.PIPE)
    assert (await process.communicate())[0] == b"", "the container is removed"


KUBECTL = """#!/bin/sh
case "$*" in
  "create job"*|patch*) exec {kubectl} "$@";;
  "create --filename=-") cat > {job};;
  logs*) echo printed;;
  *exitCode*) echo 3;;
esac
"""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="the program kubectl is missing")
async def test_a_kubernetes_job_mounts_the_folders_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt, job = Attempt(tmp_path), tmp_path / "job.json"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kubectl").write_text(KUBECTL.format(kubectl=shutil.which("kubectl"), job=job))
    (tmp_path / "bin" / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    workspace = tomllib.loads(TEXT.with_name("kubernetes.toml").read_text())["workspace"]
    script = TEXT.with_name("kubernetes-job")
    workspace["wrap"] = [
        {"/attempts": str(tmp_path), "deploy/containers/kubernetes-job": str(script)}.get(word, word)
        for word in workspace["wrap"]
    ]
    status, output = await attempt.start(["sh", "-c", "echo 'a b'; exit 3"], variables={"KEY": "k"}, **workspace)
    assert (status, "printed" in output) == (3, True), output
    made = json.loads(job.read_text())
    kubernetes_validate.validate(made, "1.34", strict=True)
    [container] = made["spec"]["template"]["spec"]["containers"]
    assert container["command"][-3:] == ["sh", "-c", "echo 'a b'; exit 3"]
    mounts = {mount["mountPath"]: mount.get("subPath") for mount in container["volumeMounts"]}
    sandbox = str(Path(container["command"][3]).parent)
    folders = [str(attempt.workspace), str(attempt.home), sandbox]
    assert mounts == {"/tmp": None, **{path: str(Path(path).relative_to(tmp_path)) for path in folders}}
