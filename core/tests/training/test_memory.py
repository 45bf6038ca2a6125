"""Memory is counted for the process itself, or for those below it."""

from __future__ import annotations

import subprocess
import sys

MIB = 2**20


def run(code: str) -> list[int]:
    """The numbers that a process of its own prints."""
    code = f"from agl_core.training.child import descendants_bytes, peak_rss_bytes\n{code}"
    return [int(n) for n in subprocess.check_output([sys.executable, "-c", code], text=True).split()]


def test_what_was_allocated_is_counted_also_after_it_was_freed() -> None:
    before, after = run(
        f"print(peak_rss_bytes())\ntaken = bytearray(b'x' * {128 * MIB})\ndel taken\nprint(peak_rss_bytes())"
    )
    assert after >= before + 128 * MIB


def test_a_child_does_not_count_what_its_parent_had() -> None:
    taken = bytearray(b"x") * (256 * MIB)
    [peak] = run("print(peak_rss_bytes())")
    assert peak < len(taken)


def test_a_grandchild_counts_and_the_process_itself_does_not() -> None:
    grandchild = f"taken = b'x' * {128 * MIB}; print(1, flush=True); input()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    alone, with_it, after = run(
        f"import subprocess, sys\n"
        f"own = b'x' * {128 * MIB}\n"
        f"print(descendants_bytes())\n"
        f"below = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=-1, stdout=-1)\n"
        f"below.stdout.readline()\n"
        f"print(descendants_bytes())\n"
        f"below.communicate(b'\\n')\n"
        f"print(descendants_bytes())"
    )
    assert (alone, after) == (0, 0)
    assert 128 * MIB < with_it < 256 * MIB
