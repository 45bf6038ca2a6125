"""The keys of applications, of their sessions, and of what collects feedback on these."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import Request

from agl_core.server.keys import Keys, carries, refused_key


@dataclass(frozen=True, slots=True)
class ApplicationKeys:
    """Keys derived from those of a run's server.

    application  model calls of a deployed application, which are recorded as sessions; beginning and ending these
    session      the calls of one session
    feedback     feedback on the sessions of one application
    """

    server: Keys
    applications: Mapping[str, int]
    """By name, the number of its keys: another number makes other keys."""

    def of_application(self, name: str) -> str:
        return self.server.derive(f"application/{self.applications[name]}/{name}")

    def of_feedback(self, name: str) -> str:
        return self.server.derive(f"feedback/{self.applications[name]}/{name}")

    def of_session(self, application: str, session: str) -> str:
        return self.server.derive(f"session/{self.applications[application]}/{application}/{session}")

    def place_of(self, application: str, name: str) -> str:
        """A stand-in for the name that an application gave a session, in ids; it does not reveal the name."""
        return hmac.digest(self.server.secret.encode(), f"name/{application}/{name}".encode(), "sha256").hex()[:24]

    def application_of(self, request: Request) -> str | None:
        """The application whose key the request carries; None if it is no such key."""
        return self._holder(request, self.of_application)

    def caller(self, request: Request) -> str:
        """The same; ApiError 401 instead of None."""
        name = self.application_of(request)
        if name is None:
            raise refused_key(request, "This route takes an application's key (`agl sessions key RUN APPLICATION`).")
        return name

    def collector(self, request: Request) -> str:
        """The application on whose sessions the request's key may give feedback. ApiError 401 without one."""
        name = self._holder(request, self.of_feedback)
        if name is None:
            hint = "This route takes the key for feedback alone (`agl sessions key RUN APPLICATION --feedback`)."
            raise refused_key(request, hint)
        return name

    def user_of_session(self, request: Request, session: str) -> str:
        """The application whose session this is, by the key that the request carries. ApiError 401 without it."""
        name = self._holder(request, lambda application: self.of_session(application, session))
        if name is None:
            raise refused_key(request, "A session's own path takes the key that came with the session.")
        return name

    def _holder(self, request: Request, key_of: Callable[[str], str]) -> str | None:
        return next((name for name in self.applications if carries(request, key_of(name))), None)
