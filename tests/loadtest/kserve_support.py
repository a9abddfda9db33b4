"""What a target that is a server has to do, whatever the protocol: one suite for all of them."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from asynctrt.backends.function import FunctionModel
from asynctrt.errors import (
    ConnectionLostError,
    OverloadError,
    TargetError,
    UnauthorizedError,
    UnknownModelError,
    UsageError,
)
from asynctrt.loadtest.opening import opened
from asynctrt.loadtest.targets import Target, TargetSpec
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import free_port, until
from tests.models import double, double_model, failing_model, rows
from tests.serving.support import WAIT_S, engine_of, serving, taken

ROOT = Path(__file__).parent.parent.parent
ARRAYS = {
    "words": np.array([[b"", "bär".encode()], [b"12345678", b"a\0b"]]),
    "flags": np.array([[True, False], [False, True]]),
    "halves": np.array([[0.5, -2], [65504, 0]], np.float16),
    "brains": np.array([[0.5, -2], [1, 0]], ml_dtypes.bfloat16),
    "ids": np.array([[2**62, -1], [0, 7]]),
    "bytes": np.array([[0, 255], [1, 2]], np.uint8),
}


def copy_model(dims=(2,), **dtypes):
    """Gives what it gets."""

    def function(inputs, outputs):
        for name in dtypes:
            outputs[f"{name}_out"][...] = inputs[name]

    return FunctionModel(
        function,
        inputs=[TensorSpec(name, dtype, dims) for name, dtype in dtypes.items()],
        outputs=[TensorSpec(f"{name}_out", dtype, dims) for name, dtype in dtypes.items()],
    )


async def answer(target, inputs):
    """The arrays that one request is answered with."""
    async with asyncio.timeout(WAIT_S):
        return target.outputs(await target.start(target.prepare(inputs)))


async def fails(future):
    """What a request fails with."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.wait([future])
    return future.exception()


@asynccontextmanager
async def target_at(where, **kw):
    async with asyncio.timeout(WAIT_S), opened(TargetSpec(where, **kw)) as target:
        yield target


class Relay:
    """A port in front of another; what goes through it can be cut off."""

    def __init__(self):
        self.writers = set()
        self.tasks = set()

    async def start(self, host, port):
        """Listen in front of a port, and return the one that it listens on."""
        self.upstream = host, port
        self.listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self.listener.sockets[0].getsockname()[1]

    async def _serve(self, reader, writer):
        there, back = await asyncio.open_connection(*self.upstream)
        self.writers |= {writer, back}
        self.tasks |= {asyncio.create_task(copy(reader, back)), asyncio.create_task(copy(there, writer))}

    async def cut(self):
        """Nothing comes through any more."""
        self.listener.close()
        for writer in self.writers:
            writer.transport.abort()
        if self.tasks:
            await asyncio.wait(self.tasks)


async def copy(reader, writer):
    try:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


class ServerContract:
    """The tests. A protocol says how its addresses are written, and what its errors are."""

    kind = ""
    wrong_input = TargetError
    model_failure = TargetError

    def where(self, server, model="double", version=""):
        """The address of a model; of the server alone, if there is none."""
        raise NotImplementedError

    def host_port(self, server):
        host, _, port = self.where(server, "").partition("://")[2].split("/")[0].rpartition(":")
        return host, int(port)

    def open(self, server, model="double", version="", /, **kw):
        return target_at(self.where(server, model, version), **kw)

    @asynccontextmanager
    async def served(self, models=None, **kw):
        async with serving(models, grpc=self.kind == "grpc", **kw) as server:
            yield server

    async def test_what_a_target_is(self):
        async with self.served() as server, self.open(server) as target:
            assert isinstance(target, Target)
            assert (target.kind, target.name, target.in_flight_max) == (self.kind, "double", None)
            assert target.inputs == (TensorSpec("input", "float32", (4,)),)
            prepared = target.prepare({"input": rows(1, 2)})
            for _ in range(3):
                outputs = target.outputs(await target.start(prepared))
                assert outputs["output"].tolist() == rows(2, 4).tolist()

    async def test_every_dtype(self):
        model = copy_model(**{name: "S8" if name == "words" else a.dtype for name, a in ARRAYS.items()})
        async with self.served({"copy": model}) as server, self.open(server, "copy") as target:
            kinds = [spec.dtype.name for spec in target.inputs]
            assert kinds == ["object", "bool", "float16", "bfloat16", "int64", "uint8"]
            outputs = await answer(target, ARRAYS)
            for name, sent in ARRAYS.items():
                given = outputs[f"{name}_out"]
                assert given.dtype.kind == sent.dtype.kind.replace("S", "O")
                assert (given.tolist(), given.shape) == (sent.tolist(), sent.shape)

    async def test_what_is_text_and_what_is_turned_around(self):
        model = copy_model(words="S8", floats="float32")
        async with self.served({"copy": model}) as server, self.open(server, "copy") as target:
            floats = np.arange(4, dtype=np.float32).reshape(2, 2)
            for words in ([["a", "bär"], ["", "c"]], np.array([["a", "bär".encode()], [b"", "c"]], object)):
                for sent in (floats.T, floats.T.astype(">f4")):
                    outputs = await answer(target, {"words": words, "floats": sent})
                    assert outputs["words_out"].tolist() == [[b"a", "bär".encode()], [b"", b"c"]]
                    assert outputs["floats_out"].tolist() == floats.T.tolist()

    async def test_open_dimensions_have_names(self):
        model = copy_model(("length", 3, "width"), ids="int64", mask="bool")
        async with self.served({"copy": model}) as server, self.open(server, "copy") as target:
            assert [spec.dims for spec in target.inputs] == [
                ("ids.1", 3, "ids.3"),
                ("mask.1", 3, "mask.3"),
            ]
            ids = np.arange(24).reshape(2, 2, 3, 2)
            outputs = await answer(target, {"ids": ids, "mask": ids > 3})
            assert outputs["ids_out"].tolist() == ids.tolist()

    async def test_large_tensors(self):
        model = double_model(dims=(1 << 19,))
        served = self.served({"double": model}, max_grpc_message=8 << 20)
        async with served as server, self.open(server) as target:
            sent = rows(1, 2, 3, dims=(1 << 19,))  # 6 MB, more than gRPC takes by default.
            assert np.array_equal((await answer(target, {"input": sent}))["output"], 2 * sent)

    async def test_what_it_has_computed(self):
        async with self.served() as server, self.open(server) as target:
            await answer(target, {"input": rows(1)})
            before = await target.batches()
            assert (before.requests, before.rows, before.batches, dict(before.by_rows)) == (1, 1, 1, {1: 1})
            prepared = target.prepare({"input": rows(1, 2, 3)})
            await asyncio.gather(*[target.start(prepared) for _ in range(20)])
            came = (await target.batches()).since(before)
            assert (came.requests, came.rows) == (20, 60)
            assert 1 <= came.batches <= 20
            assert sum(came.by_rows.values()) == came.batches
            assert sum(size * count for size, count in came.by_rows.items()) == 60
            assert came.queue_ns > 0
            assert came.compute_ns > 0

    async def test_versions(self):
        def triple(inputs, outputs):
            outputs["output"][...] = 3 * inputs["input"]

        models = {("a b/c", "1"): double_model(), ("a b/c", "2"): double_model(triple)}
        async with self.served(models) as server:
            for version, factor in (("", 3), ("1", 2), ("2", 3)):
                async with self.open(server, "a b/c", version) as target:
                    assert (await answer(target, {"input": rows(1)}))["output"][0, 0] == factor
                    assert (await target.batches()).requests == (2 if version == "2" else 1)

    async def test_no_model_of_that_name(self):
        async with self.served() as server:
            with pytest.raises(UnknownModelError, match="unknown model 'missing'; known models: 'double'"):
                async with self.open(server, "missing"):
                    pass
            with pytest.raises(UnknownModelError, match="unknown version '7'"):
                async with self.open(server, "double", "7"):
                    pass

    async def test_tokens(self):
        async with self.served(tokens=("s3cret",)) as server:
            for token, says in ((None, "requires a bearer token"), ("wrong", "token is wrong")):
                with pytest.raises(UnauthorizedError, match=says):
                    async with self.open(server, token=token):
                        pass
            async with self.open(server, token="s3cret") as target:
                assert (await answer(target, {"input": rows(1)}))["output"][0, 0] == 2
                assert (await target.batches()).requests >= 1

    async def test_headers(self):
        """They go with what is asked when the target is opened, and with each request."""
        given = ("x-tenant: a", "AUTHORIZATION: Bearer s3cret")
        async with self.served(tokens=("s3cret",)) as server, self.open(server, headers=given) as target:
            assert (await answer(target, {"input": rows(1)}))["output"][0, 0] == 2
            assert (await target.batches()).requests >= 1

    async def test_more_requests_at_once_than_a_connection_takes(self):
        async with self.served() as server, self.open(server) as target:
            prepared = target.prepare({"input": rows(1)})
            async with asyncio.timeout(WAIT_S):
                answers = await asyncio.gather(*[target.start(prepared) for _ in range(700)])
            assert all(target.outputs(item)["output"][0, 0] == 2 for item in answers)

    async def test_nobody_is_there(self):
        port = free_port()
        scheme = {"websocket": "ws"}.get(self.kind, self.kind)
        rest = "/v2/models/x/ws" if scheme == "ws" else "/v2/models/x"
        with pytest.raises(TargetError, match=f"127.0.0.1:{port}.* reached.*efused|{port}.*Connect call"):
            async with target_at(f"{scheme}://127.0.0.1:{port}{rest}"):
                pass

    @pytest.mark.parametrize(
        "rest", ["", "://", "://:1/", "://host:99999/", "://[", "://h:1/v2/models/a?b=1"]
    )
    async def test_what_is_no_address(self, rest):
        scheme = {"websocket": "ws"}.get(self.kind, self.kind)
        if not rest:
            rest = "://" + ("host/model" if self.kind == "grpc" else "host/v2/elsewhere")
        with pytest.raises(UsageError, match=f"{scheme}://HOST:PORT"):
            async with target_at(scheme + rest):
                pass

    async def test_what_the_model_cannot_take(self):
        async with self.served() as server, self.open(server) as target:
            with pytest.raises(self.wrong_input, match="shape"):
                await answer(target, {"input": np.zeros((1, 5), np.float32)})
            with pytest.raises(self.wrong_input, match="unknown input 'x'"):
                await answer(target, {"x": rows(1)})
            assert (await answer(target, {"input": rows(1)}))["output"][0, 0] == 2

    async def test_a_model_that_fails(self):
        async with (
            self.served({"failing": failing_model()}) as server,
            self.open(server, "failing") as target,
        ):
            with pytest.raises(self.model_failure, match="negative number"):
                await answer(target, {"input": rows(-1)})
            assert (await answer(target, {"input": rows(1)}))["output"][0, 0] == 2

    @asynccontextmanager
    async def latched(self, function=double, **engine):
        """A target whose batches of one row are held until the test lets them go, its server and device."""
        device = LatchDevice(concurrency=1)
        engine = {"device": device, "contexts": 1, "max_rows": 1} | engine
        async with self.served({"double": double_model(function)}, engine=engine) as server:
            try:
                async with self.open(server) as target:
                    yield target, server, device
            finally:
                device.open()

    async def full(self, target, server, device):
        """A prepared request, one that is computed, and one that waits for it."""
        prepared = target.prepare({"input": rows(1)})
        flying = target.start(prepared)
        await until(lambda: device.held == 1)
        queued = target.start(prepared)
        await until(lambda: engine_of(server).statistics().queued_requests == 1)
        return prepared, flying, queued

    async def test_a_server_that_has_too_much_to_do(self):
        async with self.latched(max_queue_rows=1) as (target, server, device):
            prepared, flying, queued = await self.full(target, server, device)
            error = await fails(target.start(prepared))
            assert isinstance(error, OverloadError), error
            assert "the queue holds" in str(error)
            device.open()
            await asyncio.gather(flying, queued)

    async def test_to_cancel_is_to_give_up(self):
        async with self.latched() as (target, server, device):
            prepared, flying, queued = await self.full(target, server, device)
            queued.cancel()
            await until(lambda: engine_of(server).statistics().cancelled == 1)
            assert queued.cancelled()
            at_once = target.start(prepared)
            at_once.cancel()
            await asyncio.wait([at_once])
            assert at_once.cancelled()
            device.open()
            assert target.outputs(await flying)["output"][0, 0] == 2
            assert (await answer(target, {"input": rows(2)}))["output"][0, 0] == 4

    async def test_a_server_that_dies(self):
        relay = Relay()
        async with self.latched() as (_, server, _):
            host, port = self.host_port(server)
            where = self.where(server).replace(f"{host}:{port}", f"127.0.0.1:{await relay.start(host, port)}")
            async with target_at(where) as target:
                prepared = target.prepare({"input": rows(1)})
                futures = [target.start(prepared) for _ in range(5)]
                await until(lambda: taken(server) == 5)
                await relay.cut()
                for future in futures:
                    error = await fails(future)
                    assert isinstance(error, ConnectionLostError), error
                with pytest.raises(ConnectionLostError):
                    async with asyncio.timeout(WAIT_S):
                        await target.batches()
                await self.after_death(target, prepared)

    async def after_death(self, target, prepared):
        """What comes of a request to a server that is dead."""
        assert isinstance(await fails(target.start(prepared)), ConnectionLostError)

    async def test_closing_ends_what_is_on_the_way(self):
        async with self.latched() as (_, server, device), self.open(server) as target:
            future = target.start(target.prepare({"input": rows(1)}))
            await until(lambda: device.held == 1)
            await target.aclose()
            async with asyncio.timeout(WAIT_S):
                await asyncio.wait([future])
            assert future.cancelled() or isinstance(future.exception(), ConnectionLostError)
            await until(lambda: engine_of(server).statistics().cancelled == 1)
