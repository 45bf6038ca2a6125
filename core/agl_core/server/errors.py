"""The errors that the server answers with. A dialect, or the control plane, gives each the shape of its API."""

from __future__ import annotations

import logging

from agl_core.errors import ServerError

logger = logging.getLogger(__name__)


class ApiError(ServerError):
    """One answer other than 200: an HTTP status and the fields of an OpenAI error object.

    `retry_after` is how many seconds the client should wait before it tries again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.type, self.param, self.code = status, message, type, param, code
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @property
    def is_context_overflow(self) -> bool:
        """Whether the prompt was longer than the model's context."""
        return self.code == CONTEXT_OVERFLOW


CONTEXT_OVERFLOW = "context_length_exceeded"
"""OpenAI's code; agent frameworks recognise it."""


NO_UPSTREAM = "no_upstream"
"""No engine serves now."""
UPSTREAM_GONE = frozenset({"upstream_down", "upstream_broken", "upstream_away"})
"""The model server cannot be reached, broke off its reply, or a proxy answers in its place."""
STOPPING = "stopping"
STORE_FAILED = "store_failed"
"""The store could not be written: its disk is full, for instance."""


def no_upstream() -> ApiError:
    """The answer to a model call while there is no engine."""
    return ApiError(
        503,
        "No engine serves a model now, so agl cannot answer; this call may be tried again.",
        type="server_error",
        code=NO_UPSTREAM,
        retry_after=2,
    )


def stopping() -> ApiError:
    """The answer to what the server's end cuts off."""
    return ApiError(503, "agl's server is stopping.", type="server_error", code=STOPPING, retry_after=2)


def store_failed() -> ApiError:
    """The answer to a model call that could not be recorded."""
    return ApiError(
        503,
        "agl could not record this call, and so does not answer it; the server's log says why. It may be tried again.",
        type="server_error",
        code=STORE_FAILED,
        retry_after=5,
    )


def as_answer(error: Exception, path: str) -> ApiError:
    """The answer to a model call that ended in an error; one that is not an answer yet is logged."""
    if isinstance(error, ApiError):
        return error
    logger.error("agl failed in %r", path, exc_info=error)
    return ApiError(500, "agl failed; the server's log says why.", type="server_error", code="gateway_failed")


def attempt_closed(rollout: str, attempt: int) -> ApiError:
    """The answer to every call of an attempt that has ended."""
    return ApiError(
        410,
        f"Attempt {attempt} of rollout {rollout} is closed: it finished, timed out or was cancelled. "
        f"This call does not count; stop the agent.",
        type="attempt_closed",
        code="attempt_closed",
    )
