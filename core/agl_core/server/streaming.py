"""A reply that is passed on to its client as the model server samples it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing

from starlette.types import Send

from agl_core.apis.reply import Delta, Reply, StreamedCompletion, read_reply
from agl_core.apis.streams import STREAM_HEADERS, STREAM_TYPE, Event, Renderer
from agl_core.server.listening import HttpConnection
from agl_core.server.upstream import UpstreamReply


class LiveReply:
    """The reply to one request for a stream. It begins with the model's first chunk: until then errors have a status.

    A client that leaves after that ends the sampling. One that leaves before may ask again, and gets the reply then.
    """

    def __init__(self, connection: HttpConnection, send: Send, renderer: Renderer, *, logprobs: bool) -> None:
        self.has_begun = False
        self.was_left = False
        """Whether its client left before its end, and so the model server was not heard out."""
        self.renderer = renderer
        self._connection, self._send, self._logprobs = connection, send, logprobs

    async def follow(
        self, answer: UpstreamReply, reply_id: str, waiting: Sequence[HttpConnection], headers: Mapping[str, str]
    ) -> Reply:
        """Pass a streamed reply on, all but the end; the whole of it. ApiError if it does not come to its end.

        `waiting` are the connections of all who asked for it, and `headers` are for the client.
        """
        if answer.chunks is None:
            return read_reply(answer.body, answer.headers, reply_id, logprobs=self._logprobs)
        completion = StreamedCompletion(reply_id)
        async with aclosing(answer.chunks):
            async for chunks in answer.chunks:
                deltas = [delta for chunk in chunks for delta in completion.add(chunk)]
                await self._pass_on(deltas, completion, headers)
                if self.has_begun and all(connection.is_gone for connection in waiting):
                    self.was_left = True
                    break
        await self._pass_on(completion.end(), completion, headers)
        return read_reply(completion.whole(cut=self.was_left), answer.headers, reply_id, logprobs=self._logprobs)

    async def _pass_on(
        self, deltas: Sequence[Delta], completion: StreamedCompletion, headers: Mapping[str, str]
    ) -> None:
        if not deltas or self._connection.is_gone:
            return
        events = list[Event]()
        if not self.has_begun:
            self.has_begun = True
            own = {"content-type": STREAM_TYPE, **STREAM_HEADERS, **headers}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in own.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
            events += self.renderer.start(completion.head)
        for delta in deltas:
            events += self.renderer.feed(delta)
        if events:
            await self._send({"type": "http.response.body", "body": self.renderer.encode(events), "more_body": True})

    async def end(self, events: bytes) -> bool:
        """Send the last events, and wait until they have left for the client; False if the connection broke before."""
        if self._connection.is_gone:
            return False
        await self._send({"type": "http.response.body", "body": events, "more_body": False})
        return await self._connection.has_left()
