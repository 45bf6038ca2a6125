"""Talking with the served policy: what the page sends, what it shows, and who may."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from agl_core.protocols import Upstream
from agl_core.testing.scripts import CallTools, Fail, Say
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import Call, Mode, Rollout, Task
from agl_core.types.records import Sampling
from agl_view.app import make_app
from agl_view.serving import shown_beside

from .viewed_runs import HERE, HOSTILE, TOKEN, Folder, rollout, said

HOST = "http://127.0.0.1:8000"
TASK = Task("later", "6 * 7")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def policy() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture
def runs(tmp_path: Path, policy: ScriptedUpstream) -> Iterator[Folder]:
    """A run whose solver has a system prompt and a tool, and its policy; its newest rollouts have not begun."""
    (tmp_path / "runs").mkdir()
    served = Upstream((policy.url,), {"default": "served"}, "key")
    app = make_app([tmp_path / "runs"], TOKEN, served=lambda: served)
    with TestClient(app, HOST, client=HERE) as browser:
        assert browser.get(f"/?token={TOKEN}").status_code == 200
        folder = Folder(tmp_path / "runs", browser)
        records = [with_prompt(each) for each in rollout("s1-g0-m0", answer="42", reward=1.0)]
        queued = [Rollout(f"s2-g0-m{n}", "calc", 0, "s2-g0", TASK, Mode.TRAIN, 2, n) for n in range(32)]
        folder.make("calc", *records, *queued)
        yield folder


def with_prompt(record: Any) -> Any:
    if not isinstance(record, Call):
        return record
    system = {"role": "system", "content": "You count."}
    request = {**record.request, "messages": [system, *record.request["messages"]], "tools": TOOLS}  # type: ignore[misc]
    return replace(record, request=request, effective=Sampling(max_tokens=77))


def fields(page: str) -> dict[str, str]:
    """What the form would send as it stands."""
    found = dict(re.findall(r'<input[^>]*? name="([^"]+)"[^>]*? value="([^"]*)"', page))
    found |= dict(re.findall(r'<textarea name="([^"]+)"[^>]*>(.*?)</textarea>', page, re.DOTALL))
    found["policy"] = re.findall(r"<option selected>(.*?)</option>", page)[0]
    return {name: unescape(value) for name, value in found.items()}


def send(runs: Folder, page: str, status: int = 200, /, **given: str) -> str:
    """The page after sending the form of `page` with these fields."""
    form = fields(page) | {name.replace("_", "."): value for name, value in given.items()}
    answer = runs.browser.post("/runs/calc/talk", data=form, headers={"Origin": HOST})
    assert answer.status_code == status, answer.text
    return str(answer.text)


def test_the_agents_prompt_and_tools_go_with_the_conversation(runs: Folder, policy: ScriptedUpstream) -> None:
    policy.script(CallTools([("look", {"at": "table"}, "c1")]), Say("There are 3."))

    page = send(runs, runs.page("/runs/calc/talk"), said="How many?")
    assert 'Result of look <textarea name="result.0"' in page
    page = send(runs, page, result_0="three apples")

    first, second = (each.body for each in policy.received)
    assert first["model"] == "served"
    assert (first["temperature"], first["max_tokens"]) == (0, 77)
    assert first["tools"] == TOOLS
    asked = [{"role": "system", "content": "You count."}, {"role": "user", "content": "How many?"}]
    assert first["messages"] == asked
    assert second["messages"][:2] == asked
    assert second["messages"][2]["tool_calls"][0]["id"] == "c1"
    assert second["messages"][3:] == [{"role": "tool", "tool_call_id": "c1", "content": "three apples"}]
    assert "There are 3." in said(page)
    assert 'name="result.0"' not in page


def test_text_is_text_in_the_conversation_and_in_the_form(runs: Folder, policy: ScriptedUpstream) -> None:
    hostile = HOSTILE.replace("\ud800", "").replace("\x1b", "")
    policy.script(Say(hostile), Say("again"))

    page = send(runs, runs.page("/runs/calc/talk"), said=hostile)
    send(runs, page, said="and?")

    assert "<script>alert" not in page
    user, reply = policy.received[1].body["messages"][1:3]
    assert user["content"] == reply["content"] == hostile


def test_what_goes_wrong_is_said_and_the_conversation_stays(runs: Folder, policy: ScriptedUpstream) -> None:
    policy.script(Say("Hello."), Fail(500))
    page = send(runs, runs.page("/runs/calc/talk"), said="Hi")

    failed = send(runs, page, said="How are you?")
    assert 'class="notice bad"' in failed
    assert fields(failed)["messages"] == fields(page)["messages"]
    assert fields(failed)["said"] == "How are you?"

    assert "Say something first" in send(runs, page)
    assert "The tools are not JSON" in send(runs, page, said="x", tools="[")
    assert "temperature=warm" in send(runs, page, said="x", temperature="warm")
    assert "No policy 'nope'" in unescape(send(runs, page, said="x", policy="nope"))
    assert "cannot be read" in send(runs, page, 400, said="x", messages="[1]")
    assert "over 2 MiB" in send(runs, page, 400, said="x" * (3 << 20))


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/runs/calc/talk", {}),
        ("/runs/calc/talk", {"Origin": "http://elsewhere.example"}),
        ("/runs/calc/talk", {"Origin": "null"}),
        ("/runs/calc/try", {"Origin": HOST}),
    ],
)
def test_only_the_pages_own_form_is_taken(runs: Folder, policy: ScriptedUpstream, path: str, headers: Any) -> None:
    answer = runs.browser.post(path, data={"said": "x", "policy": "default"}, headers=headers)

    assert answer.status_code == 405
    assert policy.received == []


def test_without_the_token_there_is_no_talk(runs: Folder, policy: ScriptedUpstream) -> None:
    runs.browser.cookies.clear()

    answer = runs.browser.post("/runs/calc/talk", data={"said": "x"}, headers={"Origin": HOST})

    assert answer.status_code == 401
    assert policy.received == []


def test_no_policy_is_served(tmp_path: Path) -> None:
    with TestClient(make_app([tmp_path], TOKEN), HOST, client=HERE) as browser:
        assert browser.get(f"/?token={TOKEN}").status_code == 200
        runs = Folder(tmp_path, browser)
        runs.trained()

        assert "No policy is served here" in runs.page("/runs/calc/talk", 400)
        assert ">Talk<" not in runs.page("/runs/calc")


async def test_pages_beside_a_run_talk_with_what_it_serves(tmp_path: Path, policy: ScriptedUpstream) -> None:
    folder = await asyncio.to_thread(Folder(tmp_path, None).trained)  # type: ignore[arg-type]
    policy.script(Say("Good day."))
    async with (
        shown_beside(folder, "127.0.0.1", 0, None) as pages,
        httpx.AsyncClient(follow_redirects=True, timeout=30) as browser,
    ):
        assert ">Talk<" not in (await browser.get(pages.address)).text
        pages.serves(Upstream((policy.url,), {"default": "served"}, "key"))
        page = httpx.URL(pages.address).copy_with(query=None)
        async with asyncio.timeout(30):
            while ">Talk<" not in (await browser.get(page)).text:
                pass
        origin = {"Origin": f"{page.scheme}://{page.netloc.decode()}"}
        answer = await browser.post(f"{page}/talk", data={"said": "Hi"}, headers=origin)

    assert "Good day." in answer.text
    assert [each.headers["Authorization"] for each in policy.received] == ["Bearer key"]
