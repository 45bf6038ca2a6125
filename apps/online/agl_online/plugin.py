"""What this package registers."""

from __future__ import annotations

from dataclasses import replace

from agl_core import Episode, hookimpl, kinds
from agl_core.kinds import Register
from agl_core.types import DropReason
from agl_online.feedback import contradicts, said_of, users_said

__all__ = ["episode_built", "register_components", "users_said"]
# The reward rule is made by a decorator: being here is all it takes.


@hookimpl
def register_components(register: Register) -> None:
    """The tables `[online]` and `[learn]`."""
    from agl_online.config import LearnSection, OnlineSection

    register(kinds.SECTION, "online", lambda options: options, options=OnlineSection, doc=OnlineSection.__doc__)
    register(kinds.SECTION, "learn", lambda options: options, options=LearnSection, doc=LearnSection.__doc__)


@hookimpl
def episode_built(episode: Episode) -> Episode | None:
    """Leave a session out of training whose feedback contradicts itself."""
    if contradicts(said_of(episode.annotations)):
        return replace(episode, dropped=DropReason.PLUGIN)
    return None
