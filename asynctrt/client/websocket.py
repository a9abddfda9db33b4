"""Call a server over its websocket: many requests in flight on one connection."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Self

from asynctrt import errors
from asynctrt._util.forks import in_child, seal
from asynctrt.client.base import ClientSettings, OneServer, Wanted
from asynctrt.client.persistence import NotConnectedError, pauses, remote_error
from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    MissingExtraError,
    UsageError,
    copy_for,
    show,
)
from asynctrt.kserve.client import (
    AnswerError,
    as_arrays,
    describe_request,
    place_outputs,
    read_outputs,
    text_of,
)
from asynctrt.kserve.codec import PlacedTensor, remember
from asynctrt.kserve.datatypes import LENGTH_NBYTES, Buffer, write_tensor
from asynctrt.kserve.json_codec import dump, parse_object
from asynctrt.tensors import Array

try:
    from websockets.asyncio.client import ClientConnection
    from websockets.asyncio.client import connect as open_websocket
    from websockets.exceptions import (
        ConnectionClosed,
        InvalidHandshake,
        InvalidProxy,
        InvalidStatus,
        InvalidURI,
    )
    from websockets.protocol import State
except ImportError as error:
    raise MissingExtraError(
        "clients over websockets need websockets: pip install 'asynctrt[client]'"
    ) from error


class WebSocketClient(OneServer):
    """A client over a websocket, made by :func:`asynctrt.client.connect` for ``ws`` or ``wss``."""

    def __init__(self, url: str, settings: ClientSettings) -> None:
        super().__init__(url, settings)
        self._opening = {
            "compression": None,
            "additional_headers": settings.headers,
            "max_size": settings.max_size,
            **settings.library,
        }
        self._room = asyncio.Semaphore(settings.max_in_flight)
        self._socket: ClientConnection | None = None
        self._connected = asyncio.Event()
        self._lost: AsynctrtError | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._number = 0
        # Heads repeat except for the id. Heads of requests are cached by content, heads of answers by bytes.
        self._heads: dict[Any, bytes] = {}
        self._answers: dict[bytes, list[PlacedTensor]] = {}
        in_child(self, WebSocketClient._let_go)

    def __repr__(self) -> str:
        state = "connected" if self._socket is not None else "not connected"
        return f"<asynctrt.client.Client {self.url} {state} in_flight={len(self._waiting)}>"

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise UsageError("this client was already entered: call connect(...) again for a new one")
        self._enter()
        self._socket = await self._open()
        self._connected.set()
        self._task = asyncio.create_task(self._run(self._socket))
        return self

    def _let_go(self) -> None:
        """Detach a forked child from the connection, which is the parent's, without closing it."""
        self._lost = ConnectionLostError("this client belongs to the process that this one was forked from")
        if self._socket is not None and self._socket.transport is not None:
            seal(self._socket.transport.get_extra_info("socket").fileno())

    async def aclose(self) -> None:
        """Close the websocket and stop reconnecting. Idempotent."""
        self._origin.check(self)
        self._lost = self._lost or ConnectionLostError("this client is closed")
        socket, self._socket = self._socket, None
        self._fail_all()  # First of all: closing may have to wait for an unresponsive server.
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_all()
        if socket is not None:
            await socket.close()

    @property
    def _is_over(self) -> bool:
        return self._lost is not None

    async def _infer(self, model: str, version: str, inputs: Any, wanted: Wanted) -> dict[str, Array]:
        arrays = as_arrays(await self._named(model, version, inputs))
        tensors = [write_tensor(array) for array in arrays.values()]
        sizes = tuple([len(tensor) for tensor in tensors])
        rest = self._head(model, version, arrays, sizes, wanted)
        async with self._room:
            answer: dict[str, Array] = await self._call(rest, tensors)
            return answer

    async def _describe(self, model: str, version: str) -> dict[str, Any]:
        content = {"metadata": True, "model_name": model, "model_version": version}
        answer: dict[str, Any] = await self._call(b"," + dump(content)[1:], [])
        return answer

    async def _call(self, rest: bytes, tensors: list[Buffer]) -> Any:
        if not self._connected.is_set():
            await self._connected.wait()  # It is also set once reconnecting has failed.
        if self._lost is not None:
            raise NotConnectedError(str(self._lost))
        socket = self._socket
        if socket is None or socket.state is not State.OPEN:
            self._connected.clear()  # The receiving task notices later.
            raise NotConnectedError(f"the connection to {self.url} was lost")
        self._number += 1
        number = str(self._number)
        head = b'{"id":"' + number.encode() + b'"' + rest
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await socket.send(b"".join((len(head).to_bytes(LENGTH_NBYTES, "little"), head, *tensors)))
            return await future
        except ConnectionClosed as error:
            if socket is self._socket:  # The receiving task notices later.
                self._connected.clear()
            raise ConnectionLostError(f"the connection to {self.url} was lost: {error}") from error
        except asyncio.CancelledError:
            if socket is self._socket and number in self._waiting:
                self._cancel(socket, number)
            raise
        finally:
            self._waiting.pop(number, None)
            del future  # It would form a cycle: future, error, traceback, this frame.

    @staticmethod
    def _cancel(socket: ClientConnection, number: str) -> None:
        """Notify the server of a cancelled request, without waiting, as its caller is being cancelled."""
        task = asyncio.get_running_loop().create_task(socket.send(dump({"cancel": number}).decode()))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _head(
        self,
        model: str,
        version: str,
        arrays: Mapping[str, Array],
        sizes: tuple[int, ...],
        wanted: Wanted,
    ) -> bytes:
        """Return the part of a request's head that follows the id."""
        shapes = tuple([(name, array.dtype, array.shape) for name, array in arrays.items()])
        key = (model, version, shapes, sizes, wanted)
        known = self._heads.get(key)
        if known is not None:
            return known
        content: dict[str, Any] = {"model_name": model}
        if version:
            content["model_version"] = version
        content |= describe_request(arrays, sizes, **wanted._asdict())
        rest = b"," + dump(content)[1:]
        remember(self._heads, key, rest)
        return rest

    async def _open(self) -> ClientConnection:
        try:
            return await open_websocket(self._address, **self._opening)
        except (TypeError, ImportError, InvalidProxy) as error:
            raise UsageError(f"websockets refuses a setting of this client: {error}") from error
        except InvalidStatus as error:
            raise _refused(self.url, error) from error
        except (InvalidURI, ValueError) as error:
            raise UsageError(
                f"{show(self.url)} is not the address of a websocket, such as ws://HOST:PORT/v2/ws"
            ) from error
        except (OSError, InvalidHandshake, TimeoutError, RuntimeError) as error:
            # asyncio resolves hosts in threads, which raise RuntimeError while the interpreter exits.
            raise ConnectionLostError(f"cannot connect to {self.url}: {text_of(error)}") from error

    async def _run(self, socket: ClientConnection) -> None:
        """Receive answers, and reconnect whenever the connection is lost."""
        try:
            while True:
                await self._receive(socket)
                if self._lost is not None:
                    return
                async with asyncio.timeout(self._settings.reconnect_timeout):
                    socket = await self._open_again()
                self._socket = socket
                self._connected.set()
        except Exception as error:
            self._lost = ConnectionLostError(
                f"the connection to {self.url} was lost and could not be made again within "
                f"{self._settings.reconnect_timeout:g} s: {text_of(error)}"
            )
        finally:
            self._connected.set()
            await socket.close()

    async def _open_again(self) -> ClientConnection:
        """Connect, retrying with growing delays after transient failures."""
        delays = pauses()
        while True:
            opening = open_websocket(self._address, **self._opening)
            try:
                return await opening
            except Exception as error:
                if opening.process_exception(error) is not None:
                    raise
            await asyncio.sleep(next(delays))

    async def _receive(self, socket: ClientConnection) -> None:
        """Receive answers until the connection is lost."""
        try:
            async for message in socket:
                self._take(message)
        except ConnectionClosed:
            pass  # The waiting callers fail below.
        except Exception as error:
            self._lost = ConnectionLostError(f"{self.url} does not speak this protocol: {text_of(error)}")
        self._socket = None
        self._connected.clear()
        self._fail_all()

    def _fail_all(self) -> None:
        why = self._lost or ConnectionLostError(f"the connection to {self.url} was lost")
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(copy_for(why))

    def _take(self, message: bytes | str) -> None:
        if isinstance(message, str):  # The client sends only cancellations as text, so this answers one.
            message = message.encode()
            head, stop = message, len(message)
        else:
            stop = LENGTH_NBYTES + int.from_bytes(message[:LENGTH_NBYTES], "little")
            head = message[LENGTH_NBYTES:stop]
        content = parse_object(head, "the answer")
        request_id = content.pop("id", "")
        if "error" in content:
            error = remote_error(content.get("type"), content.get("status"), str(content["error"]))
            self._settle(request_id, error=error)
            return
        if "metadata" in content:
            self._settle(request_id, content["metadata"])
            return
        try:
            # All but the id is usually that of an earlier answer.
            key = dump(content)
            known = self._answers.get(key)
            if known is None:
                known = place_outputs(content)
                remember(self._answers, key, known)
            outputs = read_outputs(known, message, stop)
        except AnswerError as error:  # This fails only one request: later messages are still readable.
            self._settle(request_id, error=error)
            return
        # The caller may write to its outputs, so they are copies.
        self._settle(request_id, {name: array.copy() for name, array in outputs.items()})

    def _settle(
        self,
        request_id: str,
        outputs: dict[str, Any] | None = None,
        error: AsynctrtError | None = None,
    ) -> None:
        future = self._waiting.pop(request_id, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif outputs is not None:
            future.set_result(outputs)


def _refused(url: str, error: InvalidStatus) -> AsynctrtError:
    status = error.response.status_code
    said = bytes(error.response.body or b"").decode(errors="replace")
    kinds: Mapping[int, type[AsynctrtError]] = {
        HTTPStatus.UNAUTHORIZED: errors.UnauthorizedError,
        HTTPStatus.FORBIDDEN: errors.UnauthorizedError,
        HTTPStatus.NOT_FOUND: errors.UnknownModelError,
    }
    return kinds.get(status, ConnectionLostError)(f"{url} answered with status {status}: {said:.300}")
