"""The README's configurations and functions, as a run would score with them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from agl_core import kinds
from agl_core.capture import message_status

README = Path(__file__).parents[1] / "README.md"


def configurations() -> list[dict[str, Any]]:
    return [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", README.read_text(), re.DOTALL)]


def test_every_reward_table_of_the_readme_is_valid(make: Any) -> None:
    tables = [table for c in configurations() for table in c.get("rewards", {}).items()]
    assert len(tables) >= 6
    for name, table in tables:
        settings = {key: value for key, value in table.items() if key not in ("rule", "weight")}
        make.rule(kinds.REWARD, table.get("rule", name), **settings)


def test_the_table_of_what_messages_are_read_as_is_right() -> None:
    rows = dict(re.findall(r"^\| (.*?) \| (error|timeout|ok) \|$", README.read_text(), re.MULTILINE))
    assert len(rows) == 4
    for said, status in rows.items():
        for text in re.findall(r"`([^`]+)`", said.partition("; but not")[0]):
            assert str(message_status(text.replace("…", "it")).status) == status, text
