"""What a run's data can be written as."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """The formats of `agl export`."""

    PARQUET = "parquet"
    JSONL = "jsonl"
    HF = "hf"
    CSV = "csv"
    SFT = "sft"
    PREFERENCES = "preferences"

    @property
    def is_tables(self) -> bool:
        """Whether it is a folder of tables; otherwise it is one file of conversations."""
        return self not in (Format.SFT, Format.PREFERENCES)
