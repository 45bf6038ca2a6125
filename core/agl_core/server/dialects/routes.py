"""The model APIs by their routes."""

from __future__ import annotations

from collections.abc import Mapping

from agl_core.server.dialects.chat import ChatCompletions
from agl_core.server.dialects.completions import Completions
from agl_core.server.dialects.dialect import Dialect
from agl_core.server.dialects.messages import Messages
from agl_core.server.dialects.responses import Responses

DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": ChatCompletions(),
    "/v1/responses": Responses(),
    "/v1/responses/input_tokens": Responses(counts=True),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": Messages(counts=True),
    "/v1/completions": Completions(),
}
