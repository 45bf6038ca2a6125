"""The OTLP protocol over HTTP: encodings, addresses, keys, and everything that is malformed."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.trace import StatusCode, Tracer

from agl_core.apis.errors import ApiError
from agl_core.errors import StoreError
from agl_core.types import AttemptKey, ToolStatus
from agl_core.types.forms import to_json
from agl_core.wire import MAX_VALUES
from agl_otel.intake import _decoded
from agl_otel.spans import SpanTree, see
from agl_server.http.listening import MAX_AGENT_BODY
from agl_server.testing import Stack

from .otlp_intake import JSON, PROTOBUF, exported, post


def tools(tracer: Tracer) -> None:
    """Two runs of tools in an agent, the second of which fails."""
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "Übersetzer"}
    tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.call.id": "c1", "gen_ai.tool.call.result": '{"n": 1}'}
    with tracer.start_as_current_span("invoke_agent", attributes=agent):
        tracer.start_span("execute_tool look_up", attributes=tool).end()
        failing = tracer.start_span("execute_tool fail", attributes={"gen_ai.operation.name": "execute_tool"})
        failing.set_status(StatusCode.ERROR, "no such table")
        failing.end()


def as_json(request: Any) -> dict[str, Any]:
    """OTLP's JSON by its specification: protobuf's, but ids are hexadecimal and enums are numbers."""
    body: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    plain = [s for resource in request.resource_spans for scope in resource.scope_spans for s in scope.spans]
    written = [s for resource in body["resourceSpans"] for scope in resource["scopeSpans"] for s in scope["spans"]]
    for span, as_text in zip(plain, written, strict=True):
        as_text.update(traceId=span.trace_id.hex(), spanId=span.span_id.hex())
        if span.parent_span_id:
            as_text["parentSpanId"] = span.parent_span_id.hex().upper()
    return body


def refused(response: httpx.Response) -> tuple[int, str]:
    """How many spans a reply says were refused, and why."""
    assert response.status_code == 200
    assert response.headers["content-type"] == PROTOBUF
    reply = ExportTraceServiceResponse.FromString(response.content)
    return reply.partial_success.rejected_spans, reply.partial_success.error_message


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("kind", [PROTOBUF, JSON])
async def test_protobuf_and_json_plain_and_gzip(kind: str, zipped: bool, intake: Stack) -> None:
    key = await intake.lease()
    request = exported(tools)
    body = request.SerializeToString() if kind == PROTOBUF else json.dumps(as_json(request)).encode()
    if zipped:
        body = gzip.compress(body)
    response = await post(
        intake, body, f"{kind}; charset=utf-8", key, content_encoding="gzip" if zipped else "identity"
    )
    assert (response.status_code, response.headers["content-type"]) == (200, kind)
    assert response.content == (b"" if kind == PROTOBUF else b"{}")
    tool_results = {o.tool: o for o in await intake.store.tool_results([key])}
    look_up, failed = tool_results["look_up"], tool_results["fail"]
    assert (look_up.status, look_up.tool_call_id, look_up.result) == (ToolStatus.OK, "c1", '{"n": 1}')
    assert (failed.status, failed.tool_call_id, failed.error) == (ToolStatus.ERROR, None, "no such table")
    assert {o.agent for o in tool_results.values()} == {"Übersetzer"}
    assert {o.parent_span for o in tool_results.values()} == {
        span.span_id.hex() for span in request.resource_spans[0].scope_spans[0].spans if not span.parent_span_id
    }
    assert look_up.started is not None
    assert look_up.ended is not None
    assert 1.7e9 < look_up.started <= look_up.ended


async def test_spans_without_a_valid_id_are_counted(intake: Stack) -> None:
    key = await intake.lease()
    request = exported(tools)
    request.resource_spans[0].scope_spans[0].spans[0].span_id = b"short"
    count, why = refused(await post(intake, request.SerializeToString(), key=key))
    assert (count, "id is not valid" in why) == (1, True)
    assert len(await intake.store.tool_results([key])) == 1
    body = as_json(exported(tools))
    body["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = "ab"
    response = await post(intake, json.dumps(body).encode(), JSON, key)
    assert response.json()["partialSuccess"]["rejectedSpans"] == "1"


@pytest.mark.parametrize(
    ("status", "kind", "change"),
    [
        (401, PROTOBUF, {"authorization": "Bearer wrong"}),
        (401, JSON, {"authorization": ""}),
        (404, PROTOBUF, {"x_agl_rollout": "gone/0", "holder": AttemptKey("gone", 0)}),
        (401, PROTOBUF, {"x_agl_rollout": "gone/first", "holder": AttemptKey("gone", 0)}),
        (401, JSON, {"holder": AttemptKey("gone", 0)}),
        (400, PROTOBUF, {"x_agl_rollout": "gone/0", "key": AttemptKey("other", 0)}),
        (404, JSON, {"key": AttemptKey("gone", 0)}),
        (415, "text/plain", {}),
        (415, PROTOBUF, {"content_encoding": "br"}),
        (400, PROTOBUF, {"content_encoding": "gzip"}),
        (400, PROTOBUF, {"body": b"\xff\xff"}),
        (400, PROTOBUF, {"body": b"\x0a\x00" * 200_001}),
        (413, JSON, {"body": b'{"resourceSpans":[' + b"{}," * MAX_VALUES + b"{}]}"}),
        (400, JSON, {"body": b"{"}),
        (400, JSON, {"body": b"[]"}),
        (400, JSON, {"body": b'{"resourceSpans": 1}'}),
        (400, JSON, {"body": b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": 7}]}]}]}'}),
        (400, JSON, {"body": b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "xyz"}]}]}]}'}),
        (400, JSON, {"body": b'{"resourceSpans":' + b"[" * 100_000}),
        (400, PROTOBUF, {"body": gzip.compress(b"x" * 1000)[:-9], "content_encoding": "gzip"}),
        (413, PROTOBUF, {"body": gzip.compress(bytes(MAX_AGENT_BODY + 1)), "content_encoding": "gzip"}),
    ],
)
async def test_what_is_malformed_or_carries_no_key_is_refused(
    status: int, kind: str, change: dict[str, Any], intake: Stack
) -> None:
    change = {"key": await intake.lease(), **change} if status in (400, 413, 415) else dict(change)
    response = await post(intake, change.pop("body", b"{}" if kind == JSON else b""), kind, **change)
    assert response.status_code == status
    assert response.json()["error"]["message"]


async def test_the_key_says_whose_spans_they_are(intake: Stack) -> None:
    """Whatever their resource says."""
    own, other = await intake.lease(), await intake.lease()
    body = exported(tools, **{"agl.rollout": f"{other.rollout}/0"}).SerializeToString()
    assert (await post(intake, body, key=other, holder=own)).status_code == 401
    assert (await post(intake, body, holder=own, x_agl_rollout=f"{other.rollout}/0")).status_code == 401
    assert refused(await post(intake, body, holder=own))[0] == 0
    assert len(await intake.store.tool_results([own])) == 2
    assert await intake.store.tool_results([other]) == []


async def test_an_attempt_has_room_for_so_many_spans(intake: Stack) -> None:
    key = await intake.lease()

    def many(tracer: Tracer) -> None:
        for _ in range(5_001):
            tracer.start_span("step").end()

    assert refused(await post(intake, exported(many).SerializeToString(), key=key))[0] == 0
    large = exported(lambda tracer: tracer.start_span("x" * (4 << 20)).end()).SerializeToString()
    assert refused(await post(intake, large, key=key)) == (1, "1 spans: they are larger than 4 MiB")
    count, why = refused(await post(intake, exported(many).SerializeToString(), key=key))
    assert (count, "10000 spans already" in why) == (5_001, True)


async def test_a_store_that_fails_asks_for_the_export_again(intake: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await intake.lease()
    store, body = intake.store, exported(tools).SerializeToString()

    async def fail(*_: Any) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", fail)
        response = await post(intake, body, key=key)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert "the disk is full" in response.json()["error"]["message"]
    assert refused(await post(intake, body, key=key))[0] == 0
    assert len(await store.tool_results([key])) == 2


NAMES = [
    *("resourceSpans", "scopeSpans", "spans", "resource", "attributes", "key", "value", "traceId", "spanId", "events"),
    *("parentSpanId", "stringValue", "intValue", "kvlistValue", "arrayValue", "values", "links", "status", "code"),
    *("startTimeUnixNano", "name", "message", "scope", "unknown"),
]
JSON_VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)


@given(value=JSON_VALUES)
@settings(max_examples=4 * settings.default.max_examples)
def test_any_json_is_decoded_or_refused(value: Any) -> None:
    read_all("application/json", json.dumps(value).encode())


@given(data=st.data())
@settings(max_examples=4 * settings.default.max_examples)
def test_any_damaged_protobuf_is_decoded_or_refused(data: st.DataObject) -> None:
    body = bytearray(exported(tools).SerializeToString())
    read_all(PROTOBUF, bytes(body))
    for _ in range(data.draw(st.integers(0, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    read_all(PROTOBUF, bytes(body[: data.draw(st.integers(0, len(body)))]))


def read_all(kind: str, body: bytes) -> None:
    try:
        spans, _ = _decoded(body, kind)
    except ApiError as error:
        if error.status != 400:
            raise
        return
    tree = SpanTree()
    changed = tree.add(map(see, spans))
    json.dumps([to_json(report) for report in tree.tool_results(changed)])
    tree.callers(changed)
