"""The state that an agent's code sets: it travels with each call, as a header."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import zlib
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agl_core
from agl_core.capture import AttemptContext, Recording, jsonable, running, unpack_variables
from agl_core.capture.context import packed_variables
from agl_core.testing.server import attached_stack

values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=30) | st.binary(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(str.isidentifier), values, max_size=4))
def test_any_state_travels_as_a_header(variables: dict[str, Any]) -> None:
    with running(AttemptContext("r", 0, "http://127.0.0.1:9", "no key", Recording())):
        agl_core.state(**variables)
        packed = packed_variables()
    assert (packed is None) == (not variables)
    assert (unpack_variables(packed) or {}) == {name: jsonable(value) for name, value in variables.items()}


async def test_state_is_that_of_the_call_and_bounded() -> None:
    noise = "".join(chr(c) for c in random.Random(1).choices(range(0x4E00, 0x9FFF), k=40_000))

    async def ask(client: openai.AsyncOpenAI, text: str) -> None:
        await client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}])

    async def agent(client: openai.AsyncOpenAI, name: str) -> None:
        agl_core.state(who=name, draft=["a"])
        await ask(client, name)
        agl_core.state(draft=None)
        await ask(client, name)

    async with attached_stack() as stack:
        attempt = await stack.attempt()
        client = stack.client(attempt.key)
        with attempt.running():
            await ask(client, "before")
            await asyncio.gather(agent(client, "x"), agent(client, "y"))
            agl_core.state(who="nobody", noise=noise, after="kept", **dict.fromkeys("abc", noise))
            await ask(client, "noise")
        calls = await attempt.calls()
    states = {name: [c.state for c in calls if c.request["messages"][-1]["content"] == name] for name in "xy"}
    assert calls[0].state is None
    for name, of_agent in states.items():
        assert of_agent == [{"who": name, "draft": ["a"]}, {"who": name, "draft": None}]
    [cut] = [c.state for c in calls if c.request["messages"][-1]["content"] == "noise"]
    assert len(json.dumps(cut, ensure_ascii=False).encode()) <= 16_384
    assert re.fullmatch(r".{100,}… \(\d+ more characters\)", cut["noise"])
    assert cut["noise"][:100] == noise[:100]
    assert (cut["who"], cut["after"]) == ("nobody", "kept")


@pytest.mark.parametrize("header", ["", "%%%", "AAAA", "eJyLBgABFwC5", "x" * 100])
def test_a_state_header_that_is_none_is_passed_over(header: str) -> None:
    assert unpack_variables(header) is None


def test_a_state_header_that_swells_is_cut_off() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(b'{"a": "' + b"x" * (1 << 26) + b'"}')).decode()
    assert unpack_variables(bomb) is None
