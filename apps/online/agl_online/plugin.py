"""The package's components."""

from __future__ import annotations

from agl_core import hookimpl, kinds
from agl_core.kinds import Register
from agl_online.feedback import users_said

__all__ = ["register_components", "users_said"]
# The reward rule is made by a decorator: being here is all it takes.


@hookimpl
def register_components(register: Register) -> None:
    """The tables `[online]` and `[learn]`."""
    from agl_online.config import LearnSection, OnlineSection

    register(kinds.SECTION, "online", lambda options: options, options=OnlineSection, doc=OnlineSection.__doc__)
    register(kinds.SECTION, "learn", lambda options: options, options=LearnSection, doc=LearnSection.__doc__)
