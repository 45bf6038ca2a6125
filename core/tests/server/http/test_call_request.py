"""The headers of a model call's request are those that Starlette finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from agl_core.server.routes import CallRequest

NAMES = ("authorization", "x-agl-agent", "x-api-key", "accept")


async def receive() -> Message:
    raise AssertionError("nothing is read")


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.text(st.characters(max_codepoint=255)))),
    st.sampled_from(["X-API-Key", *NAMES]),
)
def test_headers_are_found_as_starlette_finds_them(sent: list[tuple[str, str]], name: str) -> None:
    scope = {"type": "http", "headers": [(each.encode(), value.encode("latin-1")) for each, value in sent]}
    found, expected = CallRequest(scope, receive).headers, Request(scope).headers

    assert found.get(name) == expected.get(name)
    assert found.get(name, "none") == expected.get(name, "none")
    assert (name in found) is (name in expected)
    assert found.items() == expected.items()
