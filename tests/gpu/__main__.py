"""Check and measure the engines on one CUDA GPU, in ten minutes, with what is installed; see docs/gpu.md.

    python -m tests.gpu                # writes the figures into docs/gpu.md
    python -m tests.gpu --device cpu   # plays the torch engine's parts small, on the CPU, and writes nothing

A part that needs something that is not installed is left out, and says so. The exit status is 1 if a part failed, or
found the GPU and the CPU further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import sys

from .page import PAGE, written
from .parts import PARTS, machine, missing_gpu, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part goes on after that many")
    options = parser.parse_args()
    if options.device == "cuda" and (reason := missing_gpu()):
        sys.exit(f"Nothing was run: {reason}. `python -m tests.gpu --device cpu` plays some parts on the CPU.")
    played = play(PARTS, options.device, 60 * options.minutes, lambda text: print(text, flush=True))
    if options.device == "cuda":
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), machine("cuda"), played), encoding="utf-8")
        print(f"The figures are in {PAGE}.")
    else:
        print(f"Played on: {machine('cpu')}. This is a stand-in: docs/gpu.md has figures of GPUs only.")
    return int(any(each.failed for each in played))


if __name__ == "__main__":
    sys.exit(main())
