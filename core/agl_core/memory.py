"""How much memory this process and those below it take."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most memory that this process ever had resident.

    On Linux, `getrusage` counts what the parent had resident when it started this process; the kernel's own record
    of this process's memory does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        peak_kib = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if peak_kib:
            return int(peak_kib[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def descendants_bytes() -> int:
    """Bytes that the processes below this one have resident now; a page that some share counts once.

    0 where there is no /proc.
    """
    children: defaultdict[int, list[int]] = defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # A process may end meanwhile.
            children[int(status.read_text().rpartition(")")[2].split()[1])].append(int(status.parent.name))
    resident, below = 0, list(children[os.getpid()])
    while below:
        pid = below.pop()
        below += children[pid]
        with suppress(OSError):
            pages = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            resident += int(pages[1]) * 1024 if pages else 0
    return resident
