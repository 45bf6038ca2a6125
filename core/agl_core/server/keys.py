"""API keys: agents and workers each have their own."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from agl_core.server.faults import ApiError


def check_key(request: Request, key: str, *, hint: str) -> None:
    """Compare the request's key with `key`, in constant time; `hint` says where the right one comes from.

    It is the bearer token or, as many of Anthropic's clients send it, `x-api-key`; where both are sent, one is enough.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    sent = [token.strip() if scheme.lower() == "bearer" else "", request.headers.get("x-api-key", "")]
    if not any(hmac.compare_digest(each.encode(), key.encode()) for each in sent):
        found = "is not the right one" if token or any(sent) else "is missing"
        raise ApiError(
            401, f"The API key (Authorization: Bearer …, or x-api-key) {found}. {hint}", code="invalid_api_key"
        )
