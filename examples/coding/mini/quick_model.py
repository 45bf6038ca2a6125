"""A model for mini-swe-agent, by its setting `model.model_class`, that starts in a second; litellm takes ten."""

from __future__ import annotations

import os
from typing import Any

from minisweagent.models.openrouter_model import OpenRouterModel


class QuickModel(OpenRouterModel):
    """Sends its requests, which are OpenAI's, where OPENAI_BASE_URL says."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
