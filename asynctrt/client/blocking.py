"""Call a server from threads: scripts, notebooks, WSGI applications."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Self

from anyio.from_thread import BlockingPortal, start_blocking_portal

from asynctrt.client.base import Client
from asynctrt.client.connecting import connect
from asynctrt.client.persistence import NotConnectedError
from asynctrt.errors import UsageError
from asynctrt.tensors import Array


def connect_blocking(
    url: str,
    *,
    token: str | None = None,
    max_in_flight: int = 256,
    attempts: int = 1,
    idempotent: bool = False,
    reconnect_timeout: float = 30.0,
    max_size: int | None = None,
    **settings: Any,
) -> "BlockingClient":
    """Return a client to be entered with ``with``. It waits where the one of ``connect`` is awaited.

    The parameters are those of :func:`asynctrt.client.connect`.

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
    """Made by :func:`connect_blocking`. Any number of threads may use it at once.

    It has one thread with an event loop, in which a client of :func:`asynctrt.client.connect` runs.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stack: ExitStack | None = None
        self._portal: BlockingPortal | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<asynctrt.client.BlockingClient of {self._client!r}>"

    def __enter__(self) -> Self:
        if self._portal is not None or self._is_closed:
            raise UsageError(
                "this client was already entered: call connect_blocking(...) again for a new one"
            )
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio"))
            stack.enter_context(self._portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, and end the thread; requests in flight fail. Idempotent."""
        stack, self._stack = self._stack, None
        self._portal = None
        self._is_closed = True
        if stack is not None:
            stack.close()

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

    def submit(self, model: str, inputs: Any, **settings: Any) -> "Future[dict[str, Array]]":
        """Send a request, and return a future of its answer: many can be under way from one thread.

        :param settings: as for :meth:`infer`. A future that is cancelled cancels its request.
        """
        return self._running().start_task_soon(partial(self._client.infer, model, inputs, **settings))

    def metadata(self, model: str, *, version: str = "") -> dict[str, Any]:
        """Return KServe's description of a model: as :meth:`asynctrt.client.Client.metadata`."""
        return self._running().call(partial(self._client.metadata, model, version=version))

    def _running(self) -> BlockingPortal:
        if self._portal is None:
            raise NotConnectedError(
                "this client is closed"
                if self._is_closed
                else "use the client in `with connect_blocking(...)`"
            )
        return self._portal
