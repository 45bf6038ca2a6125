"""Check and measure the engines on one CUDA GPU, in ten minutes, with what is installed; see docs/gpu.md.

    python -m tests.gpu                # writes the figures into docs/gpu.md, each part's when it ends
    python -m tests.gpu --part speed   # one part; the figures of the others stay
    python -m tests.gpu --device cpu   # plays the parts small, on the CPU, and writes nothing

A part that needs something that is not installed is left out, and says so. The exit status is 1 if a part failed, or
found the GPU and the CPU further apart than rounding explains.
"""

from __future__ import annotations

import argparse
import sys

from .page import PAGE, written
from .parts import PARTS, Played, machine, missing_gpu, play


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part goes on after that many")
    names = [each.module for each in PARTS]
    parser.add_argument("--part", choices=names, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    if options.device == "cuda" and (reason := missing_gpu()):
        sys.exit(f"Nothing was run: {reason}. `python -m tests.gpu --device cpu` plays some parts on the CPU.")
    chosen = [each for each in PARTS if options.part is None or each.module in options.part]
    keep = write if options.device == "cuda" else None
    played = play(chosen, options.device, 60 * options.minutes, lambda text: print(text, flush=True), keep)
    if options.device == "cuda":
        print(f"The figures are in {PAGE}.")
    else:
        print(f"Played on: {machine('cpu')}. This is a stand-in: docs/gpu.md has figures of GPUs only.")
    return int(any(each.failed for each in played))


def write(played: Played) -> None:
    """Put it on the page; a part that was not run leaves there what was measured before."""
    if played.table is not None or played.failed:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), machine("cuda"), played), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
