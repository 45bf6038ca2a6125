"""Check and measure the torch engine on one CUDA GPU, in ten minutes, with what is installed; see docs/performance.md.

    python -m tests.gpu                # prints the figures in Markdown, each part's when it ends
    python -m tests.gpu --part speed   # one part; may be repeated
    python -m tests.gpu --device cpu   # plays the parts small, on the CPU

The engine is used as a run uses it: its process is started, asked over HTTP, and updated with its own replies. The exit
status is 1 if a part failed, or found the GPU and the CPU further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
from transformers.utils import logging as transformers_logging

from .agreement import agreement
from .kit import Setup, Table
from .speed import speed

Part: TypeAlias = Callable[[Setup], Awaitable[Table]]
PARTS: Mapping[str, Part] = {"agreement": agreement, "speed": speed}


def play(part: Part, device: str, folder: Path, deadline: float) -> tuple[str, bool]:
    """Play a part: its text in Markdown, and whether it went well. It stops no other part."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        return "Not run: the time was over.", True
    folder.mkdir()
    began = time.monotonic()
    try:
        table = asyncio.run(asyncio.wait_for(part(Setup(device, folder, folder.parent / "models")), remaining))
    except Exception as error:
        traceback.print_exc()
        return f"**It failed: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}**", False
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    paragraphs = ["\n".join(f"| {' | '.join(line)} |" for line in lines), *(f"**{text}**" for text in table.beyond)]
    return "\n\n".join([*paragraphs, f"It took {time.monotonic() - began:.0f} s."]), not table.beyond


def machine(device: str) -> str:
    """The conditions of the measurement: the device, the versions, the date."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}; {time.strftime('%d %B %Y')}"
    if device == "cpu":
        return f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), {versions}"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB), CUDA {torch.version.cuda}, {versions}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part goes on after that many")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"Nothing was run: no CUDA GPU: torch {torch.__version__} finds none. --device cpu plays on the CPU.")
    transformers_logging.disable_progress_bar()
    deadline, went_well = time.monotonic() + 60 * options.minutes, True
    print(f"Measured on: {machine(options.device)}.\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="agl-gpu-") as folder:
        for name in options.part or PARTS:
            text, good = play(PARTS[name], options.device, Path(folder) / name, deadline)
            print(f"### {PARTS[name].__doc__}\n\n{text}\n", flush=True)
            went_well = went_well and good
    return int(not went_well)


if __name__ == "__main__":
    sys.exit(main())
