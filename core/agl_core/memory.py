"""How much memory this process takes."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def peak_rss_bytes() -> int:
    """The most memory that this process ever had resident.

    On Linux, `getrusage` counts what the parent had resident when it started this process; the kernel's own record
    of this process's memory does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        found = re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
