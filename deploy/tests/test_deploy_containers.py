"""The runners of deploy/containers are settings that agl takes, and mount what an attempt has and nothing else."""

from __future__ import annotations

import tomllib

import pytest

from agl_harnesses.workspace import WorkspaceSection

from .deployed import DEPLOY

FOLDERS = ("{workspace}", "{home}", "{sandbox}")


def section(name: str) -> WorkspaceSection:
    return WorkspaceSection.model_validate(tomllib.loads((DEPLOY / "containers" / name).read_text())["workspace"])


@pytest.mark.parametrize("name", ["docker.toml", "podman.toml"])
def test_a_container_has_the_folders_of_its_attempt_alone_and_no_network(name: str) -> None:
    command = section(name).wrap
    assert command[:3] == (name.removesuffix(".toml"), "run", "--rm")
    assert {"--network=none", "--read-only", "--cap-drop=ALL"} <= {*command}
    volumes = [word.removeprefix("--volume=").split(":") for word in command if word.startswith("--volume=")]
    assert {source: target for source, target, *_ in volumes} == {
        **{folder: folder for folder in FOLDERS},
        "{sandbox}/hosts": "/etc/hosts",
    }
    assert not section(name).network, "the gateway is reached by a socket in {sandbox}"


def test_a_job_calls_the_gateway_at_its_own_address() -> None:
    job = section("kubernetes.toml")
    assert job.network
    assert job.wrap[-3:] == FOLDERS
    assert (DEPLOY.parent / job.wrap[1]).is_file()
