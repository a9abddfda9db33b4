"""The base classes of clients: of any, and of one server whatever its protocol."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from asynctrt._util.forks import Origin
from asynctrt._util.loops import running_loop
from asynctrt._util.validation import int_or_none
from asynctrt.client.persistence import (
    DELAY_S_MIN,
    NotConnectedError,
    check_names,
    in_time,
    input_specs,
    is_plain,
    may_repeat,
    only_input,
    pauses,
    queue_timeout,
    seconds_of,
    with_dtype,
    without_credentials,
)
from asynctrt.errors import AsynctrtError, ConnectionLostError, UsageError, show
from asynctrt.kserve.client import names_of
from asynctrt.limits import limits_here
from asynctrt.tensors import Array, TensorSpec

T = TypeVar("T")


class Wanted(NamedTuple):
    """What a request asks for besides a model and inputs, as :func:`describe_request` takes it."""

    outputs: tuple[str, ...] | None
    timeout: float | None
    priority: int


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """The parameters of :func:`asynctrt.client.connect` but the address.

    :param library: settings for the library that makes the connection.
    :raises UsageError: if one is not valid.
    """

    token: str | None
    max_in_flight: int
    attempts: int
    idempotent: bool
    reconnect_timeout: float
    max_size: int | None
    library: Mapping[str, Any]

    def __post_init__(self) -> None:
        numbers = map(int_or_none, (self.max_in_flight, self.attempts))
        if any(number is None or number < 1 for number in numbers):
            raise UsageError(
                "max_in_flight and attempts must be whole numbers of at least 1, not "
                f"{show(self.max_in_flight)} and {show(self.attempts)}"
            )
        token = self.token
        if token is not None and not (
            isinstance(token, str) and token.isascii() and token.isprintable() and " " not in token
        ):
            # A line break would end the header and begin another one. The message must not show the token.
            raise UsageError("a token has printable ASCII characters without spaces, and this one has others")

    @property
    def headers(self) -> dict[str, str]:
        """The headers that each request has."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


class Client(ABC):
    """A client of a server. :func:`asynctrt.client.connect` makes it; enter it with ``async with``.

    Any number of tasks may use it at once, all on the event loop on which it was entered.
    """

    _delay_s = DELAY_S_MIN
    """The pause before a request's second attempt."""

    def __init__(self, url: str, settings: ClientSettings) -> None:
        self.url = url
        self._settings = settings
        self._attempts = settings.attempts
        self._loop: asyncio.AbstractEventLoop | None = None
        self._origin = Origin()

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None or self._origin.is_here:  # In a forked child, let the exception pass.
            await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connection; requests in flight fail with ``ConnectionLostError``. Idempotent.

        :raises UsageError: in a process that was forked from the client's.
        """

    async def infer(
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
        """Run rows through a model of the server.

        :param model: the model's name; ignored on the websocket of a single model.
        :param inputs: an array, for a model with one input; or arrays by tensor name, each of the tensor's
            shape, mostly ``(rows, *dims)``, and dtype; for BYTES, bytes or text. Nested lists and numbers
            become arrays of that dtype. The client asks the server once for the name of a model's only input
            and for the dtypes for lists.
        :param version: the model's version; the newest if empty.
        :param outputs: the names of the wanted outputs; all by default. The server's engine copies no others.
            Unlike an engine's ``outputs=``, it cannot say where they are.
        :param timeout: seconds that the request may be queued on the server.
        :param priority: 1 is the most urgent; 0 means the model's default.
        :param deadline: seconds until the answer must arrive, over all attempts. It also limits the time in
            the server's queue.
        :param idempotent: whether the request may be computed twice. Default: the value given to ``connect``.
        :returns: arrays by output name; for BYTES, arrays of ``bytes`` objects.
        :raises AsynctrtError: the server's error, as :meth:`asynctrt.Engine.infer` would raise it.
        :raises ConnectionLostError: if the connection is lost before the answer arrives.
        :raises DeadlineError: if there is no answer within ``deadline``, or the request was queued for longer
            than ``timeout``.
        :raises OptionsError: for a ``timeout`` or ``deadline`` that is not a number of seconds.
        :raises UsageError: for an array without a name, if the model has several inputs; for a model or a
            version that is not a string; on an event loop other than the client's, and in a process forked
            from the client's.
        :raises AnswerError: if the server's answer cannot be read.
        """
        self._check_loop()
        check_names(model, version)
        deadline = _limited(seconds_of("deadline", deadline))
        wanted = Wanted(names_of(outputs), queue_timeout(timeout, deadline), priority)
        send = partial(self._infer, model, version, inputs, wanted)
        is_idempotent = self._settings.idempotent if idempotent is None else idempotent
        return await self._persist(send, deadline, is_idempotent=is_idempotent)

    async def metadata(
        self, model: str, *, version: str = "", deadline: float | None = None
    ) -> dict[str, Any]:
        """Return KServe's description of a model: its versions, platform, inputs and outputs.

        :param deadline: as for :meth:`infer`.
        :raises AsynctrtError: the server's error.
        :raises ConnectionLostError: if there is no answer.
        """
        self._check_loop()
        check_names(model, version)
        send = partial(self._describe, model, version)
        return await self._persist(send, seconds_of("deadline", deadline), is_idempotent=True)

    @property
    @abstractmethod
    def _is_over(self) -> bool:
        """Whether no further attempt can succeed."""

    @abstractmethod
    async def _infer(self, model: str, version: str, inputs: Any, wanted: Wanted) -> dict[str, Array]:
        """Send a request once, and return its answer."""

    @abstractmethod
    async def _describe(self, model: str, version: str) -> dict[str, Any]:
        """Ask for a model's description once."""

    def _persist(
        self, send: Callable[[], Awaitable[T]], deadline: float | None, *, is_idempotent: bool
    ) -> Awaitable[T]:
        answer = send() if self._attempts == 1 else self._send_again(send, is_idempotent=is_idempotent)
        return answer if deadline is None else in_time(answer, deadline)

    async def _send_again(self, send: Callable[[], Awaitable[T]], *, is_idempotent: bool) -> T:
        """Send a request until it is answered, as often as the settings allow."""
        left, delays = self._attempts, pauses(self._delay_s)
        while True:
            left -= 1
            try:
                return await send()
            except AsynctrtError as error:
                if left < 1 or self._is_over or not may_repeat(error, is_idempotent=is_idempotent):
                    raise
            await asyncio.sleep(next(delays))

    def _enter(self) -> None:
        """Record the event loop and the process to which it belongs."""
        self._loop, self._origin = running_loop(), Origin()

    def _check_loop(self) -> None:
        """Check that the client belongs to this process and event loop."""
        self._origin.check(self)
        if self._loop is not None and running_loop() is not self._loop:
            raise UsageError(
                f"{self!r} belongs to the event loop on which it was entered, and this is another one. Use a "
                "client on each loop, or one of connect_blocking, which any thread may use"
            )


class OneServer(Client):
    """A client of one server; each protocol has its own."""

    def __init__(self, url: str, settings: ClientSettings) -> None:
        super().__init__(without_credentials(url), settings)
        self._address = url
        self._inputs: dict[tuple[str, str], tuple[TensorSpec, ...]] = {}
        self.drain_s = 0.0
        """How many seconds the server needed for its queues, as its latest answer over HTTP said."""
        self.is_draining = False
        """Whether the server's latest answer over HTTP said that it takes no more requests soon."""

    async def _named(self, model: str, version: str, inputs: Any) -> Mapping[str, Any]:
        """Return a call's inputs by name. Ask for the model's metadata if that is needed, once."""
        if isinstance(inputs, Mapping) and not any(map(is_plain, inputs.values())):
            return inputs
        specs = self._inputs.get((model, version))
        if specs is None:
            try:
                described = await self._describe(model, version)
            except ConnectionLostError as error:
                raise NotConnectedError(str(error)) from error  # The request itself was not sent.
            specs = self._inputs[model, version] = input_specs(model, described)
        if not isinstance(inputs, Mapping):
            inputs = {only_input(model, specs): inputs}
        return {name: with_dtype(specs, name, value) for name, value in inputs.items()}


def _limited(deadline: float | None) -> float | None:
    """Return a call's deadline in seconds, at most what :func:`asynctrt.within` leaves."""
    limits = limits_here()
    left_ns = None if limits is None else limits.left_ns()
    if left_ns is None:
        return deadline
    return left_ns / 1e9 if deadline is None else min(deadline, left_ns / 1e9)
