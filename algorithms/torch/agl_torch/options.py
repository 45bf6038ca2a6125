"""The torch engine's settings. Imports no torch, so that a configuration can be checked without it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchOptions(BaseModel):
    """Settings of the embedded engine, for all its policies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the first CUDA GPU if there is one.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of the engine; absent: one per core.")
    max_context: int | None = Field(
        None, ge=16, description="Longest prompt and response together, in tokens; absent: what the model can."
    )
    max_rows: int = Field(64, ge=1, le=4096, description="Replies decoded at the same time, for each policy.")
    cache_mib: int = Field(256, ge=1, description="Memory for keys and values of running and finished replies, in MiB.")
    tokens_per_micro_batch: int = Field(
        2048,
        ge=1,
        description="Tokens, pads included, of one training pass; fewer take less memory and more time.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )
