"""Call a server over its websocket: many requests in flight on one connection.

::

    async with asynctrt.client.connect("ws://127.0.0.1:8000/v2/ws") as client:
        outputs = await client.infer("resnet", {"input": rows}, timeout=0.5)
        outputs["output"]
"""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from asynctrt import errors
from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    LifecycleError,
    UsageError,
    copy_for,
)
from asynctrt.kserve.client import as_array, describe_request, place_outputs, read_outputs
from asynctrt.kserve.codec import PlacedTensor, remember
from asynctrt.kserve.datatypes import Buffer, write_tensor
from asynctrt.kserve.json_codec import dump, parse_object, split_id
from asynctrt.serving.frames import (
    ClientConnection,
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    InvalidURI,
    backoff,
)
from asynctrt.serving.frames import (
    connect as open_websocket,
)
from asynctrt.tensors import Array

PREFIX_NBYTES: Final = 4


class RemoteError(AsynctrtError):
    """The server answered with an error that asynctrt has no class for."""

    status: int = 500
    """The HTTP status of the answer."""


def connect(
    url: str,
    *,
    token: str | None = None,
    max_in_flight: int = 256,
    attempts: int = 1,
    reconnect_timeout: float = 30.0,
    max_size: int | None = None,
    **settings: Any,
) -> "Client":
    """Return a client of the websocket at ``url``, to be entered with ``async with``.

    :param url: ``ws://HOST:PORT/v2/ws`` for every model, ``.../v2/models/NAME/ws`` for one; ``wss://`` with
        TLS.
    :param token: the server's bearer token, if it requires one.
    :param max_in_flight: requests in flight at once; further calls wait. Beyond the server's own limit
        (``max_requests_per_connection``) requests wait on the connection.
    :param attempts: how often a request is sent if its connection is lost, or the server is stopping or
        starting. Use more than 1 only for models without side effects: a lost request may have been computed.
    :param reconnect_timeout: seconds to keep trying to connect again after the connection was lost.
    :param max_size: the largest answer in bytes; ``None`` for no limit.
    :param settings: passed to ``websockets.asyncio.client.connect``: ``ssl``, ``proxy`` and others.
    :raises UsageError: if ``max_in_flight`` or ``attempts`` is less than 1.
    :raises ConnectionLostError: on entering, if there is no server.
    :raises UnauthorizedError: on entering, if the server refuses the token.
    """
    if max_in_flight < 1 or attempts < 1:
        raise UsageError(f"max_in_flight and attempts must be at least 1, not {max_in_flight} and {attempts}")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    settings = {"compression": None, "additional_headers": headers, "max_size": max_size} | settings
    return Client(url, settings, max_in_flight, attempts, reconnect_timeout)


class Client:
    """Made by :func:`connect`. Any number of tasks may use it at once."""

    def __init__(
        self,
        url: str,
        settings: Mapping[str, Any],
        max_in_flight: int,
        attempts: int,
        reconnect_timeout: float,
    ) -> None:
        self.url = url
        self._settings = settings
        self._attempts = attempts
        self._reconnect_timeout = reconnect_timeout
        self._room = asyncio.Semaphore(max_in_flight)
        self._socket: ClientConnection | None = None
        self._connected = asyncio.Event()
        self._lost: AsynctrtError | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: dict[str, asyncio.Future[dict[str, Array]]] = {}
        self._number = 0
        # Heads repeat except for the id: those of requests are cached by content, those of answers by bytes.
        self._heads: dict[Any, bytes] = {}
        self._answers: dict[bytes, list[PlacedTensor]] = {}

    def __repr__(self) -> str:
        state = "connected" if self._socket is not None else "not connected"
        return f"<asynctrt.client.Client {self.url} {state} in_flight={len(self._waiting)}>"

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise UsageError("this client was already entered: call connect(...) again for a new one")
        self._socket = await self._open()
        self._connected.set()
        self._task = asyncio.create_task(self._run(self._socket))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connection; requests in flight fail with ``ConnectionLostError``. Idempotent."""
        self._lost = self._lost or ConnectionLostError("this client is closed")
        socket, self._socket = self._socket, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_all()
        if socket is not None:
            await socket.close()

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int = 0,
    ) -> dict[str, Array]:
        """Run rows through a model of the server.

        :param model: the model's name; ignored on the websocket of a single model.
        :param version: the model's version; the newest if empty.
        :param inputs: arrays by tensor name, each ``(rows, *dims)`` of the tensor's dtype; for BYTES, byte
            strings or text.
        :param outputs: the wanted outputs; all by default.
        :param timeout: seconds that the request may be queued on the server.
        :param priority: 1 is the most urgent; 0 means the model's default.
        :raises AsynctrtError: the server's error, as :meth:`asynctrt.Engine.infer` would raise it.
        :raises ConnectionLostError: if the connection is lost before the answer arrives.
        """
        arrays = {name: as_array(name, value) for name, value in inputs.items()}
        tensors = [write_tensor(array) for array in arrays.values()]
        sizes = tuple([len(tensor) for tensor in tensors])
        rest = self._head(model, version, arrays, sizes, outputs, timeout, priority)
        delays = _delays()
        async with self._room:
            for attempt in range(1, self._attempts + 1):
                try:
                    return await self._call(rest, tensors)
                except (ConnectionLostError, LifecycleError) as error:
                    if attempt == self._attempts or self._lost is not None:
                        raise
                    if isinstance(error, LifecycleError):
                        # The server is about to stop, or has not loaded the model yet.
                        await asyncio.sleep(next(delays))
        raise AssertionError("the last attempt answers or raises")

    async def _call(self, rest: bytes, tensors: list[Buffer]) -> dict[str, Array]:
        if not self._connected.is_set():
            await self._connected.wait()  # It is also set when reconnecting is given up.
        if self._lost is not None:
            raise copy_for(self._lost)
        socket = self._socket
        if socket is None:
            raise ConnectionLostError(f"the connection to {self.url} was lost")
        self._number += 1
        number = str(self._number)
        head = b'{"id":"' + number.encode() + b'"' + rest
        future: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            await socket.send(b"".join((len(head).to_bytes(PREFIX_NBYTES, "little"), head, *tensors)))
            return await future
        except ConnectionClosed as error:
            if socket is self._socket:  # The receiving task learns of it later.
                self._connected.clear()
            raise ConnectionLostError(f"the connection to {self.url} was lost: {error}") from error
        except asyncio.CancelledError:
            if socket is self._socket and number in self._waiting:
                self._cancel(socket, number)
            raise
        finally:
            self._waiting.pop(number, None)

    @staticmethod
    def _cancel(socket: ClientConnection, number: str) -> None:
        """Tell the server that a request is cancelled, without waiting, as its caller is being cancelled."""
        task = asyncio.get_running_loop().create_task(socket.send(dump({"cancel": number}).decode()))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _head(
        self,
        model: str,
        version: str,
        arrays: Mapping[str, Array],
        sizes: tuple[int, ...],
        outputs: Sequence[str] | None,
        timeout: float | None,
        priority: int,
    ) -> bytes:
        """Return the part of a request's head that follows the id."""
        wanted = tuple(outputs) if outputs is not None else None
        shapes = tuple([(name, array.dtype, array.shape) for name, array in arrays.items()])
        key = (model, version, shapes, sizes, wanted, timeout, priority)
        known = self._heads.get(key)
        if known is not None:
            return known
        content: dict[str, Any] = {"model_name": model}
        if version:
            content["model_version"] = version
        content |= describe_request(arrays, sizes, outputs=wanted, timeout=timeout, priority=priority)
        rest = b"," + dump(content)[1:]
        remember(self._heads, key, rest)
        return rest

    async def _open(self) -> ClientConnection:
        try:
            return await open_websocket(self.url, **self._settings)
        except InvalidStatus as error:
            raise _refused(self.url, error) from error
        except InvalidURI as error:
            raise UsageError(
                f"{self.url!r} is not the address of a websocket, such as ws://HOST:PORT/v2/ws"
            ) from error
        except (OSError, InvalidHandshake, TimeoutError) as error:
            raise ConnectionLostError(f"cannot connect to {self.url}: {_text_of(error)}") from error

    async def _run(self, socket: ClientConnection) -> None:
        """Receive answers, and connect again whenever the connection is lost."""
        # The iterator retries transient failures with growing delays. Leaving it closes its last connection.
        again = aiter(open_websocket(self.url, reconnect_delays=_delays, **self._settings))
        try:
            while True:
                await self._receive(socket)
                if self._lost is not None:
                    return
                async with asyncio.timeout(self._reconnect_timeout):
                    socket = await anext(again)
                self._socket = socket
                self._connected.set()
        except Exception as error:
            self._lost = ConnectionLostError(
                f"the connection to {self.url} was lost and could not be made again within "
                f"{self._reconnect_timeout:g} s: {_text_of(error)}"
            )
        finally:
            self._connected.set()
            await again.aclose()  # type: ignore[attr-defined]  # It is a generator.
            await socket.close()

    async def _receive(self, socket: ClientConnection) -> None:
        """Receive answers until the connection is lost."""
        try:
            async for message in socket:
                self._take(message)
        except ConnectionClosed:
            pass  # The waiting callers are told below.
        except Exception as error:
            self._lost = ConnectionLostError(f"{self.url} does not speak this protocol: {_text_of(error)}")
        self._socket = None
        self._connected.clear()
        self._fail_all()

    def _fail_all(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ConnectionLostError(f"the connection to {self.url} was lost"))

    def _take(self, message: bytes | str) -> None:
        if isinstance(message, str):  # Only cancellations are sent as text, so this answers one.
            message = message.encode()
            head, stop = message, len(message)
        else:
            stop = PREFIX_NBYTES + int.from_bytes(message[:PREFIX_NBYTES], "little")
            head = message[PREFIX_NBYTES:stop]
        request_id, rest = split_id(head)
        known = self._answers.get(rest)
        if known is None:
            content = parse_object(head, "the answer")
            request_id = content.get("id", request_id)
            if "error" in content:
                self._settle(request_id, error=_error(content))
                return
            known = place_outputs(content)
            remember(self._answers, rest, known)
        outputs = read_outputs(known, message, stop)
        # The caller may write to its outputs, so they are copies.
        self._settle(request_id, {name: array.copy() for name, array in outputs.items()})

    def _settle(
        self,
        request_id: str,
        outputs: dict[str, Array] | None = None,
        error: AsynctrtError | None = None,
    ) -> None:
        future = self._waiting.pop(request_id, None)
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        elif outputs is not None:
            future.set_result(outputs)


def _error(content: Mapping[str, Any]) -> AsynctrtError:
    """Return the server's error, of the class that it had there if asynctrt has it."""
    kind = getattr(errors, str(content.get("type")), None)
    if isinstance(kind, type) and issubclass(kind, AsynctrtError):
        return kind(content["error"])
    remote = RemoteError(content["error"])
    status = content.get("status")
    remote.status = status if isinstance(status, int) else 500
    return remote


def _delays() -> Generator[float]:
    """Yield the delays between attempts to connect again, growing from 0.1 s to 5 s."""
    return backoff(initial_delay=0.1, min_delay=0.1, max_delay=5.0)


def _text_of(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _refused(url: str, error: InvalidStatus) -> AsynctrtError:
    status = error.response.status_code
    said = bytes(error.response.body or b"").decode(errors="replace")
    kinds = {401: errors.UnauthorizedError, 404: errors.UnknownModelError}
    return kinds.get(status, ConnectionLostError)(f"{url} answered with status {status}: {said:.300}")
