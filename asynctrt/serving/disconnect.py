"""Cancel an application's work for a client that has disconnected. Plain ASGI, so for any framework."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

ENDS: Final = ("http.response.body", "http.response.pathsend", "http.response.zerocopysend")
"""The types of messages that end an answer, unless more of its body follows."""


class CancelOnDisconnect:
    """ASGI middleware that cancels the handler of a request whose client has disconnected.

    Frameworks notice that a client has hung up only when they write to it, so its rows would be computed in
    vain. With this middleware the handler gets a ``CancelledError`` where it awaits, and its requests to an
    engine leave the queue. ::

        app.add_middleware(CancelOnDisconnect)  # FastAPI, Starlette
        app = CancelOnDisconnect(app)  # any other application

    If a handler must finish anyway, shield its work: ``asyncio.shield``, ``anyio.CancelScope(shield=True)``,
    or a background task. Add the middleware last, so that it is the outermost.

    :param app: the application.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Run the application for one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _Request(receive, send)
        handler = asyncio.ensure_future(self._app(scope, request.receive, request.send))
        watcher = asyncio.ensure_future(request.watch())
        try:
            await asyncio.wait((handler, watcher), return_when=asyncio.FIRST_COMPLETED)
            if request.is_for_nobody:
                handler.cancel()
            await asyncio.wait((handler,))
        except asyncio.CancelledError:
            handler.cancel()
            await asyncio.wait((handler,))
            raise
        finally:
            watcher.cancel()
            await asyncio.wait((watcher,))
        if not (request.is_for_nobody and handler.cancelled()):
            await handler


class _Request:
    """The server's events for one request: observed, and passed on to the application."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._lock = asyncio.Lock()
        self._ahead: Message | None = None
        self._has_begun = False
        self._is_read = asyncio.Event()
        self._is_answered = False
        self._has_gone = False
        self.is_for_nobody = False
        """Whether the client disconnected before it got the whole answer."""

    async def receive(self) -> Message:
        """Return the next message; it may say that the client has disconnected."""
        if self._ahead is None:
            async with self._lock:
                if self._ahead is None:
                    return await self._next()
        message, self._ahead = self._ahead, None
        return message

    async def send(self, message: Message) -> None:
        """Pass on a part of the answer."""
        if message["type"] in ENDS and not message.get("more_body", False):
            self._is_answered = True
        await self._send(message)

    async def watch(self) -> None:
        """Wait until the client has disconnected.

        One message is read ahead of an application that may never read its request. The application must
        read the rest of a longer one first.
        """
        async with self._lock:
            if not self._has_begun:
                self._ahead = await self._next()
        await self._is_read.wait()
        while not self._has_gone:
            async with self._lock:
                await self._next()

    async def _next(self) -> Message:
        """Return the server's next message."""
        if self._has_gone:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._has_begun = True
        if message["type"] == "http.disconnect":
            self._has_gone = True
            # After the answer the handler may still run background tasks.
            self.is_for_nobody = not self._is_answered
            self._is_read.set()
        elif not message.get("more_body", False):
            self._is_read.set()
        return message
