"""What the gateway refuses or fails at, before a dialect gives it its API's shape."""

from __future__ import annotations

from agl_core.errors import ServerError


class ApiError(ServerError):
    """One answer other than 200: an HTTP status and the fields of an OpenAI error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code

    @property
    def is_context_overflow(self) -> bool:
        """Whether the prompt was longer than the model's context."""
        return self.code == CONTEXT_OVERFLOW


CONTEXT_OVERFLOW = "context_length_exceeded"
"""OpenAI's code; agent frameworks recognise it."""


def attempt_closed(rollout: str, attempt: int) -> ApiError:
    """The answer to every call of an attempt that has ended."""
    return ApiError(
        410,
        f"Attempt {attempt} of rollout {rollout} is closed: it finished, timed out or was cancelled. "
        f"This call does not count; stop the agent.",
        type="attempt_closed",
        code="attempt_closed",
    )
