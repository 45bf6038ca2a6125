"""What training makes of sessions as the server recorded them."""

from __future__ import annotations

from functools import partial
from typing import Any

from agl_core.learning import ScoringRule, score
from agl_core.learning.batch import left_out
from agl_core.plugins import Plugins
from agl_core.testing.server import until
from agl_core.training.rollouts import recorded_episodes
from agl_core.types import DropReason, Episode
from agl_online.feedback import users_said

from .deployed import Deployed, deployed


async def learned(use: Deployed, rule: Any = users_said, **settings: Any) -> dict[Any, Episode]:
    """The episodes as a rule scores them, by the names of the sessions."""
    rollouts = await use.sessions()
    episodes = await recorded_episodes(use.store, rollouts, Plugins().hook)
    scored = [await score(each, [ScoringRule("users", partial(rule, **settings))], {}) for each in episodes]
    return {r.task.metadata["session"]: e for r, (e, _) in zip(rollouts, scored, strict=True)}


async def test_feedback_on_a_call_and_on_a_session_is_its_reward(use: Deployed) -> None:
    shop = use.keys.of_application("shop")
    call = (await use.ask("where is my order?", "by-call")).id
    await use.ask("and the other one?", "by-call")
    await use.ask("hello", "by-session")
    await use.ask("hello", "silent")
    await use.say(call=call, thumbs="up")
    await use.say(session="by-session", reward=0.25, parts={"polite": 0.75})
    for name in ("by-call", "by-session", "silent"):
        await use.post("sessions/end", shop, session=name)
    found = await learned(use)
    assert [t.reward for t in found["by-call"].transitions] == [1.0, 0.0]
    assert found["by-session"].terminal == 0.5
    assert found["silent"].dropped is DropReason.NO_REWARD


async def test_what_was_sampled_or_stored_otherwise_is_left_out(tmp_path: Any) -> None:
    async with deployed(tmp_path, redact=["email"]) as use:
        client = use.agent(use.keys.of_application("shop"))

        async def ask(text: str, **asked: Any) -> None:
            await client.chat.completions.create(model="default", messages=[{"role": "user", "content": text}], **asked)

        await ask("as training samples", temperature=0.9)
        await ask("nucleus", top_p=0.9)
        await ask("penalty", presence_penalty=1.0)
        await ask("greedy", temperature=0)
        await ask("I am ada@example.org")
        await until(lambda: use.counted("ended") == 5)
        episodes = await recorded_episodes(use.store, await use.sessions(), Plugins().hook)
        reasons = [left_out(each, ["*"]) for episode in episodes for each in episode.transitions]
        assert reasons == [None, *[DropReason.DISTORTED] * 3, DropReason.NO_TOKEN_IDS]
