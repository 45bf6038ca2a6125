"""What is expected of other projects' suites, without running them."""

from __future__ import annotations

import pytest

from .suites import PASSES, SUITES, VARIES, Expected, Suite


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.distribution)
def test_each_test_is_listed_once_and_what_does_not_pass_has_a_reason(suite: Suite) -> None:
    groups = suite.expected.groups
    tests = [test for group in groups.values() for test in group]
    assert len(tests) == len(set(tests))
    assert groups[PASSES]
    assert [reason for reason in groups if reason.startswith(("failed", "skipped:"))] == [], "sort these"


def test_news_of_a_suite_are_differences() -> None:
    expected = Expected(
        "1", {PASSES: ("fine", "broken", "lost"), "needs a model": ("known", "mended"), VARIES: ("by luck",)}
    )
    outcomes = {
        "fine": "passed",
        "broken": "failed: x",
        "known": "failed: y",
        "mended": "passed",
        "more": "passed",
        "by luck": "passed",
    }
    assert set(expected.differences(outcomes)) == {
        "broken failed: x",
        "mended passed",
        "more is new: passed",
        "lost is gone",
    }
    updated = expected.updated(outcomes)
    assert list(updated.differences(outcomes)) == []
    assert updated.groups == {
        PASSES: ("fine", "mended", "more"),
        "failed: x": ("broken",),
        "needs a model": ("known",),
        VARIES: ("by luck",),
    }
