"""A run on a small disk that gets full, which `unshare -rm python -m tests.faults.full_disk FOLDER SEED` may mount.

The disk is filled up to a random rest, training says that it is full, space is made, and training goes on to its end.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from .fault_checks import check_acknowledged, check_ended
from .fault_run import PATIENCE, HungError, TinyRun
from .fault_storm import wait_for_replies

FULL = "cannot grow: the disk is full. Free some space"
MEBIBYTE = 2**20
CHUNK = 2**14
LONGEST = 5.0
"""Seconds that the disk stays full."""


def main() -> None:
    place, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    disk = place / "runs"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={8 * MEBIBYTE}", "tmpfs", str(disk)], check=True)
    run = TinyRun(place)
    try:
        run.start()
        wait_for_replies(run, chance.randint(1, 20))
        ballast = disk / "ballast"
        _fill(ballast, rest=int(chance.uniform(0, 0.2) * MEBIBYTE))
        _wait(run, lambda: FULL in run.trainer.log.read_text(errors="replace"), "the log said that the disk is full")
        time.sleep(chance.uniform(0, LONGEST))
        check_acknowledged(run)
        ballast.unlink()
        if not run.trainer.running:
            assert run.trainer.process.returncode == 2, run.trainer.tail()
            run.begin(run.trainer.name)
        wait_for_replies(run, 5)
        check_ended(run, run.finish_after(2))
    finally:
        run.stop()


def _wait(run: TinyRun, condition: Callable[[], bool], what: str) -> None:
    """Like `run.until`, but training may end meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise HungError(f"{what} did not come\n{run.diagnosis()}")
        time.sleep(0.1)


def _fill(ballast: Path, rest: int) -> None:
    """Leave at most that many bytes of the disk; the run, which writes meanwhile, may take the last of them first."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while _free(ballast.parent) > rest:
            file.write(bytes(CHUNK))


def _free(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_bsize


if __name__ == "__main__":
    main()
