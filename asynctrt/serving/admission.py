"""Admit requests to an engine as its :class:`Gate` decides: at once, in their turn, or not at all."""

import asyncio
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import unquote

from asynctrt._util import clock
from asynctrt._util.validation import timeout_ns_of
from asynctrt.core.splitting import SplitAnswer, are_small
from asynctrt.engine import Engine
from asynctrt.errors import AsynctrtError, DeadlineError, EngineClosedError, QueueFullError, once_begun
from asynctrt.kserve.codec import DecodedRequest, ModelCodec
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.pipeline import PLATFORM
from asynctrt.serving.fairness import NO_DEADLINE_NS, ConnectionShare, Gate, Ticket
from asynctrt.serving.memory import ClientAccount, Hold
from asynctrt.serving.places import SHARE
from asynctrt.tensors import Array, InferResult

T = TypeVar("T", bound=ModelCodec)

FULL_BATCHES: Final = 16
FULL_BATCHES_MIN: Final = 4
"""Batches admitted while nothing waits: at most the first, within half of the engine's queue limit, and at
least the second."""

MIXED_FACTOR: Final = 8
"""Factor by which more rows are admitted for a model whose rows differ in shape: they share no batch."""

LANES_MAX: Final = 16
"""Lanes cached for a connection: one for each model and client that its requests name."""

DRAIN_NS: Final = 100_000_000
"""Time for which an estimate of when there is room again is reused."""


class Caller:
    """One connection that requests come from."""

    __slots__ = (
        "__weakref__",
        "_lanes",
        "account",
        "address",
        "client",
        "received_nbytes",
    )

    def __init__(self, address: Hashable = None) -> None:
        self.address = address
        self.client: Hashable = address
        """The client of the latest request; the address until a request has been admitted."""
        self.account: ClientAccount | None = None
        """The client's memory account, once one is needed."""
        self.received_nbytes = 0
        """Memory held for the message being handled; released afterwards."""
        self._lanes: dict[tuple[Gate, Hashable], ConnectionShare] = {}

    def __repr__(self) -> str:
        return f"<Caller {self.address!r}>"

    @property
    def has_much_waiting(self) -> bool:
        """Whether to pause reading from this connection: it has more requests waiting than its turns need."""
        return any(lane.has_much_waiting for lane in self._lanes.values())

    def lane(self, gate: Gate, name: Hashable) -> ConnectionShare:
        """Return the connection's lane at a gate, for the client called ``name``."""
        lane = self._lanes.get((gate, name))
        if lane is None:
            if len(self._lanes) >= LANES_MAX:
                self._lanes.clear()
            lane = self._lanes[gate, name] = gate.lane(name)
        return lane


def address_of(peer: Any) -> str | None:
    """Return a client's address from a socket's peer or from gRPC's text form; ``None`` if there is none.

    For IPv6 this is the /64 network, since a client has 2**64 addresses in it.
    """
    if isinstance(peer, str):  # "ipv4:127.0.0.1:1234", "ipv6:%5B::1%5D:1234"
        host = unquote(peer.partition(":")[2].rpartition(":")[0]).strip("[]")
    elif isinstance(peer, tuple | list) and peer:
        host = str(peer[0])
    else:
        return None
    if ":" in host:
        try:
            address = ip_address(host)
        except ValueError:
            return host
        if isinstance(address, IPv6Address):
            mapped = address.ipv4_mapped
            return str(mapped) if mapped is not None else f"{int(address) >> 64:x}::/64"
    return host or None


class Served(Protocol):
    """What an inference uses of its model."""

    name: str
    version: str
    codec: JsonCodec

    def codec_of(self, kind: type[T]) -> T:
        """Return the codec for its requests in one encoding."""

    def ended(self, inference: "Inference") -> BaseException | None:
        """Count the outcome of one of its requests; return its error, if it failed."""


class Inference(Ticket):
    """One inference in progress: decoded, at the gate or in the engine, until its answer is sent."""

    __slots__ = (
        "_admitted",
        "_on_end",
        "admission",
        "began_ns",
        "client",
        "future",
        "has_future",
        "headers",
        "hold",
        "key",
        "request",
        "served",
        "then",
    )

    def __init__(
        self,
        served: Served,
        request: DecodedRequest,
        began_ns: int,
        headers: Mapping[bytes, bytes],
        lane: ConnectionShare,
        admission: "Admission",
        priority: int,
        on_end: "Callable[[Inference], None]",
    ) -> None:
        # Inlined from the base class to save a call, since each request makes one of these.
        self.lane = lane
        self.rows = request.layout.rows
        self.priority = priority
        self.deadline_ns = NO_DEADLINE_NS
        self.is_waiting = self.is_light = self.is_inside = False
        self.served = served
        self.request = request
        self.headers = headers
        self.admission = admission
        self.began_ns = began_ns
        self.future: asyncio.Future[InferResult]
        """The answer's future, set once the request was admitted to the engine, or refused."""
        self.has_future = False
        self.client: Hashable = None
        """The client that it is submitted for; set by the caller."""
        self.hold: Hold | None = None
        """The memory of its inputs and outputs, if that is much."""
        self.key = 0
        """Set by a caller that needs to tell requests without an id apart."""
        self.then: Callable[[Inference], None] | None = None
        """Set by a caller that needs a callback at the end."""
        self._on_end = on_end
        self._admitted: asyncio.Future[None] | None = None

    def cancel(self) -> None:
        """Cancel the request, wherever it is."""
        if self.has_future:
            self.future.cancel()
        else:
            self.admission.give_up(self)

    async def answer(self) -> InferResult:
        """Wait for the answer. Cancelling this coroutine cancels the request."""
        if not self.has_future:
            self._admitted = asyncio.get_running_loop().create_future()
            try:
                await self._admitted
            except asyncio.CancelledError:
                self.cancel()
                raise
        return await self.future

    def ended(self, _: "asyncio.Future[InferResult]") -> None:
        """Make room for other requests, and notify the caller."""
        self.admission.ended(self)
        self._on_end(self)

    def go_on(self, future: "asyncio.Future[InferResult]") -> None:
        """Take over the future that will hold the answer."""
        self.future = future
        self.has_future = True
        future.add_done_callback(self.ended)
        if self._admitted is not None and not self._admitted.done():
            self._admitted.set_result(None)


class _Part(Ticket):
    """One batch of a request that has more rows than a batch, at the gate, so that others run in between."""

    __slots__ = ("inference", "inputs", "submitted", "turn")

    def __init__(
        self,
        inference: Inference,
        inputs: dict[str, Array],
        rows: int,
        submitted: "list[asyncio.Future[InferResult]]",
    ) -> None:
        super().__init__(inference.lane, rows, priority=inference.priority, deadline_ns=inference.deadline_ns)
        self.inference = inference
        self.inputs = inputs
        self.submitted = submitted
        """The engine's answers to the parts that were submitted to it so far."""
        self.turn: asyncio.Future[asyncio.Future[InferResult]]
        self.turn = asyncio.get_running_loop().create_future()
        """Resolved to the engine's answer once it is submitted, or fails if it is refused before."""


class Admission:
    """The entrance to one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        options = engine.options
        self._timeout_ns = None if options.timeout is None else timeout_ns_of(options.timeout)
        is_pipeline = engine.platform == PLATFORM
        self._axes = {spec.name: spec.axis for spec in engine.inputs}
        # The outputs of a pipeline for parts of a request cannot always be joined.
        self._splits = not is_pipeline and all(spec.axis is not None for spec in engine.outputs)
        self._join = partial(InferResult.join, axes={spec.name: spec.axis or 0 for spec in engine.outputs})
        self.gate = self._pipeline_gate() if is_pipeline else self._batch_gate()
        self._is_filling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NO_DEADLINE_NS
        self._closed = ""
        self._empty: asyncio.Event = asyncio.Event()
        self._empty.set()
        self._drain_s: float | None = None
        self._drain_until_ns = 0
        self.crowded = 0
        """Requests refused because too much was waiting."""
        self.expired = 0
        """Requests whose timeout expired while they waited."""

    def __repr__(self) -> str:
        return f"<Admission {self.gate!r}>"

    def _batch_gate(self) -> Gate:
        """Return a gate for an engine that forms batches."""
        engine, options = self._engine, self._engine.options
        batch_rows = engine.max_rows
        in_flight = engine.statistics().contexts
        # Half of the contexts, or two, keep a device busy; any more wait for it. One more batch is queued.
        busy = min(in_flight, max(2, in_flight // 2)) + 1
        factor = 1 if all(spec.is_fixed for spec in engine.inputs) else MIXED_FACTOR
        full_rows = max(
            max(in_flight + 1, FULL_BATCHES_MIN) * batch_rows * factor,
            min(FULL_BATCHES * batch_rows, options.max_queue_rows // 2),
        )
        return Gate(
            batch_rows=batch_rows,
            busy_rows=busy * batch_rows * factor,
            full_rows=full_rows,
            waiting_rows_max=max(0, options.max_queue_rows - full_rows),
        )

    def _pipeline_gate(self) -> Gate:
        """Return a gate for a pipeline: a quarter of its capacity is kept for other clients."""
        rows = self._engine.max_rows
        full_rows = max(1, rows * (SHARE - 1) // SHARE)
        return Gate(
            batch_rows=max(1, rows // SHARE),
            busy_rows=max(1, rows // 2),
            full_rows=full_rows,
            waiting_rows_max=rows - full_rows,
        )

    def submit(self, inference: Inference) -> None:
        """Submit a request to the engine, or let it wait at the gate."""
        gate = self.gate
        if self._closed:
            raise EngineClosedError(self._closed)
        if gate.enter(inference, inference.began_ns):
            request = inference.request
            try:
                layout = request.layout
                inference.future = future = self._engine.submit(
                    request.inputs,
                    timeout=layout.timeout,
                    priority=inference.priority,
                    outputs=layout.wanted,
                )
            except BaseException as error:
                gate.end(inference)
                self._foretell(error)
                raise
            inference.has_future = True
            future.add_done_callback(inference.ended)
            return
        self._wait(inference)

    def ended(self, ticket: Ticket) -> None:
        """Release the room of a request that was answered or failed. No-op if it was never admitted."""
        gate = self.gate
        gate.end(ticket)
        if gate.waiting and not self._is_filling:
            # Not immediately: a batch's answers come one by one, and all its rows are free after the last.
            self._is_filling = True
            asyncio.get_running_loop().call_soon(self._fill)

    def give_up(self, inference: Inference) -> None:
        """Cancel a waiting request."""
        if self.gate.leave(inference):
            self._refuse(inference, None)
            self._note_empty()

    async def drain(self) -> None:
        """Refuse new requests, and return once none is waiting."""
        self._closed = f"{self._engine.name!r} is draining: send to another engine"
        await self._empty.wait()

    def fail(self) -> None:
        """Refuse new requests and fail waiting ones, because the engine is closed."""
        self._closed = f"{self._engine.name!r} is closed"
        for ticket in self.gate.clear():
            self._refuse(ticket, EngineClosedError(self._closed))
        self._note_empty()

    # ---- waiting

    def _wait(self, inference: Inference) -> None:
        gate = self.gate
        request = inference.request
        timeout = request.layout.timeout
        timeout_ns = self._timeout_ns if timeout is None else timeout_ns_of(timeout)
        if timeout_ns is not None:
            inference.deadline_ns = clock.now_ns() + timeout_ns
        crowded, has_room = gate.make_room(inference)
        for ticket in crowded:
            self._refuse(ticket, self._too_much())
        self.crowded += len(crowded) + (not has_room)
        if not has_room:
            raise self._too_much()
        self._empty.clear()
        if inference.rows > gate.batch_rows and self._splits:
            self._wait_in_parts(inference)
        else:
            gate.wait(inference)
        if timeout_ns is not None:
            self._set_timer()
        if not gate.rows:
            self._fill()  # The engine is empty, so nothing will end and admit this request.

    def _wait_in_parts(self, inference: Inference) -> None:
        gate, rows, axes = self.gate, inference.rows, self._axes
        parts: list[_Part] = []
        submitted: list[asyncio.Future[InferResult]] = []
        for start in range(0, rows, gate.batch_rows):
            span = slice(start, start + gate.batch_rows)
            inputs = inference.request.inputs.items()
            part = {name: _part_of(array, span, axes[name]) for name, array in inputs}
            parts.append(_Part(inference, part, min(gate.batch_rows, rows - start), submitted))
            gate.wait(parts[-1])
        answer = SplitAnswer(self._answer_in_parts(parts, submitted), loop=asyncio.get_running_loop())
        answer.parts = submitted
        # A task that is cancelled before it starts runs none of its code.
        answer.add_done_callback(lambda _: self._give_up_parts(parts, submitted))
        inference.go_on(answer)

    async def _answer_in_parts(
        self, parts: list[_Part], submitted: "list[asyncio.Future[InferResult]]"
    ) -> InferResult:
        """Wait for the answers to all parts of a request, and join them."""
        try:
            results = await asyncio.gather(*[_answer_of(part.turn) for part in parts])
        except AsynctrtError as error:
            made = once_begun(error) if submitted else error
            if made is error:
                raise
            raise made from error
        finally:
            self._give_up_parts(parts, submitted)
        return self._join(results) if are_small(results) else await asyncio.to_thread(self._join, results)

    def _give_up_parts(self, parts: list[_Part], submitted: "list[asyncio.Future[InferResult]]") -> None:
        """Cancel the parts that have not ended, and empty their list: an error's traceback refers to it."""
        while parts:
            part = parts.pop()
            self.gate.leave(part)
            part.turn.cancel()
        for future in submitted:
            future.cancel()
        self._note_empty()

    def _fill(self) -> None:
        """Admit as many waiting requests as there is room for."""
        self._is_filling = False
        self._expire()
        for ticket in self.gate.admit(clock.now_ns()):
            self._launch(ticket)
        self._note_empty()

    def _launch(self, ticket: Ticket) -> None:
        """Submit a request to the engine when its turn has come."""
        assert isinstance(ticket, Inference | _Part)
        if isinstance(ticket, _Part) and ticket.turn.done():  # Its request was cancelled just now.
            self.ended(ticket)
            return
        timeout = None
        if ticket.deadline_ns != NO_DEADLINE_NS:
            timeout = max(1, ticket.deadline_ns - clock.now_ns()) / 1e9
        request = (ticket.inference if isinstance(ticket, _Part) else ticket).request
        inputs = ticket.inputs if isinstance(ticket, _Part) else request.inputs
        try:
            future = self._engine.submit(
                inputs, timeout=timeout, priority=ticket.priority, outputs=request.layout.wanted
            )
        except AsynctrtError as error:
            self.ended(ticket)
            self._foretell(error)
            self._refuse(ticket, error)
            return
        if isinstance(ticket, _Part):
            ticket.inputs = {}
            ticket.submitted.append(future)
            future.add_done_callback(lambda _: self.ended(ticket))
            ticket.turn.set_result(future)
        else:
            ticket.go_on(future)

    def _refuse(self, ticket: Ticket, error: AsynctrtError | None) -> None:
        """Fail a request that no longer waits with ``error``; if ``None``, cancel it."""
        assert isinstance(ticket, Inference | _Part)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if isinstance(ticket, _Part):
            future = ticket.turn
        if error is None or future.done():
            future.cancel()
        else:
            future.set_exception(error)
        if isinstance(ticket, Inference):
            ticket.go_on(future)

    def _expire(self) -> None:
        """Refuse requests whose timeout has expired."""
        now_ns = clock.now_ns()
        for ticket in self.gate.due(now_ns):
            assert isinstance(ticket, Inference | _Part)
            inference = ticket if isinstance(ticket, Inference) else ticket.inference
            waited_ms = (now_ns - inference.began_ns) / 1e6
            self.expired += 1
            self._refuse(
                ticket,
                DeadlineError(
                    f"its timeout passed after {waited_ms:.3f} ms behind other requests of its client; it "
                    "did not reach the device. Allow more time, or send less"
                ),
            )

    def _set_timer(self) -> None:
        """Schedule the next check of deadlines for the earliest one."""
        earliest_ns = self.gate.earliest_ns()
        if earliest_ns is None or earliest_ns >= self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = earliest_ns
        delay_s = max(0, earliest_ns - clock.now_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._timer_ns = NO_DEADLINE_NS
        self._expire()
        self._note_empty()
        self._set_timer()

    def _note_empty(self) -> None:
        if not self.gate.waiting:
            self._empty.set()

    def _too_much(self) -> QueueFullError:
        gate = self.gate
        error = QueueFullError(
            f"{gate.waiting_rows} rows wait for {self._engine.name!r}, and "
            "this client has the most of them. Wait for answers before sending more, or retry later"
        )
        self._foretell(error)
        return error

    def _foretell(self, error: BaseException) -> None:
        """Set an estimate of when there is room again on an error for lack of room, if there is one."""
        if isinstance(error, QueueFullError):
            now_ns = clock.now_ns()
            if now_ns >= self._drain_until_ns:  # A flood is refused often, and the estimate changes slowly.
                self._drain_until_ns = now_ns + DRAIN_NS
                self._drain_s = self._engine.statistics().drain_s(self.gate.waiting_rows)
            error.predicted_s = self._drain_s


def error_of(future: "asyncio.Future[Any]") -> BaseException | None:
    """Return why a future that is done has no result; ``None`` if it has one."""
    return asyncio.CancelledError() if future.cancelled() else future.exception()


def has_result(future: "asyncio.Future[InferResult]") -> bool:
    """Return whether the future is done, was not cancelled and did not fail."""
    return future.done() and error_of(future) is None


def counted(future: "asyncio.Future[InferResult]") -> int:
    """Return how many answers the engine has counted for a call so far: one for each part of a split call."""
    parts = getattr(future, "parts", None)
    if parts is not None:
        return sum(map(counted, parts))
    return int(has_result(future))


def _part_of(array: Array, rows: slice, axis: int | None) -> Array:
    """Return a range of an input's rows, or the whole input if it has no rows."""
    return array if axis is None else array[(slice(None),) * axis + (rows,)]


async def _answer_of(turn: "asyncio.Future[asyncio.Future[InferResult]]") -> InferResult:
    """Wait until a part of a request was submitted, and then for its answer."""
    return await (await turn)
