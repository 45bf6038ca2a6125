"""What spans say of a session: by its own key, redacted, and only of what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from agl_core.testing.scripts import CallTools, Say
from agl_core.types import AttemptKey, ToolResult, ToolStatus

from .deployed import Deployed, deployed


def failing_tool(call: str) -> dict[str, Any]:
    """An `execute_tool` span, as OTLP's JSON has it."""
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "book", "gen_ai.tool.call.id": call}
    return {
        "traceId": "4bf92f3577b34da6a3ce929d0e0e4736",
        "spanId": "00f067aa0ba902b7",
        "name": "execute_tool book",
        "startTimeUnixNano": "1000000000",
        "endTimeUnixNano": "2000000000",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
        "status": {"code": 2, "message": "no seat for ada@example.org"},
    }


async def export(use: Deployed, key: str, *spans: dict[str, Any], path: str = "") -> httpx.Response:
    """The application's exporter sends."""
    body = {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}
    headers = {"Authorization": f"Bearer {key}"}
    return await use.http.post(f"{use.server.base_url}{path}/v1/traces", json=body, headers=headers)


async def results(use: Deployed) -> list[ToolResult]:
    return await use.store.tool_results([AttemptKey(each.id, 0) for each in await use.sessions()])


async def test_a_sessions_own_key_takes_its_own_spans_redacted(tmp_path: Path) -> None:
    async with deployed(tmp_path, redact=["email"]) as use:
        shop = use.keys.of_application("shop")
        first, second = [(await use.post("sessions", shop)).json() for _ in range(2)]
        use.model.script(CallTools([("book", {"seat": 1})]), Say("Sorry."))
        for session in (first, second):
            agent = use.agent(session["key"], session["path"])
            await agent.chat.completions.create(model="default", messages=[{"role": "user", "content": "A seat"}])
        [wanted] = (await use.calls())[0].choices[0].message["tool_calls"]
        assert (await export(use, first["key"], failing_tool(wanted["id"]), path=first["path"])).status_code == 200
        [result] = await results(use)
        assert (result.rollout, result.status, result.error) == (
            first["session"],
            ToolStatus.ERROR,
            "no seat for [EMAIL]",
        )
        for key in (first["key"], shop, use.keys.of_feedback("shop"), use.operator):
            assert (await export(use, key, failing_tool("c2"), path=second["path"])).status_code == 401
        assert (await export(use, shop, failing_tool("c2"))).status_code == 401
        assert len(await results(use)) == 1


async def test_spans_of_what_is_not_recorded_are_not_kept(use: Deployed) -> None:
    session = (await use.post("sessions", use.keys.of_application("shop"), record=False)).json()
    assert (await export(use, session["key"], failing_tool("c1"), path=session["path"])).status_code == 200
    assert await results(use) == []
