"""A process with everything it started, as one thing that can be ended.

On Linux nothing escapes: the process is told to adopt whatever of it is orphaned, so that what it started stays below
it, sessions of their own included. Elsewhere its process group is what is ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on this process is the parent of every descendant whose own parent ends (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lead_tree() -> None:
    """Make this process the root of a tree of its own, which ends with the thread that forked it (Linux)."""
    os.setsid()
    adopt_orphans()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def signal_tree(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that leads a tree, and to its group; what has left the group follows when it ends."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def children_of_this() -> list[int]:
    """The processes whose parent this one is, by birth or adoption (Linux; elsewhere none are found)."""
    found = []
    if sys.platform == "linux":
        this = str(os.getpid()).encode()
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    # pid (command) state parent …; a command may contain anything.
                    if Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()[1] == this:
                        found.append(int(name))
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
