"""A run on a small disk that gets full, which `unshare -rm python -m tests.faults.full_disk FOLDER SEED` may mount.

The disk is filled up to a random rest, training says that it is full, space is made, and training goes on to its end.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .fault_checks import check_acknowledged, check_ended, wait_for_replies
from .fault_run import TRAINER, TinyRun

FULL = "cannot grow: the disk is full. Free some space"
MEBIBYTE = 2**20
CHUNK = 2**14
LONGEST = 5.0
"""Seconds that the disk stays full."""


def main() -> None:
    root, chance = Path(sys.argv[1]), random.Random(int(sys.argv[2]))
    disk = root / "runs"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={8 * MEBIBYTE}", "tmpfs", str(disk)], check=True)
    run = TinyRun(root)
    try:
        run.start()
        wait_for_replies(run, chance.randint(1, 20))
        ballast = disk / "ballast"
        _fill(ballast, rest=int(chance.uniform(0, 0.2) * MEBIBYTE))
        log = run.trainer.log
        run.until(lambda: FULL in log.read_text(errors="replace"), "the log said that the disk is full", may_end=True)
        time.sleep(chance.uniform(0, LONGEST))
        check_acknowledged(run)
        ballast.unlink()
        if not run.trainer.running:
            assert run.trainer.process.returncode == 2, run.trainer.output()
            run.begin(TRAINER)
        wait_for_replies(run, 5)
        check_ended(run, run.finish_after(2))
    finally:
        run.stop()


def _fill(ballast: Path, rest: int) -> None:
    """Leave at most that many bytes of the disk; the run, which writes meanwhile, may take the last of them first."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while shutil.disk_usage(ballast.parent).free > rest:
            file.write(bytes(CHUNK))


if __name__ == "__main__":
    main()
