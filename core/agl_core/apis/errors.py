"""The errors of a server, to which dialects give the shapes of their APIs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import orjson

from agl_core.errors import AglError, ServerError, StoreRefusedError
from agl_core.types import Json
from agl_core.types.forms import parse_json

logger = logging.getLogger(__name__)


class ApiError(ServerError):
    """An HTTP status and the fields of an OpenAI error object; `retry_after` is in seconds."""

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
        return self.code == CONTEXT_OVERFLOW


CONTEXT_OVERFLOW = "context_length_exceeded"
"""OpenAI's code, which agent frameworks recognise."""
ENGINE_FAILED = "engine_error"
"""The code of agl's own model servers when their engine cannot answer anybody."""
UPSTREAM_GONE = "upstream_gone"
"""The model server cannot be reached, broke off its reply, lost its engine, or a proxy answers in its place."""


def _away(message: str, code: str, retry_after: int) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after=retry_after)


def no_upstream() -> ApiError:
    message = "No engine serves a model now, so agl cannot answer; this call may be tried again."
    return _away(message, "no_upstream", 2)


def stopping() -> ApiError:
    return _away("agl's server is stopping.", "stopping", 2)


def store_failed() -> ApiError:
    message = "agl could not record this call, so it does not answer; its log says why. The call may be tried again."
    return _away(message, "store_failed", 5)


def as_answer(error: Exception, path: str) -> ApiError:
    """The answer to a request that raised: 422 if the store refused it, 503 for agl's errors, else a logged 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, StoreRefusedError):
        return ApiError(422, str(error), code="refused")
    if isinstance(error, AglError):
        return ApiError(503, str(error), type="server_error", code="failed", retry_after=1)
    logger.error("agl failed in %r", path, exc_info=error)
    return ApiError(500, "agl failed; the server's log says why.", type="server_error", code="gateway_failed")


def attempt_closed(rollout: str, attempt: int) -> ApiError:
    return ApiError(
        410,
        f"Attempt {attempt} of rollout {rollout} is closed: it finished, timed out or was cancelled. "
        f"This call does not count; stop the agent.",
        type="attempt_closed",
        code="attempt_closed",
    )


def openai_problem(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def read_error(payload: bytes) -> Mapping[str, Json]:
    """A model server's error, in OpenAI's shape, older vLLM's (fields at the top) or FastAPI's (`detail`)."""
    try:
        body = parse_json(payload)
        error = body.get("error", body)
        if isinstance(error, str):
            return {"message": error}
        return {"message": orjson.dumps(error["detail"]).decode(), **error} if "detail" in error else {**error}
    except (orjson.JSONDecodeError, AttributeError, TypeError):
        return {}
