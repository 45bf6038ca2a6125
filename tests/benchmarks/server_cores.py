"""One core for the server, another for who asks it: what is measured is then the server alone."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

import psutil


def cores() -> tuple[list[str], list[str]]:
    """What `pin` takes for the server, and for client and upstream; nothing where there is one core, or no pinning."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return ([], []) if len(available) < 2 else ([str(available[0])], [str(available[1])])


def pin(arguments: Sequence[str]) -> None:
    """Run on this core only."""
    if arguments:
        os.sched_setaffinity(0, {int(core) for core in arguments})


def machine() -> str:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{models[0] if models else platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()}, Python {platform.python_version()}"
    )
