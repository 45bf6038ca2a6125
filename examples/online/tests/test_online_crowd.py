"""The travellers on a real server, in front of a scripted model: each has one session, and says one thing of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from users import Crowd, Visit, honest, travellers

from agl_core.config.models import SamplingSection
from agl_core.protocols import Upstream
from agl_core.server import Keys
from agl_core.server.upstream import RunSettings
from agl_core.store.sqlite import SqliteStore
from agl_core.testing.scripts import CallTools, Received, Say
from agl_core.testing.server import running_stack
from agl_core.testing.upstream import ScriptedUpstream
from agl_core.types import AttemptKey, Mode, RolloutState
from agl_online.config import OnlineSection
from agl_online.feedback import said_of
from agl_online.sessions import Sessions, fixed_upstream

KEYS = Keys(secret="a-secret", worker="the-worker", operator="the-operator")
SHIFT, SESSIONS = 6, 16


def always_the_cheapest(received: Received) -> Say | CallTools:
    """What the desk's policy does before it learns."""
    *_, last = received.body["messages"]
    if last["role"] == "tool":
        return Say(f"It costs {last['content'].removeprefix('fare ')}.")
    city = last["content"].split()[3]
    return CallTools([("search", f'{{"query": "{city}"}}', "call_0")])


@pytest.mark.parametrize("enough", [None, 9])
async def test_each_traveller_is_one_session_with_one_thumb_at_most(tmp_path: Path, enough: int | None) -> None:
    visits: list[Visit] = []

    def ended(visit: Visit) -> bool:
        visits.append(visit)
        return enough is None or len(visits) < enough

    async with SqliteStore(tmp_path / "store.sqlite") as store, ScriptedUpstream() as model:
        model.answer = always_the_cheapest
        upstream = Upstream(urls=(model.url,), models={"default": "served"}, api_key="upstream-key")
        section = OnlineSection(upstream="http://unused/v1", applications={"desk": 1})
        settings = RunSettings(SamplingSection(), seed=0, timeout=60, attempts=1)
        source = Sessions(section, store, KEYS, fixed_upstream(upstream, settings), run="run", folder=tmp_path)
        async with running_stack(store=store, keys=KEYS, source=source) as stack:
            keys = source.keys.of_application("desk"), source.keys.of_feedback("desk")
            await Crowd(stack.server.base_url, *keys, 3, SESSIONS, SHIFT, at_once=2).visit(ended)
            sessions = await store.rollouts(mode=Mode.USE)
            feedback = said_of(await store.annotations([AttemptKey(each.id, 0) for each in sessions]))

    expected = dict(zip(range(SESSIONS), travellers(3, SHIFT), strict=False))
    numbers = sorted(each.number for each in visits)
    assert numbers == list(range(SESSIONS)) if enough is None else enough <= len(numbers) <= enough + 1
    assert all(each.state is RolloutState.DONE for each in sessions)
    assert sorted(each.task.metadata["session"] for each in sessions) == sorted(f"traveller-3-{n}" for n in numbers)
    for visit in visits:
        asked = expected[visit.number]
        assert visit.names_airline == (asked.wish.airline is not None)
        assert visit.right is not visit.names_airline
        assert visit.thumbs == (honest(visit.right, visit.number) if asked.gives_feedback else None)
    thumbs = [each.rewards["thumbs"] for each in feedback]
    assert sorted(thumbs) == sorted(visit.thumbs for visit in visits if visit.thumbs is not None)
