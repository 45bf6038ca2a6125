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


def replaced(page: str, script: str, text: str) -> str:
    """The page with this text in the place of what the script wrote before."""
    pattern = f"(?<={re.escape(f'<!-- written by {script} -->')}\n).*?(?=<!-- to here -->)"
    page, count = re.subn(pattern, lambda _: f"{text}\n", page, count=1, flags=re.DOTALL)
    assert count, f"no section is written by {script}"
    return page


def write(page: str, script: str, text: str) -> None:
    """Replace what this script wrote to a page of the documentation before."""
    file = DOCS / page
    file.write_text(replaced(file.read_text(), f"tests/benchmarks/{script}", f"\n{text}\n"))


def machine() -> str:
    import psutil  # The frameworks' own environments, which need tables only, may have none.

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{models[0] if models else platform.machine()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, "
        f"{platform.system()}, Python {platform.python_version()}"
    )
