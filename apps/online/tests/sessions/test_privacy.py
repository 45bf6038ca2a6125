"""Hidden text is not stored, and removed text is gone from the file."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agl_core.testing.scripts import Hold, Say
from agl_core.types import RolloutState
from agl_online.session import PATTERNS, Redaction

from .conftest import KEYS, Deployed, deployed


def raw(folder: Path) -> bytes:
    return b"".join(f.read_bytes() for f in folder.glob("store.sqlite*"))


async def test_nothing_of_a_session_that_opted_out_is_stored(use: Deployed, tmp_path: Path) -> None:
    off = {"x-agl-session-record": "off"}
    reply = await use.ask("a secret of the user", "talk", **off)
    assert reply.choices[0].message.content
    await use.ask("another secret", "talk")
    begun = await use.begin(record=False)
    assert begun["recorded"] is False
    await use.ask("a third secret", begun=begun)
    await use.ask("a secret without a name", **off)
    assert await use.sessions() == []
    assert b"secret" not in raw(tmp_path)
    for target in ({"call": reply.id}, {"session": begun["session"]}):
        assert (await use.say(**target, rewards={"thumbs": 1}, note="a secret note")).status_code in (404, 410)
    assert b"secret" not in raw(tmp_path)
    assert use.counted("unrecorded") == 0, "that counts what should have been recorded"


async def test_opting_out_later_removes_what_was_stored_and_outlives_the_server(tmp_path: Path) -> None:
    async with deployed(tmp_path) as use:
        await use.ask("Rumpelstilzchen", "talk")
        begun = await use.begin()
        await use.ask("Rapunzel", begun=begun)
        assert b"Rumpelstilzchen" in raw(tmp_path)
        for session in ({"name": "talk"}, {"begun": begun}):
            await use.ask("now private", **session, **{"x-agl-session-record": "off"})
        assert await use.sessions() == []
        assert (await use.say(session="talk", rewards={"thumbs": 1})).status_code == 410
    async with deployed(tmp_path) as use:
        assert (await use.ask("still private", "talk")).id
        await use.ask("Rapunzel", begun=begun)
        assert await use.sessions() == []
    for text in (b"Rumpelstilzchen", b"Rapunzel", b"private"):
        assert text not in raw(tmp_path), text


async def test_a_deleted_session_is_gone_and_stays_gone(use: Deployed, tmp_path: Path) -> None:
    reply = await use.ask("Rumpelstilzchen", "talk")
    await use.ask("where is it?", "other")
    await use.say(call=reply.id, rewards={"thumbs": 1}, note="Rapunzel")
    [session, other] = await use.sessions()
    assert (await use.post("sessions/delete", KEYS.operator, sessions=[session.id])).json() == {"deleted": 1}
    assert (await use.post("sessions/delete", KEYS.operator, sessions=[session.id])).json() == {"deleted": 0}
    for text in (b"Rumpelstilzchen", b"Rapunzel"):
        assert text not in raw(tmp_path)
    assert await use.sessions() == [other]
    for target in ({"call": reply.id}, {"session": session.id}):
        answer = await use.say(**target, rewards={"thumbs": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "session_deleted")
    unknown = await use.post("sessions/delete", KEYS.operator, sessions=[other.id, f"use-{'0' * 24}-{'0' * 12}"])
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "session_unknown")
    attempt = await use.stack.lease()
    trained = await use.post("sessions/delete", KEYS.operator, sessions=[attempt.rollout])
    assert trained.status_code == 404, "a rollout of training is no session"
    assert await use.sessions() == [other], "nothing was deleted"
    await use.ask("a new session of the name", "talk")
    assert len(await use.sessions()) == 2


async def test_a_call_under_way_does_not_bring_a_deleted_session_back(use: Deployed, tmp_path: Path) -> None:
    await use.ask("first", "talk")
    [session] = await use.sessions()
    hold = Hold(Say("Rumpelstilzchen"))
    use.model.script(hold)
    asking = asyncio.create_task(use.ask("Rapunzel", "talk"))
    await hold.arrived.wait()
    await use.post("sessions/delete", KEYS.operator, sessions=[session.id])
    hold.release.set()
    assert (await asking).choices[0].message.content == "Rumpelstilzchen", "use goes on"
    await use.ask("next", "other")
    for text in (b"Rumpelstilzchen", b"Rapunzel"):
        assert text not in raw(tmp_path)
    assert session.id not in {s.id for s in await use.sessions()}


async def test_what_is_redacted_never_reaches_the_file(tmp_path: Path) -> None:
    async with deployed(tmp_path, redact=["email", "card", "customer [A-Z]+"]) as use:
        use.model.script(Say("Dear ada@example.org, thank you."), Say("Nothing to hide."))
        reply = await use.ask("I am customer ADA, ada@example.org, card 4111 1111 1111 1111", "talk")
        assert "ada@example.org" in str(reply.choices[0].message.content), "the application gets it as it is"
        await use.ask("hello", "open")
        await use.say(call=reply.id, note="from bob@example.org")
        hidden, plain = await use.calls()
        assert hidden.request["messages"][0]["content"] == "I am [REDACTED], [EMAIL], card [CARD]"
        assert hidden.choices[0].message["content"] == "Dear [EMAIL], thank you."
        assert (hidden.prompt_ids, hidden.choices[0].response_ids, hidden.choices[0].logprobs) == (None, None, None)
        assert plain.prompt_ids is not None
        assert plain.choices[0].response_ids is not None
        [feedback] = await use.feedback(hidden.rollout)
        assert feedback.said["note"] == "from [EMAIL]"
        assert use.counted("redacted") >= 1
        stored = raw(tmp_path)
        for text in (b"example.org", b"1111 1111", b"ADA"):
            assert text not in stored
        ids = b"ada@example.org"
        assert b"".join(bytes([token, 0, 0, 0]) for token in ids) not in stored, "nor as token ids"


async def test_a_call_that_cannot_be_redacted_is_answered_and_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Redaction, text: str) -> str:
        raise RuntimeError("broken")

    async with deployed(tmp_path, redact=["email"]) as use:
        monkeypatch.setattr(Redaction, "text", broken)
        assert (await use.ask("Rumpelstilzchen", "talk")).id
        assert await use.calls() == []
        assert use.counted("unrecorded") == 1
        assert b"Rumpelstilzchen" not in raw(tmp_path)


@pytest.mark.parametrize(
    ("pattern", "text", "stored"),
    [
        ("email", "write to ada.l+x@mail.example.co.uk now", "write to [EMAIL] now"),
        ("card", "4111-1111-1111-1111 and 12345", "[CARD] and 12345"),
        ("ip", "from 192.168.0.1:80", "from [IP]:80"),
        ("phone", "call +49 (30) 901820 or 2024", "call [PHONE] or 2024"),
        ("secret", "key sk-abcdefghijklmnop and Bearer abcdefghijklmnop", "key [SECRET] and Bearer [SECRET]"),
    ],
)
def test_named_patterns(pattern: str, text: str, stored: str) -> None:
    assert Redaction([pattern]).text(text) == stored


def test_keys_and_numbers_of_json_are_texts_too() -> None:
    redaction = Redaction(["email", "card"])
    assert redaction.json({"a@b.org": [4111111111111111, 5, True, None, ("x@y.org",)]}) == {
        "[EMAIL]": ["[CARD]", 5, True, None, ["[EMAIL]"]]
    }


async def test_a_match_that_text_parts_share_is_redacted_too(tmp_path: Path) -> None:
    """Also over more than two of them; parts that do not match together stay as they are."""

    def part(text: str) -> dict[str, str]:
        return {"type": "text", "text": text}

    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    content = [*map(part, ("I am ada", "@exam", "ple.org", " there")), image, part("plain"), part("text")]
    async with deployed(tmp_path, redact=("email",)) as use:
        use.model.script(Say("Yes."))
        await use.ask(content)
        [call] = await use.calls()
    assert call.request["messages"][0]["content"] == [  # type: ignore[call-overload, index]
        *map(part, ("I am [EMAIL] there", "", "", "")), image, part("plain"), part("text"),
    ]  # fmt: skip
    assert call.prompt_ids is None
    assert b"ple.org" not in raw(tmp_path)


async def test_old_sessions_are_removed(tmp_path: Path) -> None:
    async with deployed(tmp_path, keep_days=30) as use:
        await use.ask("Rumpelstilzchen", "old", **{"x-agl-session-end": "1"})
        await use.ask("new", "new", **{"x-agl-session-end": "1"})
        while [s.state for s in await use.sessions()] != [RolloutState.DONE] * 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        old, new = await use.sessions()
        [attempt] = await use.store.attempts(old.id)
        await use.store.put(replace(attempt, ended=time.time() - 31 * 86_400))
    async with deployed(tmp_path, keep_days=30, idle_minutes=0.1) as use:
        while len(await use.sessions()) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await use.sessions() == [new]
        assert (await use.say(session=old.id, rewards={"thumbs": 1})).status_code == 410
    assert b"Rumpelstilzchen" not in raw(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_long_text_without_an_end_is_redacted_in_time(pattern: str) -> None:
    for text in ("a" * 400_000, "a@" * 200_000, "1" * 400_000, "1 " * 200_000, "sk-" * 130_000):
        Redaction([pattern]).text(text)
