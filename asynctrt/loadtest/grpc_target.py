"""KServe V2 over gRPC as a load test's target, anybody's server.

A request's message is serialised once and sent many times; an answer stays bytes until somebody wants the
arrays. Measured on uvloop, CPU time a request: 120 us, nearly all of it the library's.
"""

import asyncio
from collections.abc import Mapping
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
from asynctrt.loadtest.kserve import (
    REFUSALS,
    SAID_LENGTH_MAX,
    UNREADABLE,
    Address,
    as_arrays,
    choose_model,
    read_counters,
    read_grpc_address,
    read_index,
    read_specs,
    read_values,
    read_wire,
)
from asynctrt.loadtest.targets import SERVER_IN_FLIGHT, BatchCounters, Target, TargetSpec
from asynctrt.serving.datatypes import write_tensor
from asynctrt.serving.messages import CONTENTS, message_classes, parse
from asynctrt.serving.wire import describe
from asynctrt.statistics import BatchTrace
from asynctrt.tensors import Array

try:
    import grpc
except ImportError as error:
    raise MissingExtraError("load tests over gRPC need grpcio: pip install 'asynctrt[load]'") from error

SERVICE: Final = "/inference.GRPCInferenceService/"
OPEN_S: Final = 5.0
"""How long it may take to connect, and to hear what the model takes."""
PAGE_S: Final = 10.0
"""How long a server may take to say something about itself, later on."""

OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # What is measured is the server, not the way to it through somebody else.
    ("grpc.enable_http_proxy", 0),
    # Targets share no connection, though they have the same address.
    ("grpc.use_local_subchannel_pool", 1),
)

KINDS: Final = {kind.grpc_code: kind for kind in REFUSALS}
"""What a server means by a status code."""

LOST: Final = ("Stream removed", "Socket closed", "Connection reset", "Broken pipe", "GOAWAY")
"""Words of the library's own, for what becomes of a call when its connection is lost."""


async def open_grpc_target(spec: TargetSpec) -> Target:
    """The model at ``grpc://HOST:PORT/NAME``, or ``grpcs://`` with TLS. Without a name, the only one.

    :raises TargetError: if nobody is there, or nobody that speaks KServe.
    :raises AsynctrtError: what the server says against it: no such model, a token that is missing or wrong.
    :raises OptionsError: if nobody has said which of several models.
    """
    target = GrpcTarget(read_grpc_address(spec), spec.token)
    try:
        async with asyncio.timeout(OPEN_S):
            await target.read()
    except (TimeoutError, ConnectionLostError, UnsupportedError) as error:
        await target.aclose()
        said = str(error) or f"no answer within {OPEN_S:g} s"
        raise TargetError(f"{spec.where} is no KServe server that can be reached: {said}") from error
    except BaseException:
        await target.aclose()
        raise
    return target


class GrpcTarget:
    """One model over gRPC: a request is one ``ModelInfer``, all of them on one connection."""

    kind = "grpc"

    def __init__(self, address: Address, token: str | None) -> None:
        self.name = address.model
        self.in_flight_max = SERVER_IN_FLIGHT
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._kinds = message_classes()
        scheme, _, where = address.server.partition("://")
        if scheme == "grpcs":
            self._channel = grpc.aio.secure_channel(where, grpc.ssl_channel_credentials(), OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(where, OPTIONS)
        # Without a serialiser, bytes come and go as they are.
        self._infer = self._channel.unary_unary(SERVICE + "ModelInfer")
        self._create_task = asyncio.get_running_loop().create_task

    async def read(self) -> None:
        """Connect, and ask for all that does not change.

        :raises AsynctrtError: what comes of it; :func:`open_grpc_target` knows what it means.
        """
        if not self.name:
            try:
                index = await self._ask("RepositoryIndex")
            except UnsupportedError as error:
                raise OptionsError(
                    f"{self._address.server} does not list its models ({error}): name one in the address, or "
                    "with --model NAME"
                ) from error
            models = [{"name": item.name, "state": item.state} for item in index.models]
            self.name = choose_model(read_index(models), self._address.server)
        metadata = await self._ask("ModelMetadata", name=self.name, version=self._address.version)
        self.inputs = read_specs(
            {"name": item.name, "datatype": item.datatype, "shape": item.shape} for item in metadata.inputs
        )

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        arrays = as_arrays(inputs)
        message = self._kinds["ModelInferRequest"](
            model_name=self.name,
            model_version=self._address.version,
            inputs=[describe(name, array) for name, array in arrays.items()],
            raw_input_contents=[bytes(write_tensor(array)) for array in arrays.values()],
        )
        if priority:
            message.parameters["priority"].uint64_param = priority
        return message.SerializeToString()

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        return self._create_task(self._send(prepared))

    async def _send(self, body: bytes) -> bytes:
        try:
            answer: bytes = await self._infer(body, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        return answer

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        arrays = {}
        try:
            message = parse(self._kinds["ModelInferResponse"], answer)
            raw = message.raw_output_contents
            for number, item in enumerate(message.outputs):
                if raw:
                    arrays[item.name] = read_wire(item.name, item.datatype, item.shape, raw[number])
                else:
                    field, _ = CONTENTS[item.datatype]
                    values = list(getattr(item.contents, field))
                    arrays[item.name] = read_values(item.name, item.datatype, item.shape, values)
        except (*UNREADABLE, IndexError, AsynctrtError) as error:
            raise TargetError(f"the answer cannot be read: {error!r:.{SAID_LENGTH_MAX}}") from error
        return arrays

    async def batches(self) -> BatchCounters | None:
        try:
            async with asyncio.timeout(PAGE_S):
                answer = await self._ask("ModelStatistics", name=self.name, version=self._address.version)
        except TimeoutError as error:
            raise ConnectionLostError(f"{self._address.server} gave no answer within {PAGE_S:g} s") from error
        except RequestError:
            return None  # It has no such thing, or not for this model.
        return read_counters([_as_json(model) for model in answer.model_stats])

    def trace(self) -> list[BatchTrace]:
        return []

    async def aclose(self) -> None:
        await self._channel.close()

    async def _ask(self, method: str, **fields: Any) -> Any:
        """The answer to one of the other methods.

        :raises AsynctrtError: what the server, or the way to it, says instead.
        """
        body = self._kinds[method + "Request"](**fields).SerializeToString()
        try:
            answer = await self._channel.unary_unary(SERVICE + method)(body, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        try:
            return parse(self._kinds[method + "Response"], answer)
        except RequestError as error:
            raise TargetError(f"{self._address.server} does not speak KServe: {error}") from error

    def _failure(self, error: Any) -> AsynctrtError:
        """What a status other than OK means."""
        code = error.code().name
        said = str(error.details())[:SAID_LENGTH_MAX]
        if code == "UNAVAILABLE":
            # A server says so that has too much to do, and so does this side when there is no connection. The
            # channel learns of the loss of one a moment later than the calls that were on it.
            is_ready = self._channel.get_state() is grpc.ChannelConnectivity.READY
            if is_ready and not any(word in said for word in LOST):
                return OverloadError(said)
            return ConnectionLostError(f"{self._address.server} is not there, or no longer: {said}")
        kind = KINDS.get(code)
        return kind(said) if kind is not None else TargetError(f"{code}: {said}")


def _as_json(model: Any) -> dict[str, Any]:
    """A model's statistics as HTTP has them, as far as anybody reads them."""

    def duration(value: Any) -> dict[str, int]:
        return {"count": value.count, "ns": value.ns}

    names = ("success", "queue", "compute_input", "compute_infer", "compute_output")
    return {
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": {name: duration(getattr(model.inference_stats, name)) for name in names},
        "batch_stats": [
            {"batch_size": item.batch_size, "compute_infer": duration(item.compute_infer)}
            for item in model.batch_stats
        ],
    }
