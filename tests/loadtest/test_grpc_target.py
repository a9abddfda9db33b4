"""KServe over gRPC as a target: our server, and others that answer in their own way."""

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import quote

import grpc
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb

from asynctrt.errors import (
    ConnectionLostError,
    OverloadError,
    RequestError,
    TargetError,
    TooLargeError,
    UnauthorizedError,
    UnknownModelError,
    UnsupportedError,
)
from asynctrt.loadtest import grpc_target
from asynctrt.serving.grpc_server import SERVICE
from asynctrt.tensors import TensorSpec
from tests.loadtest.kserve_support import ServerContract, answer, fails, target_at
from tests.models import rows
from tests.serving.support import serving, settle_grpc

pytestmark = pytest.mark.anyio


class TestOurServer(ServerContract):
    kind = "grpc"
    wrong_input = RequestError
    model_failure = TargetError

    def where(self, server, model="double", version=""):
        path = "/" + quote(model, safe="") if model else ""
        return f"grpc://{server.grpc_target}{path}{f'/versions/{version}' if version else ''}"


def metadata(*inputs):
    message = pb.ModelMetadataResponse(name="m")
    for name, datatype, shape in inputs or [("x", "FP32", (-1, 4))]:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
    return message


def said(name="y", datatype="FP32", shape=(1, 4), raw=None, **contents):
    """An answer with one output."""
    message = pb.ModelInferResponse(model_name="m")
    output = message.outputs.add(name=name, datatype=datatype, shape=shape)
    if raw is not None:
        message.raw_output_contents.append(raw)
    for field, values in contents.items():
        getattr(output.contents, field).extend(values)
    return message


@asynccontextmanager
async def asked(answers, path="/m", **kw):
    """A server with these answers, by method: a message, bytes, or a status code; and a target that is it."""

    def handler(name):
        async def handle(body, context):
            given = answers[name]
            if callable(given):
                given = await given()
            if isinstance(given, grpc.StatusCode):
                await context.abort(given, f"{given.name} it is")
            return given if isinstance(given, bytes) else given.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(handle)

    answers = {"ModelMetadata": metadata()} | answers
    server = grpc.aio.server()
    handlers = {name: handler(name) for name in answers}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with target_at(f"grpc://127.0.0.1:{port}{path}", **kw) as target:
            yield target
    finally:
        await server.stop(0)
        await settle_grpc()


class TestOthers:
    @pytest.mark.parametrize(
        ("message", "values"),
        [
            (said(raw=rows(2).tobytes()), rows(2).tolist()),
            (said(fp32_contents=[1, 2, 3, 4]), [[1, 2, 3, 4]]),
            (said(datatype="INT8", shape=(2,), int_contents=[-1, 7]), [-1, 7]),
            (said(datatype="BOOL", shape=(2,), bool_contents=[True, False]), [True, False]),
            (said(datatype="INT64", shape=(1,), int64_contents=[2**62]), [2**62]),
            (said(datatype="UINT64", shape=(1,), uint64_contents=[2**64 - 1]), [2**64 - 1]),
            (said(datatype="BYTES", shape=(2,), bytes_contents=[b"", "bär".encode()]), [b"", "bär".encode()]),
            (said(datatype="FP16", shape=(1,), raw=np.float16(0.5).tobytes()), [0.5]),
            (said(shape=(0, 4), raw=b""), []),
        ],
    )
    async def test_answers(self, message, values):
        async with asked({"ModelInfer": message}) as target:
            assert target.inputs == (TensorSpec("x", "float32", (4,)),)
            assert (await answer(target, {"x": rows(1)}))["y"].tolist() == values

    @pytest.mark.parametrize(
        "message",
        [
            said(datatype="FP33", raw=b""),
            said(datatype="FP33", fp32_contents=[1]),
            said(raw=b"1234"),
            said(fp32_contents=[1]),
            said(datatype="FP16", shape=(1,), fp32_contents=[1]),
            said(datatype="INT8", shape=(1,), int_contents=[300]),
            said(datatype="BYTES", shape=(1,), raw=b"\x02\0\0\0a"),
            said(datatype="BOOL", shape=(1,), raw=b"\x02"),
            pb.ModelInferResponse(
                outputs=[
                    {"name": "y", "datatype": "INT8", "shape": [1]},
                    {"name": "z", "datatype": "INT8", "shape": [1]},
                ],
                raw_output_contents=[b"\1"],
            ),
            b"\xff",
        ],
    )
    async def test_answers_that_nobody_can_read(self, message):
        async with asked({"ModelInfer": message}) as target:
            with pytest.raises(TargetError, match="the answer cannot be read"):
                await answer(target, {"x": rows(1)})

    @pytest.mark.parametrize("code", ["UNIMPLEMENTED", "NOT_FOUND", "INVALID_ARGUMENT"])
    async def test_no_statistics(self, code):
        async with asked({"ModelStatistics": grpc.StatusCode[code]}) as target:
            assert await target.batches() is None
        async with asked({}) as target:
            assert await target.batches() is None

    @pytest.mark.parametrize(
        ("code", "error"),
        [
            ("UNAUTHENTICATED", UnauthorizedError),
            ("NOT_FOUND", UnknownModelError),
            ("INVALID_ARGUMENT", RequestError),
            ("RESOURCE_EXHAUSTED", TooLargeError),
            ("UNIMPLEMENTED", UnsupportedError),
            ("UNAVAILABLE", OverloadError),
            ("INTERNAL", TargetError),
            ("DEADLINE_EXCEEDED", TargetError),
            ("CANCELLED", TargetError),
        ],
    )
    async def test_statuses(self, code, error):
        async with asked({"ModelInfer": grpc.StatusCode[code]}) as target:
            failure = await fails(target.start(target.prepare({"x": rows(1)})))
            assert type(failure) is error
            assert str(failure) == (f"{code}: " if error is TargetError else "") + f"{code} it is"


class TestOpening:
    @pytest.mark.parametrize(
        ("given", "error", "says"),
        [
            (grpc.StatusCode.UNAUTHENTICATED, UnauthorizedError, "it is"),
            (grpc.StatusCode.NOT_FOUND, UnknownModelError, "it is"),
            (
                grpc.StatusCode.UNIMPLEMENTED,
                TargetError,
                "cannot be reached as a KServe server: UNIMPLEMENTED it is",
            ),
            (metadata(("x", "STRING", (1,))), TargetError, "'x' has the unknown datatype 'STRING'"),
            (b"\xff", TargetError, "does not speak KServe: .*ModelMetadataResponse"),
        ],
    )
    async def test_metadata(self, given, error, says):
        with pytest.raises(error, match=says):
            async with asked({"ModelMetadata": given}):
                pass

    async def test_an_open_dimension(self):
        async with asked({"ModelMetadata": metadata(("ids", "INT64", (-1, -1, 2)))}) as target:
            assert target.inputs == (TensorSpec("ids", "int64", ("ids.1", 2)),)

    async def test_a_server_that_says_nothing(self, monkeypatch):
        async def nothing():
            await asyncio.Event().wait()

        async with asked({"ModelStatistics": nothing}) as target:
            monkeypatch.setattr(grpc_target, "PAGE_S", 0.01)
            with pytest.raises(ConnectionLostError, match="did not answer within 0.01 s"):
                await target.batches()
        monkeypatch.setattr(grpc_target, "PAGE_S", 0.05)
        with pytest.raises(TargetError, match=r"grpc://127.0.0.1:\d+/m .*: .* did not answer within 0.05 s"):
            async with asked({"ModelMetadata": nothing}):
                pass

    async def test_what_is_no_grpc(self):
        async with serving() as server:
            where = server.http_url.replace("http", "grpc") + "/double"
            with pytest.raises(TargetError, match=f"{where} cannot be reached as a KServe server"):
                async with target_at(where):
                    pass

    async def test_no_port(self):
        with pytest.raises(Exception, match="'grpc://host/m' has no port: write grpc://HOST:PORT/NAME"):
            async with target_at("grpc://host/m"):
                pass
