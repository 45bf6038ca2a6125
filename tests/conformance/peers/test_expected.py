"""What is expected of other projects' suites, without running them."""

from __future__ import annotations

import pytest

from .suites import PASSES, SUITES, Suite


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.distribution)
def test_each_test_is_listed_once_and_what_does_not_pass_has_a_reason(suite: Suite) -> None:
    groups = suite.expected.groups
    tests = [test for group in groups.values() for test in group]
    assert len(tests) == len(set(tests))
    assert groups[PASSES]
    assert [reason for reason in groups if reason.startswith(("failed", "skipped:"))] == [], "sort these"
