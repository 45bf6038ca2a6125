"""The figures of a benchmark as tables in Markdown, and in the page that shows them."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def table(head: str, rows: Iterable[str]) -> str:
    """A table of rows whose cells are separated by ` | `."""
    lines = [f"| {row} |" for row in (head, *rows)]
    lines.insert(1, "|" + "---|" * (head.count("|") + 1))
    return "\n".join(lines)


def write(page: str, script: str, text: str) -> None:
    """Replace what this script wrote to a page of the documentation before."""
    begin, end = f"<!-- written by tests/benchmarks/{script} -->", "<!-- to here -->"
    file = DOCS / page
    pattern = f"(?<={re.escape(begin)}\n).*?(?=\n{end})"
    file.write_text(re.sub(pattern, lambda _: f"\n{text}\n", file.read_text(), count=1, flags=re.DOTALL))


def machine() -> str:
    """The machine that the figures were measured on."""
    import psutil  # The frameworks' own environments, which need tables only, may have none.

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{models[0] if models else platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()}, Python {platform.python_version()}"
    )
