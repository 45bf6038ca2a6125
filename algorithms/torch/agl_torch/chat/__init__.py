"""Chat for a model by its own rules: its template, its tool-call format, and exact ids of echoed replies."""

from agl_torch.chat.formats import FORMATS, Parsed, ToolCall, ToolFormat, detect_format
from agl_torch.chat.messages import ChatError
from agl_torch.chat.sessions import Prompt, Sessions
from agl_torch.chat.text import ChatText

__all__ = [
    "FORMATS",
    "ChatError",
    "ChatText",
    "Parsed",
    "Prompt",
    "Sessions",
    "ToolCall",
    "ToolFormat",
    "detect_format",
]
