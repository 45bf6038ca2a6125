"""What every table of a run's file is made of: known keys, a plugin's own keys, names and patterns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agl_core.kinds import Kind

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
"""A model's name on the Hugging Face hub, as a whole match."""
FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""The name of a run or a policy, as a whole match: folders are named so."""


def is_among(agent: str | None, patterns: Sequence[str]) -> bool:
    """Whether an agent has one of these names; `*`, `?` and `[…]` in them are wildcards, upper case counts.

    A call whose agent is unknown has the empty name, so that `*` is everybody.

    >>> is_among("editor-2", ["writer", "editor*"]), is_among("critic", ["writer"]), is_among(None, ["*"])
    (True, False, True)
    """
    return any(fnmatchcase(agent or "", pattern) for pattern in patterns)


class Section(BaseModel):
    """A table of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OpenSection(BaseModel):
    """A table whose further keys are a plugin's settings, which the plugin checks."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class PluginTable(OpenSection):
    """A table that names a component by its own name, or by one of its keys; the settings are beside that."""

    kind: ClassVar[Kind]
    named_by: ClassVar[str | None] = None
    """The key that can name the component instead of the table's own name."""


class PluginChoice(OpenSection):
    """`name` chooses a plugin, and a table of that name holds its settings. A table that stands alone is chosen."""

    name: str = Field(
        description="The plugin to use; its settings are in the table of this name. Not needed beside one table alone."
    )

    @model_validator(mode="before")
    @classmethod
    def _name_by_table(cls, section: Any) -> Any:
        if not isinstance(section, dict) or "name" in section:
            return section
        tables = [name for name, value in section.items() if isinstance(value, dict)]
        return {"name": tables[0], **section} if len(tables) == 1 else section

    @property
    def tables(self) -> dict[str, Any]:
        """The settings by plugin name, as written in the file."""
        return dict(self.model_extra or {})

    @property
    def settings(self) -> dict[str, Any]:
        chosen = self.tables.get(self.name, {})
        return dict(chosen) if isinstance(chosen, dict) else {}
