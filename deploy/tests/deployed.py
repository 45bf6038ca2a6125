"""The contents of deploy/, read for its tests: manifests, pods, command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[1]
ROOT = DEPLOY.parent
CONFIGS = sorted((DEPLOY / "configs").glob("*.toml"))
_ENDS = {"&", "&&", "|", "||", ";", ")"}
_VARIABLE = re.compile(r"\$\{?(\w+)\}?")
_NUMBERS = {"SLURM_NNODES": "8", "SLURM_GPUS_ON_NODE": "8", "port": "8123", "ray_port": "6379"}


def manifests() -> list[tuple[Path, dict[str, Any]]]:
    """Every Kubernetes object, with its file; the kustomization is none."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    return [(file, document) for file in files for document in yaml.safe_load_all(file.read_text())]


def kustomization() -> dict[str, Any]:
    overlay: dict[str, Any] = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())
    return overlay


def named(kind: str, name: str) -> dict[str, Any]:
    [manifest] = [m for _, m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return manifest


def pod_templates() -> dict[str, dict[str, Any]]:
    """The pod templates of every object, by the name of their container."""
    templates = []
    for _, m in manifests():
        if m["kind"] == "RayJob":
            cluster = m["spec"]["rayClusterSpec"]
            templates += [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
            templates.append(m["spec"]["submitterPodTemplate"])
        elif "template" in m.get("spec", {}):
            templates.append(m["spec"]["template"])
    return {container(t)["name"]: t for t in templates}


def container(template: dict[str, Any]) -> dict[str, Any]:
    [only] = template["spec"]["containers"]
    return dict(only)


@dataclass(frozen=True)
class CommandLine:
    """One `agl …` as somebody would type it, with a value for each variable."""

    source: str
    words: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """The values of --set."""
        pairs = zip(self.words, (*self.words[1:], ""), strict=True)
        spelled = [after for word, after in pairs if word == "--set"]
        return spelled + [word.removeprefix("--set=") for word in self.words if word.startswith("--set=")]


def command_lines() -> Iterator[CommandLine]:
    """Every `agl …` and `train-or-resume …` in scripts, manifests and documentation."""
    for name, template in pod_templates().items():
        if (words := container(template).get("args")) is not None:
            assert words[0] == "agl"
            yield CommandLine(name, tuple(words[1:]))
    yield from _lines("rayjob.yaml", named("RayJob", "agl-train")["spec"]["entrypoint"])
    for file in ("slurm/train.sbatch", "train-or-resume"):
        yield from _lines(Path(file).name, (DEPLOY / file).read_text())
    for file in [DEPLOY / "README.md", *CONFIGS]:
        text = file.read_text()
        blocks = [block for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if kind != "text"]
        comments = re.findall(r"^#     (agl .*)$", text, re.MULTILINE)
        spans = re.findall(r"`(agl \w+ [^`]+)`", text) if file.suffix == ".md" else []
        for part in [*blocks, *comments, *spans]:
            yield from _lines(file.name, part)


def _lines(source: str, text: str) -> Iterator[CommandLine]:
    for line in text.replace("\\\n", " ").splitlines():
        if not re.search(r"\bagl\b|train-or-resume", line) or line.lstrip().startswith("#"):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words = list(lexer)
        for at, word in enumerate(words):
            if word == "agl" and at + 1 < len(words) and words[at + 1] in ("serve", "train", "worker", "eval"):
                yield CommandLine(source, _until_end(words[at + 1 :]))
            elif Path(word).name == "train-or-resume" and at + 3 < len(words):
                config, _, _, *options = _until_end(words[at + 1 :])
                yield CommandLine(source, ("train", config, *options))


def _until_end(words: list[str]) -> tuple[str, ...]:
    """The words of one command, with values for its variables."""
    end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
    return tuple(_VARIABLE.sub(_value, word) for word in words[:end] if word != "$@")


def _value(variable: re.Match[str]) -> str:
    return _NUMBERS.get(variable[1], "x")
