"""The benchmark of judges, and the table in the page on rewards that it wrote."""

from __future__ import annotations

from tests.benchmarks import judging, tables


async def test_the_page_shows_its_figures() -> None:
    page = (tables.DOCS / judging.PAGE).read_text()
    written = tables.replaced(page, "tests/benchmarks/judging.py", f"\n{await judging.figures()}\n")
    assert written == page, "python -m tests.benchmarks.judging --write"
