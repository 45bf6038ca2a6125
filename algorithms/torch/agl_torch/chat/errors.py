"""What is wrong with a chat request, in the words of the OpenAI API."""

from __future__ import annotations

from agl_core.errors import ServerError


class ChatError(ServerError):
    """A request that cannot be answered; becomes an OpenAI-shaped error reply.

    `param` names the field of the request, `code` is for programs to tell errors apart.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = "server_error" if self.status >= 500 else kinds.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
