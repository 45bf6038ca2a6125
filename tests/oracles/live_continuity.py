"""docs/continuity.md says what the templates of model families carry over. Needs TRL, which keeps those templates."""

from __future__ import annotations

from .continuity import PAGE, page


def test_the_page_is_what_the_templates_give() -> None:
    assert PAGE.read_text() == page()
