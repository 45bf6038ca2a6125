"""What this package registers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agl_core import Episode, hookimpl, kinds
from agl_core.kinds import Register
from agl_core.types import DropReason
from agl_online.feedback import contradicts, said_of, users_said

if TYPE_CHECKING:
    import typer

__all__ = ["episode_built", "register_commands", "register_components", "users_said"]
# The reward rule is made by a decorator: being here is all it takes.


@hookimpl
def register_components(register: Register) -> None:
    """The tables `[online]` and `[learn]`."""
    from agl_online.config import LearnSection, OnlineSection

    register(kinds.SECTION, "online", lambda options: options, options=OnlineSection, doc=OnlineSection.__doc__)
    register(kinds.SECTION, "learn", lambda options: options, options=LearnSection, doc=LearnSection.__doc__)


@hookimpl
def register_commands(cli: typer.Typer) -> None:
    """Add the commands of real use."""
    from agl_online.cli.learn import learn
    from agl_online.cli.policy import policy
    from agl_online.cli.serve import serve
    from agl_online.cli.sessions import sessions
    from agl_online.cli.versions import versions

    cli.command("serve")(serve)
    cli.command("learn")(learn)
    cli.add_typer(policy, name="policy")
    cli.add_typer(sessions, name="sessions")
    cli.add_typer(versions, name="versions")


@hookimpl
def episode_built(episode: Episode) -> Episode | None:
    """Leave a session out of training whose feedback contradicts itself."""
    if contradicts(said_of(episode.annotations)):
        return replace(episode, dropped=DropReason.PLUGIN)
    return None
