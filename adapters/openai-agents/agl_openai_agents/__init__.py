"""agl's adapter for the OpenAI Agents SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_openai_agents.processor import AglProcessor as AglProcessor

__getattr__ = lazily(__name__, AglProcessor=".processor")
