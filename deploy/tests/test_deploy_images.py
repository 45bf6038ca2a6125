"""The Dockerfile: what its images are for, and what of the repository can be in them."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from pathspec import PathSpec

from .deployed import DEPLOY, ROOT, container, named, pod_templates

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
IGNORED = PathSpec.from_lines("gitignore", (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines())
"""Docker reads these patterns as Git does: each begins with `**/` or has a slash inside."""
COPIED = re.findall(r"^COPY (?:--\S+ )?(\S+) \S+$", DOCKERFILE, re.MULTILINE)
AGENTS = ["my_agent", "team/agents/my_agent", "tests/my_agent", "examples/calc", "deploy/agents/mine", "core/agents"]


def test_images_are_built_by_the_dockerfile() -> None:
    built = dict(re.findall(r"--target (\w+)\s+-t (\S+)", DOCKERFILE))
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)
    assert set(built) == set(stages)
    trainers = ("ray-head", "ray-worker", "ray-job-submitter")
    kinds = {"worker": "worker", **dict.fromkeys(trainers, "trainer")}
    assert {name: container(template)["image"] for name, template in pod_templates().items()} == {
        name: built[target] for name, target in kinds.items()
    }


def test_the_trainers_image_has_the_versions_that_are_known_to_work() -> None:
    pinned = dict(re.findall(r"([\w-]+)(?:\[\w+\])?\"?==([\w.]+)", DOCKERFILE.replace('"ray[default]', "ray")))
    project = tomllib.loads((ROOT / "algorithms" / "verl" / "pyproject.toml").read_text())["project"]
    required = map(Requirement, [*project["dependencies"], *project["optional-dependencies"]["gpu"]])
    exact = [one for one in required if str(one.specifier).startswith(("~=", "=="))]
    assert len(exact) == 7
    assert all(one.specifier.contains(pinned[one.name]) for one in exact)
    assert named("RayJob", "agl-train")["spec"]["rayClusterSpec"]["rayVersion"] == pinned["ray"]


def test_the_trainers_image_pins_what_these_stand_on() -> None:
    trainer = DOCKERFILE.partition("AS trainer")[2].replace("\\\n", " ")
    installs = [line for line in trainer.splitlines() if re.search(r"vllm==|\./core", line)]
    assert len(installs) == 2
    assert all("pip install -c constraints.txt " in line for line in installs)


NOT_COPIED = re.compile(
    r"(^|/)(__pycache__|\.\w+_cache|[^/]+\.egg-info)/|^(core|server|rewards|(adapters|algorithms|apps)/[^/]+)/tests/"
)


def files(source: str) -> list[str]:
    """The files that are there, but for what a machine makes and the packages' tests."""
    there = [ROOT / source, *(ROOT / source).rglob("*")]
    names = [path.relative_to(ROOT).as_posix() for path in there if path.is_file()]
    return [name for name in names if not NOT_COPIED.search(name)]


@pytest.mark.parametrize("source", sorted({path.replace("${AGENT}", "examples/calc") for path in COPIED}))
def test_images_copy_what_the_build_context_has(source: str) -> None:
    assert files(source)
    assert [path for path in files(source) if IGNORED.match_file(path)] == []


@pytest.mark.parametrize("folder", AGENTS)
def test_the_agent_may_be_any_folder_below_the_repository(folder: str) -> None:
    """`--build-arg AGENT=…`"""
    assert COPIED.count("${AGENT}") == len(re.findall("^ARG AGENT=", DOCKERFILE, re.MULTILINE)) == 2
    for file in (
        "agent.py",
        "train.toml",
        "policy/model.safetensors",
        "tools/keys.py",
        "tests/data.jsonl",
        "tokens.json",
    ):
        assert not IGNORED.match_file(f"{folder}/{file}")


@pytest.mark.parametrize("folder", ["", *(f"{agent}/" for agent in AGENTS)])
def test_no_keys_and_nothing_of_this_machine_is_copied(folder: str) -> None:
    for file in (
        ".git/config", ".venv/bin/python", ".venv-verl/pyvenv.cfg", "runs/calc/store.sqlite", "runs/calc/server.json",
        "server.json", ".env", ".env.local", "prod.env", ".envrc", "tls.key", "ca.pem", "id_rsa", "id_ed25519.pub",
        ".ssh/config", ".aws/credentials", ".kube/config", "kubeconfig.yaml", ".netrc", ".docker/config.json",
        ".pypirc", "client_secret_1.json", "secrets.yaml", "secrets.toml", "credentials.json",
        "__pycache__/agent.pyc", ".pytest_cache/README.md", "agent.egg-info/PKG-INFO", "agl-7.log", ".git-credentials",
    ):  # fmt: skip
        assert IGNORED.match_file(folder + file), folder + file
