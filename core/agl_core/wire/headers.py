"""The headers of model calls, and the path that names an attempt."""

from __future__ import annotations

HEADER_ROLLOUT = "x-agl-rollout"
"""`ROLLOUT/ATTEMPT`: which attempt a request belongs to; the same as the path prefix /rollout/R/attempt/A."""
HEADER_AGENT = "x-agl-agent"
"""Who makes the call; percent-encoded (`urllib.parse.unquote`), since headers are ASCII and names are not."""
HEADER_PARENT_SPAN = "x-agl-parent-span"
"""The span that encloses the call."""
HEADER_STATE = "x-agl-state"
"""The agent's semantic variables at the call, as `agl_core.capture.context` packs them."""
HEADER_CALL = "x-agl-call"
"""On the server's reply: the id of the call that it answers."""
HEADER_IGNORED = "x-agl-ignored"
"""On the server's reply: the fields of the request that only tune a hosted service, and were ignored."""
HEADER_POLICY = "x-agl-policy-version"
"""On an upstream's reply: the policy version that sampled it."""


def rollout_path(rollout: str, attempt: int) -> str:
    """The path prefix before /v1 in an attempt's own base URL."""
    return f"/rollout/{rollout}/attempt/{attempt}"
