"""What spans say of a session: joined by the trace of its calls, redacted, and only of what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from agl_core.learning import build_episode
from agl_core.learning.health import has_failed
from agl_core.testing.scripts import CallTools, Say
from agl_core.types import AttemptKey, ToolResult, ToolStatus

from .deployed import Deployed, deployed

TRACE, OTHER = "4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"


def failing_tool(call: str, trace: str = TRACE, error: str = "no seat for ada@example.org") -> dict[str, Any]:
    """An `execute_tool` span, as OTLP's JSON has it."""
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "book", "gen_ai.tool.call.id": call}
    return {
        "traceId": trace,
        "spanId": "00f067aa0ba902b7",
        "name": "execute_tool book",
        "startTimeUnixNano": "1000000000",
        "endTimeUnixNano": "2000000000",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
        "status": {"code": 2, "message": error},
    }


async def export(use: Deployed, key: str, *spans: dict[str, Any], path: str = "") -> httpx.Response:
    """The application's exporter sends."""
    body = {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}
    headers = {"Authorization": f"Bearer {key}"}
    return await use.http.post(f"{use.server.base_url}{path}/v1/traces", json=body, headers=headers)


async def results(use: Deployed) -> list[ToolResult]:
    return await use.store.tool_results([AttemptKey(each.id, 0) for each in await use.sessions()])


def traceparent(trace: str = TRACE) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}


async def test_a_tool_that_failed_is_joined_with_the_call_that_asked_for_it(tmp_path: Path) -> None:
    async with deployed(tmp_path, redact=["email"]) as use:
        use.model.script(CallTools([("book", {"seat": 1})]), Say("Sorry."))
        shop = use.keys.of_application("shop")
        asked = await use.ask("A seat, please", "talk", **traceparent())
        [wanted] = asked.choices[0].message.tool_calls
        sent = await export(use, shop, failing_tool(wanted.id), failing_tool("c9", OTHER))
        assert sent.json()["partialSuccess"] == {
            "rejectedSpans": "1",
            "errorMessage": "1 spans: no open rollout has a call of their trace",
        }
        [result] = await results(use)
        assert (result.status, result.error) == (ToolStatus.ERROR, "no seat for [EMAIL]")
        [session] = await use.sessions()
        key = AttemptKey(session.id, 0)
        [attempt] = await use.store.attempts(session.id)
        episode = build_episode(session, attempt, await use.store.calls([key]), await use.store.tool_results([key]))
        assert [list(map(has_failed, each.tool_results)) for each in episode.transitions] == [[True]]


async def test_a_sessions_own_key_takes_its_own_spans(use: Deployed) -> None:
    shop = use.keys.of_application("shop")
    first, second = [(await use.post("sessions", shop)).json() for _ in range(2)]
    for each in (first, second):
        agent = use.agent(each["key"], each["path"])
        await agent.chat.completions.create(model="default", messages=[{"role": "user", "content": "hello"}])
    assert (await export(use, first["key"], failing_tool("c1"), path=first["path"])).status_code == 200
    assert {each.rollout for each in await results(use)} == {first["session"]}
    for key in (first["key"], shop, use.keys.of_feedback("shop"), use.operator):
        assert (await export(use, key, failing_tool("c2"), path=second["path"])).status_code == 401
    assert len(await results(use)) == 1


async def test_spans_of_others_and_of_what_is_not_recorded_are_not_kept(use: Deployed) -> None:
    await use.ask("hello", "talk", **traceparent())
    await use.ask("hello", "private", **traceparent(OTHER), **{"x-agl-session-record": "off"})
    mail, shop = use.keys.of_application("mail"), use.keys.of_application("shop")
    assert (await export(use, mail, failing_tool("c1"))).status_code == 403
    assert "no open rollout" in (await export(use, shop, failing_tool("c1", OTHER))).text
    await use.post("sessions/end", shop, session="talk")
    assert "no open rollout" in (await export(use, shop, failing_tool("c1"))).text
    assert await results(use) == []
