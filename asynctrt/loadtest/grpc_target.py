"""Any KServe V2 server over gRPC as a load test's target.

A request's message is serialised once and sent many times. An answer is decoded only when its arrays are
needed.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Final

from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    MissingExtraError,
    OptionsError,
    OverloadError,
    RequestError,
    TargetError,
    UnsupportedError,
)
from asynctrt.kserve.client import (
    TEXT_LENGTH_MAX,
    UNREADABLE,
    as_arrays,
    describe,
    read_output,
    read_specs,
    read_values,
)
from asynctrt.kserve.datatypes import write_tensor
from asynctrt.kserve.protobuf import CONTENTS, message_classes, parse
from asynctrt.loadtest.kserve import (
    PAGE_S,
    REFUSALS,
    read_address,
    read_counters,
)
from asynctrt.loadtest.targets import ANSWER_NBYTES_MAX, BatchCounters, TargetSpec, headers_of
from asynctrt.tensors import Array

try:
    import grpc
except ImportError as error:
    raise MissingExtraError("load tests over gRPC need grpcio: pip install 'asynctrt[load]'") from error

SERVICE: Final = "/inference.GRPCInferenceService/"
STREAMS_MAX: Final = 100
"""Limit on the requests in flight on one connection; beyond it another is opened. HTTP/2 recommends that
servers allow at least this many (RFC 9113, section 6.5.2)."""

OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    # Measure the server, not a proxy in front of it.
    ("grpc.enable_http_proxy", 0),
    # Targets with the same address do not share a connection.
    ("grpc.use_local_subchannel_pool", 1),
)

KINDS: Final = {kind.grpc_code: kind for kind in REFUSALS}
"""The error for each status code."""

LOST: Final = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY")
"""The library's own messages for calls whose connection was lost."""


class _Connection:
    """A channel and the number of requests in flight on it."""

    def __init__(self, where: str, credentials: Any, options: Any) -> None:
        if credentials is not None:
            self.channel = grpc.aio.secure_channel(where, credentials, options)
        else:
            self.channel = grpc.aio.insecure_channel(where, options)
        # Without a serialiser, bytes are passed through unchanged.
        self.infer = self.channel.unary_unary(SERVICE + "ModelInfer")
        self.in_flight = 0


def _metadata(name: str, value: str) -> tuple[str, str]:
    """Return a header as gRPC's metadata.

    :raises OptionsError: for what gRPC sets itself, and for what it can only send in another form.
    """
    name = name.lower()
    if name in ("user-agent", "content-type") or name.startswith("grpc-"):
        raise OptionsError(f"the header {name!r} cannot be given over gRPC, which sets it itself")
    if name.endswith("-bin") or not value.isascii():
        raise OptionsError(f"the header {name!r} cannot be given over gRPC: only text in ASCII is sent")
    return name, value


class GrpcTarget:
    """Send to the model at ``grpc://HOST:PORT/NAME``, or ``grpcs://`` with TLS.

    At most ``STREAMS_MAX`` requests are in flight on a connection.
    """

    kind = "grpc"
    in_flight_max = None

    def __init__(self, spec: TargetSpec) -> None:
        self._address = address = read_address(spec)
        self.name, headers = address.model, headers_of(spec)
        host = next((value for name, value in headers if name.lower() == "host"), None)
        self._metadata = tuple(_metadata(name, value) for name, value in headers if name.lower() != "host")
        self._kinds = message_classes()
        options: tuple[tuple[str, Any], ...] = (
            *OPTIONS,
            ("grpc.max_receive_message_length", ANSWER_NBYTES_MAX),
        )
        scheme, _, where = address.server.partition("://")
        credentials = grpc.ssl_channel_credentials(*spec.tls.credentials()) if scheme == "grpcs" else None
        if host is not None:
            options += (("grpc.default_authority", host),)
        self._connect = partial(_Connection, where, credentials, options)
        self._connections = [self._connect()]
        self._next = self._connections[0]
        self._channel = self._next.channel
        self._create_task = asyncio.get_running_loop().create_task

    async def open(self) -> None:
        """Connect, and read the model's inputs.

        :raises TargetError: if the server cannot be reached, or does not speak KServe.
        :raises AsynctrtError: the server's refusal: an unknown model, or a missing or wrong token.
        """
        try:
            metadata = await self._ask("ModelMetadata")
        except (ConnectionLostError, UnsupportedError) as error:
            shown = f"{self._address.shown}/{self.name}"
            raise TargetError(f"{shown} cannot be reached as a KServe server: {error}") from error
        self.inputs = read_specs(
            {"name": item.name, "datatype": item.datatype, "shape": item.shape} for item in metadata.inputs
        )

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        arrays = as_arrays(inputs)
        message = self._kinds["ModelInferRequest"](
            model_name=self.name,
            model_version=self._address.version,
            inputs=[describe(name, array) for name, array in arrays.items()],
            raw_input_contents=[bytes(write_tensor(array)) for array in arrays.values()],
        )
        return message.SerializeToString()

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        return self._create_task(self._send(prepared))

    async def _send(self, body: bytes) -> bytes:
        connection = self._next
        if connection.in_flight >= STREAMS_MAX:
            connection = min(self._connections, key=attrgetter("in_flight"))
            if connection.in_flight >= STREAMS_MAX:
                connection = self._connect()
                self._connections.append(connection)
            self._next = connection
        connection.in_flight += 1
        try:
            answer: bytes = await connection.infer(body, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, connection.channel) from error
        finally:
            connection.in_flight -= 1
        return answer

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        arrays = {}
        try:
            message = parse(self._kinds["ModelInferResponse"], answer)
            raw = message.raw_output_contents
            for number, item in enumerate(message.outputs):
                if raw:
                    arrays[item.name] = read_output(item.name, item.datatype, item.shape, raw[number])
                else:
                    field, _ = CONTENTS[item.datatype]
                    values = list(getattr(item.contents, field))
                    arrays[item.name] = read_values(item.name, item.datatype, item.shape, values)
        except (*UNREADABLE, IndexError) as error:
            raise TargetError(f"the answer cannot be read: {error!r:.{TEXT_LENGTH_MAX}}") from error
        return arrays

    async def batches(self) -> BatchCounters | None:
        try:
            answer = await self._ask("ModelStatistics")
        except RequestError:
            return None  # The server has no statistics, or none for this model.
        return read_counters(answer.model_stats, getattr)

    async def aclose(self) -> None:
        await asyncio.gather(*(connection.channel.close() for connection in self._connections))

    async def _ask(self, method: str) -> Any:
        """Call a method about the model, and return its answer.

        :raises AsynctrtError: if the server refuses the call or times out, or the connection fails.
        """
        request = self._kinds[method + "Request"](name=self.name, version=self._address.version)
        call = self._channel.unary_unary(SERVICE + method)
        try:
            async with asyncio.timeout(PAGE_S):
                answer = await call(request.SerializeToString(), metadata=self._metadata)
        except TimeoutError as error:
            raise ConnectionLostError(f"{self._address.shown} did not answer within {PAGE_S:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        try:
            return parse(self._kinds[method + "Response"], answer)
        except RequestError as error:
            raise TargetError(f"{self._address.shown} does not speak KServe: {error}") from error

    def _failure(self, error: Any, channel: Any = None) -> AsynctrtError:
        """Return the error for a status other than OK."""
        channel = channel or self._channel
        code = error.code().name
        said = str(error.details())[:TEXT_LENGTH_MAX]
        if code == "UNAVAILABLE":
            # This status can mean an overloaded server or a channel without a connection. The channel
            # notices a lost connection slightly later than the calls on it.
            is_ready = channel.get_state() is grpc.ChannelConnectivity.READY
            if is_ready and not any(word in said for word in LOST):
                return OverloadError(said)
            return ConnectionLostError(f"the connection to {self._address.shown} failed: {said}")
        kind = KINDS.get(code)
        return kind(said) if kind is not None else TargetError(f"{code}: {said}")
