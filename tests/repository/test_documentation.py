"""What the documentation says is what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from agl_core.capture.status import message_status
from agl_core.capture.status_rules import RULES
from agl_core.training.alarms import ALARMS
from agl_core.types import Evidence, Symptom

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["configuration", "cli", "llms"])
def test_generated_pages_are_up_to_date(page: str) -> None:
    command = [sys.executable, ROOT / "docs" / f"make_{page}.py", "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_page_of_tool_status_has_every_rule_in_order_and_its_examples_are_right() -> None:
    rows = [
        f"| {number} | `{rule.name}` | {rule.when} | {rule.status} | {rule.read_from} |"
        for number, rule in enumerate(RULES, 1)
    ]
    page = (ROOT / "docs" / "tool-status.md").read_text().splitlines()
    assert [line for line in page if re.match(r"\| \d", line)] == rows
    texts = RULES[[rule.name for rule in RULES].index("reported-success") + 1 :]
    for rule in texts:
        for found in re.findall(r"``(.+?)``|`([^`]+)`", rule.when.partition("; but not")[0]):
            assert message_status("".join(found).replace("…", "it")).rule == rule.name, found


def test_the_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w./-]+(?:\.py|/))`", page)) | set(re.findall(r"`([\w./-]+\.md)`", page))
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "core" / "agl_core"))]

    assert len(named) > 100
    assert sorted(missing) == []


def test_the_architecture_page_has_every_room_of_the_core() -> None:
    rooms = _table("The rooms of the core")
    folders = {f"{each.name}/" for each in (ROOT / "core" / "agl_core").iterdir() if (each / "__init__.py").exists()}

    assert sorted(folders - rooms) == []


def test_the_architecture_page_follows_one_call_in_at_most_sixty_files() -> None:
    files = _table("The path of one call")

    assert 30 <= len(files) <= 60


def _table(section: str) -> set[str]:
    """The names in the first column of a section's table."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    text = page.split(f"## {section}\n")[1].split("\n## ")[0]
    return {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(.+?)`", line.split(" | ")[0])
    }


def test_the_page_of_health_has_every_alarm_with_its_threshold_and_every_reason() -> None:
    page = (ROOT / "docs" / "health.md").read_text().splitlines()
    alarms = [
        f"| `{name}` | {kind.condition.words.format(f'{kind.condition.limit:g}') if kind.condition else kind.when} "
        f"| {kind.why} | {kind.remedy} |"
        for name, kind in ALARMS.items()
    ]
    assert [line for line in page if line.count(" | ") == 3 and line.startswith("| `")] == alarms
    reasons = [line.split("`")[1] for line in page if line.count(" | ") == 1 and line.startswith("| `")]
    assert reasons == [*Symptom, *Evidence]


def test_the_page_of_metrics_has_every_number_that_an_alarm_looks_at() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    read = {key for kind in ALARMS.values() if kind.condition for key in kind.condition.keys}
    assert [key for key in sorted(read) if f"`{key}`" not in page and not key.startswith("dropped/")] == []


def test_every_picture_is_small_and_shown_by_a_page() -> None:
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    pictures = list((ROOT / "docs" / "pictures").iterdir())

    assert pictures
    assert [each.name for each in pictures if f"pictures/{each.name})" not in pages] == []
    assert [each.name for each in pictures if each.stat().st_size > 200_000] == []
