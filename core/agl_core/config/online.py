"""The keys of `[online]`: which sessions of real use are recorded, and what of them."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, field_validator

from agl_core.config.sections import FOLDER_NAME, OpenSection, Section


class RedactorSection(OpenSection):
    """A redactor of your own; its settings are beside this key."""

    redactor: str | None = Field(None, description="The redactor plugin; by default the table's own name.")


class OnlineSection(Section):
    """Sessions of real use, which `agl serve` records and takes feedback on (docs/deploy-and-learn.md)."""

    upstream: str | None = Field(
        None,
        pattern=r"^https?://[^\s?#]+$",
        description="The model server that answers: an OpenAI-compatible base URL, ending in /v1. With [learn] it is "
        "absent: the run's own versions answer.",
    )
    upstream_key_env: str | None = Field(
        None, min_length=1, description="The environment variable with that server's key."
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="The model there that answers, whatever the application asks for; absent: its only one, or the one "
        "that the application asks for.",
    )
    applications: dict[str, Annotated[int, Field(ge=1)]] = Field(
        min_length=1,
        description="The applications by name, each with the number of its keys. Another number makes other keys, and "
        "the old ones invalid.",
    )
    idle_minutes: float = Field(30.0, gt=0, description="Minutes without a call after which a session has ended.")
    redact: tuple[str, ...] = Field(
        (),
        description="What is replaced in texts before they are stored: names of patterns ('email', 'card', 'phone', "
        "'ip', 'secret') and regular expressions of your own.",
    )
    redactors: dict[str, RedactorSection] = Field(
        {},
        description="Redactors of your own, which texts pass through before they are stored: by plugin name, each with "
        "its settings (docs/plugins.md).",
    )
    keep_days: float | None = Field(
        None, gt=0, description="A session is removed for good this many days after its end; absent: it is kept."
    )
    max_store_gib: float | None = Field(
        None, gt=0, description="No session is recorded while the store is larger, in GiB; absent: any size."
    )
    min_free_gib: float = Field(
        1.0, ge=0, description="No session is recorded while the store's disk has less free space, in GiB."
    )

    @field_validator("applications")
    @classmethod
    def _are_named(cls, value: dict[str, int]) -> dict[str, int]:
        for name in value:
            if not FOLDER_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot be an application's name: use letters, digits, '.', '_' and '-', and begin with "
                    f"a letter or a digit"
                )
        return value

    @field_validator("redact")
    @classmethod
    def _are_patterns(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                found = re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression ({error})") from None
            if found.match(""):
                raise ValueError(f"{pattern!r} matches an empty text, and so would change every text")
        return value
