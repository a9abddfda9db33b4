"""Call a server from threads: scripts, notebooks, WSGI applications."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, Self, TypeVar

from asynctrt._util.forks import Origin
from asynctrt.client.balanced import Addresses
from asynctrt.client.base import Client
from asynctrt.client.connecting import connect
from asynctrt.client.persistence import NotConnectedError
from asynctrt.errors import UsageError
from asynctrt.tensors import Array

T = TypeVar("T")

CLOSE_S: Final = 5.0
"""How long closing waits for calls in flight to fail."""


def connect_blocking(
    url: str | Sequence[str] | Addresses,
    *,
    token: str | None = None,
    max_in_flight: int = 256,
    attempts: int = 1,
    idempotent: bool = False,
    reconnect_timeout: float = 30.0,
    max_size: int | None = None,
    **settings: Any,
) -> "BlockingClient":
    """Return a client to enter with ``with``, whose methods block instead of being awaited.

    The parameters are the same as for :func:`asynctrt.client.connect`.

    :raises UsageError: as for ``connect``.
    """
    client = connect(
        url,
        token=token,
        max_in_flight=max_in_flight,
        attempts=attempts,
        idempotent=idempotent,
        reconnect_timeout=reconnect_timeout,
        max_size=max_size,
        **settings,
    )
    return BlockingClient(client)


class BlockingClient:
    """A blocking client, made by :func:`connect_blocking`. Any number of threads may use it at once.

    It runs a client of :func:`asynctrt.client.connect` on an event loop in a separate thread.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._origin = Origin()
        self._thread: _LoopThread | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<asynctrt.client.BlockingClient of {self._client!r}>"

    def __enter__(self) -> Self:
        if self._thread is not None or self._is_closed:
            raise UsageError(
                "this client was already entered: call connect_blocking(...) again for a new one"
            )
        self._origin = Origin()
        thread = _LoopThread()
        try:
            thread.submit(self._client.__aenter__()).result()
        except BaseException:
            thread.end()
            raise
        self._thread = thread
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None or self._origin.is_here:  # In a forked child, let the exception pass.
            self.close()

    def close(self) -> None:
        """Close the connection, and end the thread; requests in flight fail. Idempotent.

        :raises UsageError: in a process forked from the client's, where the thread does not exist.
        """
        self._origin.check(self)
        thread, self._thread = self._thread, None
        self._is_closed = True
        if thread is not None:
            try:
                thread.submit(self._client.aclose()).result()
            finally:
                thread.end()

    def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        idempotent: bool | None = None,
    ) -> dict[str, Array]:
        """Run rows through a model of the server, and wait: as :meth:`asynctrt.client.Client.infer`."""
        future = self.submit(
            model,
            inputs,
            version=version,
            outputs=outputs,
            timeout=timeout,
            priority=priority,
            deadline=deadline,
            idempotent=idempotent,
        )
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Control-C must not leave a request behind.
            raise
        finally:
            del future  # It would form a cycle: future, error, traceback, this frame.

    def submit(self, model: str, inputs: Any, **settings: Any) -> "Future[dict[str, Array]]":
        """Send a request and return a future of its answer, so that one thread can have many in flight.

        :param settings: as for :meth:`infer`. Cancelling the future cancels the request.
        """
        return self._running().submit(self._client.infer(model, inputs, **settings))

    def metadata(self, model: str, *, version: str = "", deadline: float | None = None) -> dict[str, Any]:
        """Return KServe's description of a model: as :meth:`asynctrt.client.Client.metadata`."""
        return (
            self._running().submit(self._client.metadata(model, version=version, deadline=deadline)).result()
        )

    def _running(self) -> "_LoopThread":
        self._origin.check(self)
        if self._thread is None:
            raise NotConnectedError(
                "this client is closed"
                if self._is_closed
                else "use the client in `with connect_blocking(...)`"
            )
        return self._thread


class _LoopThread:
    """An event loop in a separate thread. A forked process, which lacks the thread, can still exit."""

    def __init__(self) -> None:
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        # A daemon: an unclosed client must not keep the interpreter from exiting.
        self._thread = threading.Thread(
            target=asyncio.run, args=(_run(started),), name="asynctrt-client", daemon=True
        )
        self._thread.start()
        self._loop, self._stop = started.result()
        self._lock = threading.Lock()
        self._is_over = False

    def submit(self, call: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine on the loop."""
        with self._lock:
            if not self._is_over:
                return asyncio.run_coroutine_threadsafe(call, self._loop)
        call.close()
        raise NotConnectedError("this client is closed")

    def end(self) -> None:
        """End the calls on the loop, then the loop and its thread."""
        with self._lock:  # Calls submitted earlier reach the loop before this, so the loop waits for them.
            self._is_over = True
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def _run(started: "Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]") -> None:
    stop = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()
    calls = asyncio.all_tasks() - {asyncio.current_task()}
    if calls:
        await asyncio.wait(calls, timeout=CLOSE_S)
