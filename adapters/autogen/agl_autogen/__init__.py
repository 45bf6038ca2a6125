"""agl's adapter for AutoGen."""

from agl_autogen.plugin import record as record
