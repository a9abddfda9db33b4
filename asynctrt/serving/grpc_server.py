"""Serve KServe over gRPC: Triton's service, and health checks, on ``grpc.aio``.

Handlers take and return bytes, so a malformed message is answered like any other error. When a client cancels
a call, or its deadline passes, its task is cancelled, and its request leaves the queue.

gRPC reads a message only on request; until then a client can send 64 KiB of it. So every method first checks
the metadata, then waits for memory, then reads the message, within a time limit. gRPC would also decompress
messages, on the one thread that all calls share: that is turned off, and done here instead.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, Final, NamedTuple, NoReturn
from weakref import WeakValueDictionary

from asynctrt._util import clock
from asynctrt.errors import (
    AsynctrtError,
    EngineClosedError,
    MissingExtraError,
    QueueFullError,
    RequestError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
)
from asynctrt.kserve.protobuf import (
    ProtobufCodec,
    SplitRequest,
    message_classes,
    parse,
    reflected,
    split_request,
    streamed,
    streamed_error,
)
from asynctrt.serving.admission import Caller, Inference, address_of, error_of
from asynctrt.serving.api import Api, Headers, Then
from asynctrt.serving.coding import Body, is_compressed
from asynctrt.serving.credentials import Certificate
from asynctrt.serving.gathering import Gathering
from asynctrt.serving.grpc_connections import GrpcConnections
from asynctrt.serving.http import SWEEP_S
from asynctrt.serving.listener import HANDSHAKE_S, cannot_listen
from asynctrt.serving.memory import SHORT_NS, SMALL_NBYTES, Hold
from asynctrt.serving.places import SHARE, Places
from asynctrt.serving.responses import ID_METADATA, OUR_ERROR, STOPPING, pushback
from asynctrt.serving.served import ServedModel
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.worker import pause

# gRPC's core would write a line to standard error for each malformed call, and wait if nothing reads it. It
# looks at this variable when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
try:
    import grpc
except ImportError as error:
    raise MissingExtraError("gRPC needs grpcio: pip install 'asynctrt[serve]'") from error

SERVICE: Final = "inference.GRPCInferenceService"
HEALTH_SERVICE: Final = "grpc.health.v1.Health"
REFLECTION: Final = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""The services by which tools such as grpcurl learn what the server has: two names, the same messages."""
STRANGERS_MAX: Final = 32
"""Messages read at once from clients without a token: each could be of the largest size."""
CROWD_S: Final = 0.25
"""How long a call waits before a message being read makes room: honest ones may come all at once."""

CALL_NS: Final = 100_000
"""Approximate event loop time of a call."""

OPEN: Final = frozenset({"ServerLive", "ServerReady"})
"""Methods that need no token."""

UNSUPPORTED: Final = (
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
)
"""Methods of Triton's service that are not implemented."""

MESSAGE_NBYTES: Final = 4 << 20
MESSAGE_NBYTES_MAX: Final = 16 << 20
"""Bounds of the default message size: gRPC copies such messages in 1 ms and in 4 ms."""
HEAD_NBYTES: Final = 64 << 10
"""Room in a message for names and parameters, besides tensors."""

FIELD_NBYTES: Final = 32
"""Bytes that HTTP/2 counts for a header besides its name and value."""
HEADERS_FACTOR: Final = 4
HEADERS_NBYTES: Final = 16 << 10
"""Once a client has acknowledged the limit on headers, gRPC truncates them at 1.25 times the limit, or at
this number of bytes. A client that sends ``HEADERS_FACTOR`` times more ignores it: it is cut off."""

PENDING_MAX: Final = 1000
"""Calls that gRPC holds until they are taken. It does so with all their headers: a client that has not
acknowledged the limits may have sent 16 MiB of them in 4 KiB, which take 0.3 MB here."""

NBYTES_MAX: Final = 2**31 - 1
"""gRPC's own limit for a message. In an option that is a time, it means that there is none."""
DETAILS_LENGTH_MAX: Final = 2000
"""Characters sent of an error message; clients refuse trailers over 8 KiB."""

HANDSHAKE_MS: Final = int(HANDSHAKE_S * 1000)
"""Time limit for a new connection's handshake: TLS, and HTTP/2's first frame."""

logger = logging.getLogger("asynctrt.serving")


class GrpcServer:
    """Serve an :class:`Api` over gRPC, with the address and limits in ``settings``."""

    def __init__(
        self,
        api: Api,
        settings: ServerSettings,
        certificate: Certificate | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self._shares_port = shares_port
        self._api = api
        self._settings = settings
        self._certificate = certificate
        self._kinds = message_classes()
        self._request = self._kinds["ModelInferRequest"]
        self._callers: WeakValueDictionary[tuple[str, bytes | None], Caller] = WeakValueDictionary()
        """Callers with calls in progress, or in :attr:`_latest`."""
        self._latest: dict[tuple[str, bytes | None], Caller] = {}
        """Callers since the last sweep: creating one takes longer than finding it."""
        self._streams: set[_Stream] = set()
        self._connections = GrpcConnections(settings.max_connections)
        self._server: Any = None
        self._is_stopping = False
        self._answer_nbytes_max = settings.max_grpc_message or message_nbytes(api.repository)
        self.message_nbytes_max = min(self._answer_nbytes_max, settings.max_body, NBYTES_MAX)
        """Bytes of the largest request."""
        self._strangers: Places[asyncio.Timeout] = Places(STRANGERS_MAX)
        self._crowd = asyncio.Semaphore(STRANGERS_MAX)
        # A message on a stream is counted only once it is complete, so limit the number of streams.
        memory_nbytes = api.memory.nbytes_max
        self._places: Places[_Stream] = Places(max(STRANGERS_MAX, memory_nbytes // self.message_nbytes_max))
        self._reading: set[_Reading] = set()
        """Messages being read."""
        self._gathering = Gathering()
        self._shut: set[str] = set()
        """Peers whose connections were closed since the last sweep."""
        self._sending: dict[Any, _Sending] = {}
        """Answers that clients have not taken yet."""
        self._tokens_version = api.tokens_version
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "stopping" if self._is_stopping else "serving"
        return f"<GrpcServer {state if self._server else 'down'} streams={len(self._streams)}>"

    async def start(self) -> int:
        """Listen, and return the port."""
        host, port = self._settings.host, self._settings.grpc_port
        credentials = self._credentials()
        if not self._shares_port:
            await check_address(host, port)
        server = grpc.aio.server(
            options=self._options(),
            maximum_concurrent_rpcs=self._settings.max_requests + self._settings.max_connections,
        )
        server.add_generic_rpc_handlers(
            (
                _HeaderLimit(self._settings.max_headers, self._close_connection),
                grpc.method_handlers_generic_handler(SERVICE, self._methods()),
                grpc.method_handlers_generic_handler(HEALTH_SERVICE, self._health_methods()),
                *[grpc.method_handlers_generic_handler(name, self._reflection()) for name in REFLECTION],
            )
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials)
            await server.start()
        except BaseException as error:
            await server.stop(None)
            if isinstance(error, RuntimeError):
                raise cannot_listen(host, port, error, "grpc_port") from error
            raise
        self._server = server
        self._connections.port = int(bound)
        self._sweep()
        return int(bound)

    async def stop(self, grace_s: float) -> None:
        """Refuse new requests; return once the others are answered, or cancelled after ``grace_s``."""
        self._is_stopping = True
        for stream in list(self._streams):
            stream.finish()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        """Give up calls whose clients send or receive too slowly, or whose token was revoked."""
        self._timer = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        self._shut.clear()
        now_ns = clock.now_ns()
        limit_ns = int(self._settings.request_timeout * 1e9)
        if self._api.memory.is_short(now_ns):
            limit_ns = min(limit_ns, SHORT_NS)
        for reading in self._reading:
            if now_ns - reading.since_ns > limit_ns:
                reading.give_up()
        self._look_at_answers(now_ns)
        self._latest.clear()
        self._connections.look(peer for peer, _ in self._callers)
        if self._tokens_version != self._api.tokens_version:
            self._tokens_version = self._api.tokens_version
            for stream in list(self._streams):
                stream.check_token()

    async def _close_connection(self, _: Any, context: Any) -> None:
        """Answer a call whose client ignores the limit on headers."""
        peer = context.peer()
        if peer not in self._shut:
            self._shut.add(peer)
            self._connections.shut_down([peer])
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the call has too many headers")

    def _look_at_answers(self, now_ns: int) -> None:
        """Close connections whose clients do not take their answers, if others need the room.

        gRPC cannot end such a call in any other way: it would have to inform the client.
        """
        is_much = len(self._sending) > self._settings.max_requests // SHARE
        is_needed = is_much or self._api.memory.is_short(now_ns)
        late_ns = now_ns - int(self._settings.write_timeout * 1e9)
        peers = set()
        for key, sending in list(self._sending.items()):
            if sending.task.done():
                del self._sending[key]
            elif is_needed and sending.since_ns < late_ns:
                peers.add(sending.context.peer())
        self._connections.shut_down(peers)

    def _reporting(self, work: Callable[[Any], Awaitable[bytes]]) -> Any:
        """Return the handler of a unary method that answers with ``work``, or with its error.

        The method is declared with a stream of requests, and ``work`` reads the only one: otherwise gRPC
        would read it first.
        """

        async def handle(_: Any, context: Any) -> bytes:
            # The context keeps the exception that aborts a call; its traceback refers to this frame, which
            # refers to the context: a cycle. So by then nothing here may refer to the message, or to an error
            # whose traceback does.
            working = work(context)
            try:
                return await working
            except Exception as error:
                failure = _explained(error)
            del working
            return await self._abort(context, failure)

        return grpc.stream_unary_rpc_method_handler(handle)

    async def _abort(self, context: Any, failure: "_Failure") -> NoReturn:
        self.sending(context, context)
        if failure.metadata:
            context.set_trailing_metadata((*context.trailing_metadata(), *failure.metadata))
        await context.abort(grpc.StatusCode[failure.code], failure.details)
        raise AssertionError("abort raises")

    def sending(self, key: Any, context: Any) -> None:
        """Record that a client has to take an answer from now on."""
        task = asyncio.current_task()
        assert task is not None
        self._sending[key] = _Sending(clock.now_ns(), task, context)

    def sent(self, key: Any) -> None:
        """Record that the client took an answer, unless the answer ends its task."""
        self._sending.pop(key, None)

    def _options(self) -> list[tuple[str, int]]:
        settings = self._settings
        idle_ms = max(1000, int(settings.idle_timeout * 1000))
        return [
            # A second server that shared the port would receive half of the connections.
            ("grpc.so_reuseport", int(self._shares_port)),
            ("grpc.max_receive_message_length", self.message_nbytes_max),
            ("grpc.per_message_decompression", 0),
            ("grpc.max_send_message_length", -1),
            # Limits apply only once the client has acknowledged them.
            ("grpc.http2.settings_timeout", HANDSHAKE_MS),
            ("grpc.max_metadata_size", min(settings.max_headers, NBYTES_MAX)),
            # Without a table of earlier headers, a byte cannot stand for one of 4 KiB.
            ("grpc.http2.hpack_table_size.decoder", 0),
            ("grpc.server.max_pending_requests", PENDING_MAX),
            ("grpc.server.max_pending_requests_hard_limit", PENDING_MAX + 1),
            ("grpc.max_connection_idle_ms", idle_ms),
            # Connections beyond these are closed; further calls on one connection wait at the client.
            ("grpc.max_allowed_incoming_connections", min(self._connections.accepted_max, NBYTES_MAX)),
            ("grpc.max_concurrent_streams", min(settings.max_requests_per_connection, NBYTES_MAX)),
            # It would refuse further calls, instead of letting them wait.
            ("grpc.http.overload_protection", 0),
            ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
            # A client whose machine has failed sends nothing; a failed ping cancels its requests.
            ("grpc.keepalive_time_ms", idle_ms),
            # By default, clients that ping more often than every 5 min, or 2 h without a call, are cut off.
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                settings.grpc_http2_min_recv_ping_interval_without_data,
            ),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.max_connection_age_ms", settings.grpc_max_connection_age or NBYTES_MAX),
            ("grpc.max_connection_age_grace_ms", settings.grpc_max_connection_age_grace or NBYTES_MAX),
        ]

    def _credentials(self) -> Any:
        certificate = self._certificate
        if certificate is None:
            return None
        used = certificate.pem

        def config() -> Any:
            return grpc.ssl_server_certificate_configuration([(used.key, used.chain)])

        def changed() -> Any:
            # gRPC's thread calls this for each new connection; None means unchanged.
            nonlocal used
            if certificate.pem is used:
                return None
            used = certificate.pem
            return config()

        return grpc.dynamic_ssl_server_credentials(config(), changed)

    # ---- requests of all kinds

    def _methods(self) -> dict[str, Any]:
        answers: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": partial(self._control, "load"),
            "RepositoryModelUnload": partial(self._control, "unload"),
        }
        methods = {name: self._unary(name, answer) for name, answer in answers.items()}
        methods |= {name: self._unsupported(name) for name in UNSUPPORTED}
        methods["ModelInfer"] = self._reporting(self._infer)
        methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._stream)
        return methods

    def _unary(self, name: str, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return a handler that parses the request, awaits ``answer``, and reports any error."""
        kind, answer_kind = self._kinds[name + "Request"], self._kinds[name + "Response"]

        async def work(context: Any) -> bytes:
            if name in OPEN:
                self._named(context)
                request = kind()  # It has no fields, so it need not be read.
            else:
                _, caller = self._let_in(name, context)
                request = self._parse(kind, (await self._read(context, caller))[0])
            fields = await answer(request)
            return bytes(answer_kind(**fields).SerializeToString())

        return self._reporting(work)

    def _parse(self, kind: Any, body: Body) -> Any:
        """Parse a message without tensors."""
        if len(body) > self._settings.max_json:
            raise TooLargeError(
                f"the request has {len(body)} bytes; at most {self._settings.max_json} are accepted"
            )
        return parse(kind, bytes(body))

    def _unsupported(self, name: str) -> Any:
        async def work(context: Any) -> bytes:
            self._let_in(name, context)
            raise UnsupportedError(f"this server does not implement {name}")

        return self._reporting(work)

    def _named(self, context: Any) -> dict[bytes, bytes]:
        """Return a call's metadata as headers, with its id, which is also returned with the answer."""
        headers = _headers(context)
        context.set_trailing_metadata(((ID_METADATA, self._api.ids.of(headers).decode()),))
        return headers

    def _let_in(self, name: str, context: Any) -> tuple[Headers, Caller]:
        """Check a client's token. Return its headers, and the caller that calls on one connection share."""
        headers = self._named(context)
        if self._api.has_tokens:
            self._api.authorize(f"/{SERVICE}/{name}".encode(), headers)
        # A proxy sends several clients' calls on one connection.
        key = context.peer(), self._api.named(headers)
        caller = self._latest.get(key)
        if caller is None:
            self._connections.know(key[0])
            caller = self._callers.get(key)
            if caller is None:
                caller = self._callers[key] = Caller(address_of(key[0]))
                self._api.identify(caller, headers)
            self._latest[key] = caller
        return headers, caller

    async def _read(self, context: Any, caller: Caller) -> tuple[Body, Hold]:
        """Read a call's only message, in its client's turn and once there is memory for it."""
        account = self._api.account(caller)
        await self._api.turns.enter(account, CALL_NS)
        hold = Hold(account)
        if not await hold.reserve(self.message_nbytes_max):
            raise QueueFullError(self._api.memory.refuse())
        # Not asyncio.timeout(): a timer for each call would take a tenth of its time.
        reading = _Reading()
        self._reading.add(reading)
        self._gathering.expect(reading)
        try:
            body = await context.read()
        except asyncio.CancelledError:
            if not reading.is_late:
                raise
            reading.task.uncancel()
            raise _LateError("the message did not arrive in time") from None
        finally:
            self._reading.discard(reading)
            self._gathering.arrived(reading)
        return await self._unpacked(_some(body), hold, caller), hold

    async def _unpacked(self, body: bytes, hold: Hold, caller: Caller) -> Body:
        """Decompress a message if its client compressed it."""
        hold.set(len(body))
        if not is_compressed(body):
            return body
        nbytes_max = self.message_nbytes_max
        return await self._api.decompressed(b"gzip", body, hold, caller.client, nbytes_max)

    async def _read_stranger(self, context: Any) -> Any:
        """Read the next message of a call that holds little and may need no token; EOF after the last."""
        address = address_of(context.peer())
        try:
            async with asyncio.timeout(HANDSHAKE_S) as timeout:
                await self._enter_crowd()
                try:
                    self._strangers.take(address, timeout, partial(timeout.reschedule, 0))
                    return await context.read()
                finally:
                    self._strangers.give_back(address, timeout)
                    self._crowd.release()
        except TimeoutError:
            raise _LateError("the message did not arrive in time") from None

    async def _enter_crowd(self) -> None:
        """Wait until another message may be read; after ``CROWD_S``, drop one that has not arrived."""
        try:
            async with asyncio.timeout(CROWD_S):
                await self._crowd.acquire()
        except TimeoutError:
            self._strangers.free_one()
            await self._crowd.acquire()

    async def _server_live(self, _: Any) -> dict[str, Any]:
        return {"live": self._api.repository.is_live}

    async def _server_ready(self, _: Any) -> dict[str, Any]:
        return {"ready": self._is_ready}

    async def _model_ready(self, request: Any) -> dict[str, Any]:
        try:
            self._api.repository.find_ready(request.name, request.version)
        except AsynctrtError:
            return {"ready": False}
        return {"ready": True}

    async def _server_metadata(self, _: Any) -> dict[str, Any]:
        return self._api.server_metadata()

    async def _model_metadata(self, request: Any) -> dict[str, Any]:
        return self._api.describe("", request.name, request.version)

    async def _model_config(self, request: Any) -> dict[str, Any]:
        return {"config": self._api.describe("config", request.name, request.version)}

    async def _model_statistics(self, request: Any) -> dict[str, Any]:
        statistics = await self._api.all_statistics(request.name, request.version)
        for model in statistics:
            del model["batches_launched"]  # Triton's message has no field for it.
        return {"model_stats": statistics}

    async def _index(self, request: Any) -> dict[str, Any]:
        return {"models": self._api.index(request.ready)}

    async def _control(self, verb: str, request: Any) -> dict[str, Any]:
        await self._api.control(request.model_name, verb, request.parameters)
        return {}

    # ---- inference

    async def _infer(self, context: Any) -> bytes:
        headers, caller = self._let_in("ModelInfer", context)
        log = self._api.log
        then = None if log is None else partial(log, "grpc", context.peer())
        body, hold = await self._read(context, caller)
        began_ns = clock.now_ns()
        split = self._split(body)
        del body
        request = await self._parsed(split, caller, hold)
        if self._gathering.pays:
            await self._gathering.wait(context.time_remaining())
        inference = await self._begin(request, split.raw, began_ns, headers, caller, hold, then)
        del split, hold  # The inputs are views of the message, whose memory the inference now holds.
        # Cancelling this task cancels the request.
        await inference.answer()
        answer = await self._encoded(inference, bytes)
        self.sending(context, context)
        if len(answer) > SMALL_NBYTES:
            # gRPC has it until it is sent. The context keeps the callback, and with it the hold.
            context.add_done_callback(partial(_sent, Hold(self._api.account(caller), len(answer))))
        return answer

    async def _encoded(self, inference: Inference, wrap: Callable[[bytes], bytes]) -> bytes:
        """Encode an answer and ``wrap`` it, in a thread if that is slow."""
        codec = inference.served.codec_of(ProtobufCodec)
        request, result = inference.request, inference.future.result()
        self._check_answer(sum([result[spec.name].nbytes for spec, _ in request.layout.outputs]))
        if codec.is_slow_answer(request.layout, result):
            work = partial(_wrapped, wrap, codec, request, result)
            answer = await self._api.worker.run(work, inference.client)
        else:
            answer = wrap(codec.encode(request, result))
        if not request.layout.is_simple:
            self._check_answer(len(answer))  # The size of strings is only known now.
        return answer

    async def _stream(self, _: Any, context: Any) -> None:
        failure = None
        try:
            headers, caller = self._let_in("ModelStreamInfer", context)
            stream = _Stream(self, context, headers, caller)
            client = caller.client
            self._places.take(client, stream, stream.crowd_out)
            self._streams.add(stream)
            try:
                await stream.run()
            finally:
                self._streams.discard(stream)
                self._places.give_back(client, stream)
        except AsynctrtError as error:
            failure = _explained(error)
        if failure is None and self._is_stopping:
            failure = _explained(EngineClosedError(STOPPING))
        if failure is not None:
            await self._abort(context, failure)

    def _split(self, body: Body) -> SplitRequest:
        """Take the raw tensors out of an inference request, unless the rest is too large."""
        return split_request(body, nbytes_max=self._settings.max_json)

    async def _parsed(self, split: SplitRequest, caller: Caller, hold: Hold) -> Any:
        """Parse everything but the raw tensors, in a thread if it is much."""
        if split.is_slow:
            # The thread holds the message's memory even after the client has disconnected.
            return await self._api.worker.run(partial(parse, self._request, split.rest), caller.client, hold)
        return parse(self._request, split.rest)

    async def _begin(
        self,
        request: Any,
        raw: list[memoryview] | None,
        began_ns: int,
        headers: Headers,
        caller: Caller,
        hold: Hold,
        then: Then | None = None,
    ) -> Inference:
        """Decode a request, in a thread if that is slow, and submit it to its engine.

        :param began_ns: when its message had been read.
        :raises AsynctrtError: if it is refused; the failure has already been counted.
        """
        served = self._api.repository.find(request.model_name, request.model_version)
        try:
            codec = served.codec_of(ProtobufCodec)
            if raw is not None and (not raw or codec.is_slow(raw)):
                work = partial(codec.decode, request, raw, pause)
                decoded = await self._api.worker.run(work, caller.client, hold)
                del work
            else:
                decoded = codec.decode(request, raw)
            self._check_answer(decoded.layout.answer_nbytes)
            caller.received_nbytes = hold.nbytes
            return self._api.submit(served, decoded, began_ns, headers, caller, then)
        except AsynctrtError as error:
            served.count_failure(error, clock.now_ns() - began_ns)
            raise

    def _check_answer(self, nbytes: int) -> None:
        """Refuse an answer so large that others would have to wait while gRPC copies it."""
        nbytes_max = self._answer_nbytes_max
        if nbytes > nbytes_max:
            raise TooLargeError(
                f"the outputs have {nbytes} bytes; at most {nbytes_max} are sent over gRPC. Ask for fewer "
                "rows or outputs, use HTTP or a websocket, or raise max_grpc_message, and the client's limit"
            )

    # ---- health

    @property
    def _is_ready(self) -> bool:
        return self._api.repository.is_ready and not self._is_stopping

    def _health_methods(self) -> dict[str, Any]:
        # Without Watch, which would hold a stream for each stranger, clients take a server for healthy.
        return {"Check": self._reporting(self._check_health)}

    def _service(self, body: bytes, context: Any) -> str:
        """Return the service that a client asks about. If tokens are set, asking about a model needs one."""
        service: str = self._parse(self._kinds["HealthCheckRequest"], body).service
        if service not in ("", SERVICE) and self._api.has_tokens:
            self._api.authorize(f"/{HEALTH_SERVICE}/Check".encode(), _headers(context))
        return service

    def _health(self, service: str) -> str:
        """Return the status of a model; for an empty name or the service's, that of the server."""
        is_draining = self._is_stopping or self._api.repository.is_draining
        if service in ("", SERVICE):
            return "SERVING" if self._is_ready else "NOT_SERVING"
        states = [item["state"] for item in self._api.repository.index() if item["name"] == service]
        if not states:
            return "SERVICE_UNKNOWN"
        return "SERVING" if "READY" in states and not is_draining else "NOT_SERVING"

    async def _check_health(self, context: Any) -> bytes:
        service = self._service(_some(await self._read_stranger(context)), context)
        status = self._health(service)
        if status == "SERVICE_UNKNOWN":
            raise UnknownModelError(f"unknown model {service!r:.200}")
        return bytes(self._kinds["HealthCheckResponse"](status=status).SerializeToString())

    # ---- reflection

    def _reflection(self) -> dict[str, Any]:
        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._reflect)}

    async def _reflect(self, _: Any, context: Any) -> None:
        kind, answer_kind = self._kinds["ServerReflectionRequest"], self._kinds["ServerReflectionResponse"]
        try:
            self._let_in("ServerReflectionInfo", context)
            while (body := await self._read_stranger(context)) is not grpc.aio.EOF:
                request = self._parse(kind, body)
                answer = answer_kind(original_request=request, **reflected(request))
                await context.write(answer.SerializeToString())
        except AsynctrtError as error:
            failure = _explained(error)
        else:
            return
        await self._abort(context, failure)


class _HeaderLimit:
    """A generic handler, asked first, for calls whose headers exceed the limit by far.

    :param limit_nbytes: the limit, as HTTP/2 counts the bytes of headers.
    :param refuse: answers such a call.
    """

    def __init__(self, limit_nbytes: int, refuse: Callable[[Any, Any], Awaitable[None]]) -> None:
        self._nbytes_max = HEADERS_FACTOR * max(limit_nbytes, HEADERS_NBYTES)
        self._refusal = grpc.stream_stream_rpc_method_handler(refuse)

    def service(self, call: Any) -> Any:
        """Return the handler of a call with too many headers, otherwise ``None``."""
        nbytes = sum([len(name) + len(value) + FIELD_NBYTES for name, value in call.invocation_metadata])
        return self._refusal if nbytes > self._nbytes_max else None


class _Stream:
    """One ``ModelStreamInfer`` call: reads requests, and writes each answer when it is ready."""

    def __init__(self, server: GrpcServer, context: Any, headers: Headers, caller: Caller) -> None:
        self._server = server
        self._context = context
        self._headers = headers
        self._caller = caller
        self._account = server._api.account(caller)
        self._cut: asyncio.Timeout | None = None
        self._why: AsynctrtError | None = None
        """Why it was cut off."""
        self._taken_max = server._settings.max_requests_per_connection
        self._taken = 0
        """Requests that were read and whose answers have not been written."""
        self._answer_nbytes_max = server._settings.max_body
        self._answer_nbytes = 0
        """Raw bytes of the answers to those requests."""
        self._in_flight: set[Inference] = set()
        self._answers: deque[Inference | bytes] = deque()
        self._may_read = asyncio.Event()
        self._may_write = asyncio.Event()
        self._reader = asyncio.create_task(self._read())
        self._reader.add_done_callback(lambda _: self._may_write.set())

    async def run(self) -> None:
        """Serve until the client has finished sending and every request is answered."""
        try:
            async with asyncio.timeout(None) as self._cut:
                await self._write()
        except TimeoutError:
            if self._why is not None:
                raise self._why from None
            raise
        finally:
            self._reader.cancel()
            for inference in self._in_flight:
                inference.cancel()
            await asyncio.wait([self._reader])
        if not self._reader.cancelled():
            self._reader.result()

    def finish(self) -> None:
        """Stop reading, answer what was read, and end."""
        self._reader.cancel()

    def crowd_out(self) -> None:
        """End at once: there are too many streams, and this client has the most."""
        self._end(QueueFullError("too many streams are open, most of them by this client: retry later"))

    def check_token(self) -> None:
        """End at once if the token that opened the stream was revoked."""
        try:
            self._server._api.authorize(f"/{SERVICE}/ModelStreamInfer".encode(), self._headers)
        except UnauthorizedError as error:
            self._end(error)

    def _end(self, why: AsynctrtError) -> None:
        self._why = why
        if self._cut is not None:
            self._cut.reschedule(0)

    async def _read(self) -> None:
        while True:
            while (
                self._taken >= self._taken_max
                or self._answer_nbytes >= self._answer_nbytes_max
                or self._caller.has_much_waiting
            ):
                self._may_read.clear()
                await self._may_read.wait()
            hold = Hold(self._account)
            while not await hold.reserve(1):  # There is no memory at all, so the client waits.
                pass
            hold.set(0)
            body = await self._context.read()
            if body is grpc.aio.EOF:
                return
            await self._server._api.turns.enter(self._account, CALL_NS)
            self._taken += 1
            beginning = self._begin(body, hold)
            del body, hold
            await beginning

    async def _begin(self, packed: bytes, hold: Hold) -> None:
        server, request_id, began_ns = self._server, "", clock.now_ns()
        try:
            body = await server._unpacked(packed, hold, self._caller)
            del packed
            split = server._split(body)
            del body
            request = await server._parsed(split, self._caller, hold)
            request_id = request.id
            inference = await server._begin(
                request, split.raw, began_ns, self._headers, self._caller, hold, self._ended
            )
            self._in_flight.add(inference)
            self._answer_nbytes += inference.request.layout.answer_nbytes
        except Exception as error:
            self._answers.append(streamed_error(request_id, _explained(error).details))
            self._may_write.set()

    def _ended(self, inference: Inference) -> None:
        if (log := self._server._api.log) is not None:
            log("grpc", self._context.peer(), inference)
        self._in_flight.discard(inference)
        self._answers.append(inference)
        self._may_write.set()

    async def _write(self) -> None:
        while True:
            while self._answers:
                answer, nbytes, hold = self._answers.popleft(), 0, None
                if isinstance(answer, Inference):
                    nbytes, hold = answer.request.layout.answer_nbytes, answer.hold
                    answer = await self._encoded(answer)
                await self._send(answer)
                del hold  # Until here it was the answer's.
                self._taken -= 1
                self._answer_nbytes -= nbytes
                self._may_read.set()
            if self._reader.done() and not self._taken:
                return
            self._may_write.clear()
            await self._may_write.wait()

    async def _send(self, answer: bytes) -> None:
        """Write an answer, which the client has to take."""
        self._server.sending(self, self._context)
        try:
            await self._context.write(answer)
        finally:
            self._server.sent(self)

    async def _encoded(self, inference: Inference) -> bytes:
        error = error_of(inference.future)
        if error is None:
            try:
                return await self._server._encoded(inference, streamed)
            except Exception as raised:
                error = raised
        return streamed_error(inference.request.id, _explained(error).details)


def _sent(hold: Hold, _: Any) -> None:
    """Release the memory of an answer that was sent, or never will be."""
    hold.set(0)


def _wrapped(wrap: Callable[[bytes], bytes], codec: ProtobufCodec, request: Any, result: Any) -> bytes:
    """Encode an answer, in a thread."""
    return wrap(codec.encode(request, result, pause))


def _some(body: Any) -> bytes:
    """Check that a message was read, and return it."""
    if body is grpc.aio.EOF:
        raise RequestError("the call has no message")
    assert isinstance(body, bytes)
    return body


class _LateError(RequestError):
    """A message did not arrive in time."""

    grpc_code = "DEADLINE_EXCEEDED"


def _headers(context: Any) -> dict[bytes, bytes]:
    """Return a call's metadata in the form of HTTP headers."""
    return {
        name.encode(): value.encode() if isinstance(value, str) else value
        for name, value in context.invocation_metadata() or ()
    }


class _Reading:
    """A message that the current task is reading."""

    __slots__ = ("is_late", "since_ns", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        self.since_ns = clock.now_ns()
        self.is_late = False

    def give_up(self) -> None:
        """Make the read fail. Idempotent."""
        if not self.is_late:
            self.is_late = True
            self.task.cancel()


class _Sending(NamedTuple):
    """An answer that a client has to take: since when, the task that sends it, and the call's context."""

    since_ns: int
    task: asyncio.Task[Any]
    context: Any


class _Failure(NamedTuple):
    """A failure of a call: the name of its status code, the message, and metadata for the client."""

    code: str
    details: str
    metadata: tuple[tuple[str, str], ...] = ()


def _explained(error: BaseException) -> _Failure:
    """Return the failure of a call that raised ``error``."""
    if isinstance(error, AsynctrtError):
        return _Failure(error.grpc_code, str(error)[:DETAILS_LENGTH_MAX], pushback(error))
    if isinstance(error, asyncio.CancelledError):
        return _Failure("CANCELLED", "the request was cancelled")
    logger.error("a request failed with an internal error", exc_info=error)
    return _Failure("INTERNAL", OUR_ERROR)


def message_nbytes(models: Iterable[ServedModel]) -> int:
    """Return the message size that full batches of these models need, within the default limits."""
    needed = max((served.batch_nbytes + HEAD_NBYTES for served in models), default=0)
    return min(max(needed, MESSAGE_NBYTES), MESSAGE_NBYTES_MAX)


async def check_address(host: str, port: int) -> None:
    """Try to listen, since gRPC reports that it failed but not why."""
    try:
        probe = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        raise cannot_listen(host, port, error, "grpc_port") from error
    probe.close()
    await probe.wait_closed()
