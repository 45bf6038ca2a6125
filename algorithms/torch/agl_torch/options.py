"""The torch engine's settings. Imports no torch, so that a configuration can be checked without it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchOptions(BaseModel):
    """Settings of the embedded engine, for all its policies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the first CUDA GPU if there is one.")
    threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of the engine; absent: one per core, and a single one for sampling from a tiny model.",
    )
    start_timeout: float = Field(
        1800.0, gt=0, description="Seconds that the engine may take until it serves, the download of a model included."
    )
    max_context: int | None = Field(
        None,
        ge=16,
        description="Longest prompt and response together, in tokens; absent: the model's own limit, with LongRoPE its "
        "original one.",
    )
    max_rows: int = Field(128, ge=1, le=4096, description="Replies decoded at the same time, for each policy.")
    cache_mib: int | None = Field(
        None,
        ge=1,
        description="Memory for keys and values of running and finished replies, in MiB; absent: what max_rows replies "
        "and as many finished ones may need, at most an eighth of the device's memory.",
    )
    tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="Tokens, pads included, of one training pass; fewer take less memory and more time. Absent: as "
        "many as have 512 MiB of activations, on a GPU an eighth of its memory.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
