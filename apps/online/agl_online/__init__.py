"""Real use of what agl trains: sessions, feedback, versions behind a gate and a canary, and serving a policy."""

from typing import TYPE_CHECKING

from agl_core.plugins import lazily

if TYPE_CHECKING:
    from agl_online.kinds import Redactor, Release, ReleaseCheck, redactor, release_check

__all__ = ["Redactor", "Release", "ReleaseCheck", "redactor", "release_check"]

__getattr__ = lazily(__name__, **dict.fromkeys(__all__, ".kinds"))
