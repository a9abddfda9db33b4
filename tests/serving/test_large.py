"""Large messages are decoded and encoded off the event loop: in order, cancellable, and with nothing left."""

import asyncio
import json
import threading
from functools import partial

import numpy as np
import pytest
from websockets.asyncio.client import connect

from asynctrt.backends.function import FunctionModel
from asynctrt.errors import EngineClosedError
from asynctrt.kserve.codec import FAST_BOOLS_NBYTES, FAST_NBYTES
from asynctrt.kserve.json_codec import JsonCodec, parsed_nbytes
from asynctrt.kserve.protobuf import ProtobufCodec, message_classes
from asynctrt.serving.worker import THREADS, ClientThreads, pause
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.serving.support import WAIT_S, ask, connected, request, serving

pytestmark = pytest.mark.anyio
INFER = "/v2/models/double/infer"
COUNT = 40_000
SMALL = 4


def model(dtype="float32"):
    """Doubles numbers, or byte strings of any number."""

    def function(inputs, outputs):
        rows = inputs["input"]
        outputs["output"][...] = rows if dtype.startswith("S") else 2 * rows

    return FunctionModel(
        function,
        inputs=TensorSpec("input", np.dtype(dtype), ("n",)),
        outputs=TensorSpec("output", np.dtype(dtype), ("n",)),
    )


def json_body(count=COUNT, request_id="", value=0.25, **more):
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, count], "data": [value] * count}
    content = {"model_name": "double", "inputs": [tensor], **more}
    return json.dumps({"id": request_id} | content if request_id else content)


def values_of(body):
    return json.loads(body)["outputs"][0]["data"]


@pytest.fixture
def threads(monkeypatch):
    """Which codec's methods ran with which thread, in order: by name, and whether it was the loop's."""
    found = []
    for kind, name in ((JsonCodec, "decode"), (JsonCodec, "decode_parsed"), (JsonCodec, "encode"),
                       (ProtobufCodec, "decode"), (ProtobufCodec, "encode")):  # fmt: skip
        watch(monkeypatch, kind, name, found)
    return found


def watch(monkeypatch, kind, name, found):
    method = getattr(kind, name)

    def watched(self, *arguments, **settings):
        found.append((name, threading.current_thread() is threading.main_thread()))
        return method(self, *arguments, **settings)

    monkeypatch.setattr(kind, name, watched)


class Gate:
    """Decoding stops here until the test opens it."""

    def __init__(self, monkeypatch):
        self.reached = threading.Event()
        self.opened = threading.Event()
        method = JsonCodec.decode_parsed

        def gated(codec, *arguments, **settings):
            if threading.current_thread() is not threading.main_thread():
                self.reached.set()
                assert self.opened.wait(WAIT_S)
            return method(codec, *arguments, **settings)

        monkeypatch.setattr(JsonCodec, "decode_parsed", gated)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.opened.set()


class TestWorker:
    async def test_a_few_threads_do_all_and_end_when_it_is_closed(self):
        worker = ClientThreads()
        names = {await worker.run(lambda: threading.current_thread().name, "a") for _ in range(8)}
        assert len(names) <= THREADS
        assert await worker.run(pause, "a") is None
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 / 0, "a")
        worker.close()
        worker.close()
        with pytest.raises(EngineClosedError):
            await worker.run(pause, "a")
        await until(lambda: names.isdisjoint(thread.name for thread in threading.enumerate()))

    async def test_a_client_whose_thread_was_refused_is_served_later(self, monkeypatch):
        def refuse(_):
            raise RuntimeError("can't start new thread")

        worker = ClientThreads()
        with monkeypatch.context() as short, pytest.raises(RuntimeError, match="thread"):
            short.setattr(threading.Thread, "start", refuse)
            await worker.run(pause, "a")
        async with asyncio.timeout(WAIT_S):
            assert await worker.run(lambda: 7, "a") == 7
        worker.close()

    async def test_who_is_cancelled_does_not_wait(self):
        worker, opened = ClientThreads(), threading.Event()
        task = asyncio.create_task(worker.run(lambda: opened.wait(WAIT_S), "a"))
        await asyncio.sleep(0)
        task.cancel()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait([task])
        assert task.cancelled()
        opened.set()
        assert await worker.run(lambda: 7, "a") == 7
        worker.close()


class TestMemoryOfJson:
    """What JSON takes while it is parsed is its client's."""

    async def test_it_is_counted_before_it_is_parsed_and_until_the_thread_is_done(self, gate):
        async with serving({"double": model()}) as server, connected(server) as raw:
            memory, body = server.api.memory, json_body().encode()
            raw.send(request(INFER, body))
            await until(gate.reached.is_set)
            assert memory.nbytes >= parsed_nbytes(len(body))
            assert {account.nbytes for account in memory._accounts.values()} == {memory.nbytes}
            gate.opened.set()
            assert (await raw.answer())[0] == 200
            await until(lambda: memory.nbytes == 0)

    async def test_a_websocket_s_is_too(self, gate):
        async with serving({"double": model()}) as server, opened(server) as socket:
            memory, body = server.api.memory, json_body()
            await socket.send(body)
            await until(gate.reached.is_set)
            assert memory.nbytes >= parsed_nbytes(len(body))
            gate.opened.set()
            assert values_of(await said(socket)) == [0.5] * COUNT
            await until(lambda: memory.nbytes == 0)

    async def test_it_is_held_when_its_client_has_gone_and_for_one_document_of_a_client_at_a_time(self, gate):
        async with serving({"double": model()}) as server:
            memory, body = server.api.memory, json_body().encode()
            async with connected(server) as one, connected(server) as other:
                one.send(request(INFER, body))
                other.send(request(INFER, body))
                await until(gate.reached.is_set)
                await until(lambda: any(turn._waiters for turn in server.api.worker._turns.values()))
                assert memory.nbytes <= 2 * len(body) + parsed_nbytes(len(body))
            await until(lambda: not server._hub.connections)
            assert memory.nbytes >= parsed_nbytes(len(body))
            gate.opened.set()
            await until(lambda: memory.nbytes == 0)


class TestTurns:
    """A client with much work holds up itself alone."""

    async def test_threads_work_for_one_client_one_at_a_time_and_for_clients_in_turn(self):
        worker, latch, began = ClientThreads(), threading.Event(), []

        def work(name):
            began.append(name)
            assert latch.wait(WAIT_S)

        try:
            tasks = [
                asyncio.create_task(worker.run(partial(work, name), name[0]))
                for name in ("a1", "a2", "a3", "b1", "b2", "c1")
            ]
            await until(lambda: len(began) == 2)
            for _ in range(20):
                await asyncio.sleep(0)
            assert sorted(began) == ["a1", "b1"]
        finally:
            latch.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*tasks)
        assert began.index("c1") < began.index("a3")
        assert began.index("a2") < began.index("a3")
        worker.close()

    async def test_work_that_nobody_waits_for_any_more_never_begins(self):
        worker, latch, began = ClientThreads(), threading.Event(), []

        def work(name):
            began.append(name)
            assert latch.wait(WAIT_S)

        tasks = [asyncio.create_task(worker.run(partial(work, name), "a")) for name in range(4)]
        await until(lambda: began == [0])
        for task in tasks[1:3]:
            task.cancel()
        latch.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.wait(tasks)
        assert began == [0, 3]
        waiting = [asyncio.create_task(worker.run(partial(work, name), "a")) for name in range(3)]
        await asyncio.sleep(0)
        worker.close()
        async with asyncio.timeout(WAIT_S):
            assert isinstance((await asyncio.gather(*waiting, return_exceptions=True))[2], EngineClosedError)


class TestHttp:
    async def test_a_large_request_and_its_answer(self, threads):
        async with serving({"double": model()}) as server:
            status, _, body = await ask(server, INFER, json_body().encode())
            assert (status, values_of(body)) == (200, [0.5] * COUNT)
            assert threads == [("decode", False), ("decode_parsed", False), ("encode", False)]
            threads.clear()
            status, _, body = await ask(server, INFER, json_body(SMALL).encode())
            assert (status, values_of(body)) == (200, [0.5] * SMALL)
            assert threads == [("decode", True), ("decode_parsed", True), ("encode", True)]

    async def test_an_answer_of_too_much_json_is_refused_before_it_is_computed(self):
        tensor = {"name": "input", "datatype": "FP32", "shape": [1, COUNT]}
        tensor["parameters"] = {"binary_data_size": 4 * COUNT}
        async with serving({"double": model()}, max_json=16 * COUNT - 1) as server:
            for is_binary, expected in ((False, 413), (True, 200)):
                content = {"inputs": [tensor], "parameters": {"binary_data_output": is_binary}}
                head = json.dumps(content).encode()
                length = {"Inference_Header_Content_Length": len(head)}
                status, _, body = await ask(server, INFER, head + bytes(4 * COUNT), **length)
                assert status == expected
                if not is_binary:
                    assert '"binary_data_output": true' in json.loads(body)["error"]
                    assert server.repository.find("double").engine.statistics().succeeded == 0

    async def test_byte_strings(self, threads):
        raw = b"\3\0\0\0abc" * COUNT
        tensor = {"name": "input", "datatype": "BYTES", "shape": [1, COUNT]}
        tensor["parameters"] = {"binary_data_size": len(raw)}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        async with serving({"double": model("S8")}) as server:
            length = {"Inference_Header_Content_Length": len(head)}
            status, _, body = await ask(server, INFER, head + raw, **length)
            assert status == 200
            assert body.endswith(raw)
            # The same with gzip in both directions is a task that awaits the same.
            length |= {"Accept_Encoding": "gzip"}
            status, headers, _ = await ask(server, INFER, head + raw, **length)
            assert (status, headers["content-encoding"]) == (200, "gzip")
        assert threads == [("decode", False), ("decode_parsed", False), ("encode", False)] * 2

    @pytest.mark.parametrize("nbytes", [1000, FAST_BOOLS_NBYTES + 1])
    async def test_booleans_of_which_each_is_looked_at(self, threads, nbytes):
        any_of = FunctionModel(
            lambda inputs: {"output": inputs["input"].any(axis=1, keepdims=True)},
            inputs=TensorSpec("input", "bool", ("n",)),
            outputs=TensorSpec("output", "bool", (1,)),
        )
        tensor = {"name": "input", "datatype": "BOOL", "shape": [1, nbytes]}
        tensor["parameters"] = {"binary_data_size": nbytes}
        head = json.dumps({"inputs": [tensor]}).encode()
        async with serving({"double": any_of}, max_json=1 << 20) as server:
            length = {"Inference_Header_Content_Length": len(head)}
            for last, status in ((1, 200), (2, 400)):
                answer = await ask(server, INFER, head + bytes(nbytes - 1) + bytes([last]), **length)
                assert answer[0] == status
        is_fast = nbytes <= FAST_BOOLS_NBYTES
        assert {on_loop for name, on_loop in threads if name == "decode"} == {is_fast}

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (json_body().replace("0.25]", "]"), "not valid JSON"),
            (json_body(), "unknown"),
            (json_body().replace('"shape": [1,', '"shape": [2,'), "values, but shape"),
        ],
        ids=["JSON", "model", "shape"],
    )
    async def test_what_is_wrong_is_said_and_counted(self, body, says):
        path = INFER if says != "unknown" else "/v2/models/other/infer"
        async with serving({"double": model()}) as server, connected(server) as raw:
            for _ in range(2):
                raw.send(request(path, body.encode()))
                status, _, answer = await raw.answer()
                assert status in (400, 404)
                assert says in json.loads(answer)["error"]
            failed = server.repository.find("double").failures["OTHER"]
            assert failed == (2 if says != "unknown" else 0)


class TestWebsocket:
    async def test_large_messages(self, threads):
        async with serving({"double": model()}) as server, opened(server) as socket:
            await socket.send(json_body(request_id="7"))
            answer = await said(socket)
            assert json.loads(answer)["id"] == "7"
            assert values_of(answer) == [0.5] * COUNT
            assert threads == [("decode_parsed", False), ("encode", False)]
            session = session_of(server)
            assert (session.in_flight, session._answer_nbytes, session.is_full) == (0, 0, False)

    async def test_large_frames_in_both_directions(self):
        """With a small message behind it, whose answer must not come into the middle of the large one."""
        values = np.arange(500_000, dtype="f4")
        async with serving({"double": model()}) as server, opened(server) as socket:
            for number, given in enumerate((values, values[:3], values[:40_000])):
                tensor = {"name": "input", "datatype": "FP32", "shape": [1, len(given)]}
                tensor["parameters"] = {"binary_data_size": given.nbytes}
                content = {"id": str(number), "model_name": "double", "inputs": [tensor]}
                head = json.dumps(content | {"parameters": {"binary_data_output": True}}).encode()
                await socket.send(len(head).to_bytes(4, "little") + head + given.tobytes())
            answers = {}
            for _ in range(3):
                message = await said(socket)
                start = 4 + int.from_bytes(message[:4], "little")
                answers[json.loads(message[4:start])["id"]] = np.frombuffer(message[start:], "f4")
            assert np.array_equal(answers["0"], 2 * values)
            assert np.array_equal(answers["1"], 2 * values[:3])
            assert np.array_equal(answers["2"], 2 * values[:40_000])
            session = session_of(server)
            assert (session.in_flight, session._answer_nbytes) == (0, 0)

    async def test_messages_keep_their_order(self, gate):
        """Both are for one id, so that the second would be refused if it was taken too early or too late."""
        async with serving({"double": model()}) as server, opened(server) as socket:
            await socket.send(json_body(request_id="large"))
            await until(gate.reached.is_set)
            await socket.send(json_body(SMALL, request_id="small"))
            await socket.send(json.dumps({"cancel": "large"}))
            session = session_of(server)
            await until(lambda: session.is_full and session.in_flight == 1)
            gate.opened.set()
            answers = [json.loads(await said(socket)) for _ in range(2)]
            assert {answer["id"] for answer in answers} == {"large", "small"}

    async def test_a_client_that_goes_away_leaves_nothing(self, gate):
        async with serving({"double": model()}) as server:
            async with opened(server) as socket:
                await socket.send(json_body(request_id="large"))
                await until(gate.reached.is_set)
                session = session_of(server)
                socket.transport.abort()
                # Nothing is read from it meanwhile, so that it is seen to be gone only afterwards.
                gate.opened.set()
                await until(lambda: not server._hub.connections)
            served = server.repository.find("double")
            await until(lambda: (served.pending, server.api.in_flight, session.in_flight) == (0, 0, 0))
            assert session._answer_nbytes == 0
            assert not session._encoding

    @pytest.mark.parametrize("has_begun", [False, True], ids=["before", "during"])
    async def test_a_client_that_goes_away_when_its_answer_is_encoded_leaves_nothing(
        self, monkeypatch, has_begun
    ):
        reached, opened_again = threading.Event(), threading.Event()
        encode, is_slow_answer = JsonCodec.encode, JsonCodec.is_slow_answer

        def gated(codec, *arguments):
            reached.set()
            assert opened_again.wait(WAIT_S)
            return encode(codec, *arguments)

        def leaving(*arguments):
            # The task that encodes is made next, and is cancelled before it has run at all.
            asyncio.get_running_loop().call_soon(session.cancel_all)
            return is_slow_answer(*arguments)

        monkeypatch.setattr(JsonCodec, "encode", gated)
        if not has_begun:
            monkeypatch.setattr(JsonCodec, "is_slow_answer", staticmethod(leaving))
        try:
            async with serving({"double": model()}) as server:
                async with opened(server) as socket:
                    await socket.send(json_body(request_id="large"))
                    await until(lambda: server._hub.connections)
                    session = session_of(server)
                    served = server.repository.find("double")
                    await until(lambda: reached.is_set() or served.engine.statistics().succeeded)
                    await until(lambda: reached.is_set() or not has_begun)
                    socket.transport.abort()
                    await until(lambda: not server._hub.connections)
                await until(lambda: not session._encoding)
                await until(lambda: session.in_flight == 0)
                assert session._answer_nbytes == 0
        finally:
            opened_again.set()

    async def test_what_is_wrong_is_said(self):
        async with serving({"double": model()}) as server, opened(server) as socket:
            await socket.send(json_body(request_id="7").replace("0.25]", '"x"]'))
            answer = json.loads(await said(socket))
            assert (answer["id"], answer["status"]) == ("7", 400)
            await socket.send(json_body(request_id="8").replace("0.25]", "]"))
            assert "not valid JSON" in json.loads(await said(socket))["error"]
            await socket.send(json.dumps({"cancel": [0.25] * COUNT}))
            assert "cancel must be" in json.loads(await said(socket))["error"]

    async def test_draining_waits_for_what_is_decoded(self, gate):
        async with serving({"double": model()}) as server, opened(server) as socket:
            await socket.send(json_body(request_id="7"))
            await until(gate.reached.is_set)
            session_of(server)  # It is there, and not idle.
            server._hub.drain()
            gate.opened.set()
            assert json.loads(await said(socket))["status"] == 503
            await asyncio.wait_for(socket.wait_closed(), WAIT_S)
            assert socket.close_code == 1001


class TestGrpc:
    @pytest.mark.parametrize("is_stream", [False, True], ids=["unary", "stream"])
    async def test_typed_contents(self, threads, is_stream):
        import grpc

        kinds = message_classes()
        message = kinds["ModelInferRequest"](model_name="double")
        tensor = message.inputs.add(name="input", datatype="BYTES")
        tensor.shape.extend([1, COUNT])
        tensor.contents.bytes_contents.extend([b"abc"] * COUNT)
        body = message.SerializeToString()
        assert len(body) > FAST_NBYTES
        service = "/inference.GRPCInferenceService/"
        async with (
            serving({"double": model("S8")}, grpc=True) as server,
            grpc.aio.insecure_channel(server.grpc_target) as channel,
        ):
            async with asyncio.timeout(WAIT_S):
                if is_stream:
                    call = channel.stream_stream(service + "ModelStreamInfer")()
                    for _ in range(2):
                        await call.write(body)
                    await call.done_writing()
                    kind = kinds["ModelStreamInferResponse"]
                    answers = [kind.FromString(raw).infer_response async for raw in call]
                else:
                    call = channel.unary_unary(service + "ModelInfer")
                    answers = [kinds["ModelInferResponse"].FromString(await call(body)) for _ in range(2)]
        assert [answer.raw_output_contents[0] for answer in answers] == [b"\3\0\0\0abc" * COUNT] * 2
        assert sorted(threads) == sorted([("decode", False), ("encode", False)] * 2)


def opened(server):
    return connect(server.http_url.replace("http", "ws") + "/v2/ws", max_size=None)


async def said(socket):
    async with asyncio.timeout(WAIT_S):
        return await socket.recv()


def session_of(server):
    (connection,) = server._hub.connections
    return connection._session
