"""API keys: agents and workers each have their own."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from agl_core.server.faults import ApiError


def check_key(request: Request, key: str, *, hint: str) -> None:
    """Compare the request's bearer token with `key`, in constant time; `hint` says where the right one comes from."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), key.encode()):
        found = "is not the right one" if token else "is missing"
        raise ApiError(401, f"The API key (Authorization: Bearer …) {found}. {hint}", code="invalid_api_key")
