"""One client floods a server, by each protocol: what does another one notice?

A model that takes 4 ms a batch of up to 64 rows. The other client sends requests of one row over HTTP, one
after another or 8 at once; its latencies alone are compared with those beside a client that has far more in
flight than the model can do. Each has a token of its own.
"""

import asyncio
import json
import os
import struct
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import grpc
import numpy as np
from websockets.asyncio.client import connect

from tests.benchmarks.common import arguments, median, save, show, spread
from tests.benchmarks.serving import process, wait_until_ready
from tests.helpers import free_port

MODEL = "tests.benchmarks.fairness:sleeper"
BATCH_S = 0.004
PATH = "/v2/models/slow/infer"
GREEDY, MODEST = "greedy", "modest"
METADATA = (("authorization", f"Bearer {GREEDY}"),)
METHOD = "/inference.GRPCInferenceService/"


def sleeper():
    """Return a model whose batches take 4 ms."""
    from asynctrt import FunctionModel, TensorSpec

    spec = TensorSpec("input", np.dtype("float32"), (16,))

    def double(inputs, outputs):
        time.sleep(BATCH_S)
        outputs["output"][:] = inputs["input"] * 2

    return FunctionModel(
        double, inputs=[spec], outputs=[TensorSpec("output", np.dtype("float32"), (16,))], name="slow"
    )


def message(rows, *, named=False):
    """Return the JSON head of a request, and its raw tensor."""
    tensor = {"name": "input", "shape": [rows, 16], "datatype": "FP32"}
    content = {
        "parameters": {"binary_data_output": True},
        "inputs": [{**tensor, "parameters": {"binary_data_size": 64 * rows}}],
    }
    if named:
        content["model_name"] = "slow"
    return json.dumps(content).encode(), bytes(64 * rows)


async def http_flood(http, _grpc, rows, connections, *, pipelined=False):
    """Keep connections busy, with one request at a time or with as many as the server reads."""
    head, raw = message(rows)
    whole = (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer greedy\r\n"
        b"Inference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
        % (PATH.encode(), len(head), len(head) + len(raw))
    )
    whole += head + raw

    async def one():
        reader, writer = await asyncio.open_connection("127.0.0.1", http)

        async def read():
            while await reader.read(1 << 16):
                if not pipelined:
                    writer.write(whole)

        reading = asyncio.create_task(read())
        writer.write(whole)
        try:
            while pipelined:
                writer.write(whole)
                await writer.drain()
            await reading
        finally:
            reading.cancel()
            writer.transport.abort()

    await asyncio.gather(*[one() for _ in range(connections)])


async def pipelining_flood(http, port, rows, connections):
    await http_flood(http, port, rows, connections, pipelined=True)


async def websocket_flood(http, _grpc, rows, connections):
    """Keep as many requests in flight on a websocket as the server lets."""
    head, raw = message(rows, named=True)
    whole = struct.pack("<I", len(head)) + head + raw

    async def one():
        async with connect(
            f"ws://127.0.0.1:{http}/v2/ws",
            max_size=None,
            compression=None,
            proxy=None,
            additional_headers={"Authorization": f"Bearer {GREEDY}"},
        ) as socket:

            async def read():
                async for _ in socket:
                    pass

            reading = asyncio.create_task(read())
            try:
                while True:
                    await socket.send(whole)
            finally:
                reading.cancel()
                socket.transport.abort()

    await asyncio.gather(*[one() for _ in range(connections)])


def grpc_body(rows):
    from asynctrt.kserve.protobuf import message_classes

    request = message_classes()["ModelInferRequest"](model_name="slow", raw_input_contents=[bytes(64 * rows)])
    tensor = request.inputs.add(name="input", datatype="FP32")
    tensor.shape.extend([rows, 16])
    return request.SerializeToString()


async def grpc_flood(_http, port, rows, calls):
    """Keep calls in flight on one channel."""
    raw = grpc_body(rows)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(METHOD + "ModelInfer")

        async def one():
            while True:
                try:
                    await call(raw, metadata=METADATA)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)

        await asyncio.gather(*[one() for _ in range(calls)])


async def stream_flood(_http, port, rows, streams):
    """Send on streams as fast as they are read."""
    raw = grpc_body(rows)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def one():
            stream = channel.stream_stream(METHOD + "ModelStreamInfer")(metadata=METADATA)

            async def read():
                async for _ in stream:
                    pass

            reading = asyncio.create_task(read())
            try:
                while True:
                    await stream.write(raw)
            finally:
                reading.cancel()

        await asyncio.gather(*[one() for _ in range(streams)])


FLOODS = {
    "alone": None,
    "HTTP, 64 connections": (http_flood, 16, 64),
    "HTTP, pipelined": (pipelining_flood, 16, 1),
    "websocket, 1 row": (websocket_flood, 1, 1),
    "websocket, 64 rows": (websocket_flood, 64, 1),
    "gRPC, 256 calls": (grpc_flood, 16, 256),
    "gRPC, 3 calls of 16,384 rows": (grpc_flood, 16_384, 3),
    "gRPC stream": (stream_flood, 1, 1),
}


async def modest(http, seconds, at_once):
    """Send requests of one row and return their latencies in ms."""
    head, raw = message(1)
    headers = {"Authorization": f"Bearer {MODEST}", "Inference-Header-Content-Length": str(len(head))}
    took_ms, failed = [], 0
    until = time.perf_counter() + seconds

    async def one(session):
        nonlocal failed
        while time.perf_counter() < until:
            began = time.perf_counter()
            async with session.post(
                f"http://127.0.0.1:{http}{PATH}", data=head + raw, headers=headers
            ) as answer:
                await answer.read()
            took_ms.append((time.perf_counter() - began) * 1e3)
            failed += answer.status != 200

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*[one(session) for _ in range(at_once)])
    return {
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p99_ms": float(np.percentile(took_ms, 99)),
        "requests": len(took_ms),
        "failed": failed,
    }


async def flood_for_ever(name, http, port):
    """Run a flood until the process is ended."""
    flood, rows, count = FLOODS[name]
    await flood(http, port, rows, count)


def yield_cpu():
    """Leave the CPU to other processes: this one stands for another machine."""
    os.nice(19)
    # Where Linux groups processes by session, that counts among those of this session only.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")


def measure(name, http, port, seconds):
    """Measure the modest client, beside a process that floods if there is to be one."""
    with ExitStack() as stack:
        if FLOODS[name] is not None:
            stack.enter_context(process("tests.benchmarks.fairness", "--flood", name, str(http), str(port)))
            time.sleep(min(1.5, seconds + 1))  # Until it is at it: what is measured is the steady state.
        return {str(count): asyncio.run(modest(http, seconds, count)) for count in (1, 8)}


def main():
    if sys.argv[1:2] == ["--flood"]:
        yield_cpu()
        with suppress(KeyboardInterrupt):
            asyncio.run(flood_for_ever(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
        return
    options = arguments(__doc__, repeats=3, seconds=2.0, only="")
    http, port = free_port(), free_port()
    names = [name for name in FLOODS if name == "alone" or options.only in name]
    results = {f"{name}, {count} at once": [] for name in names for count in (1, 8)}
    with ExitStack() as stack:
        flags = [f"--http-port={http}", f"--grpc-port={port}", "--max-rows=64"]
        flags += [f"--tokens={token}" for token in (GREEDY, MODEST)]
        stack.enter_context(process("asynctrt", "serve", f"slow={MODEL}", *flags))
        wait_until_ready(f"http://127.0.0.1:{http}")
        for repeat in range(options.repeats):
            for name in names if repeat % 2 == 0 else names[::-1]:
                for count, figures in measure(name, http, port, options.seconds).items():
                    results[f"{name}, {count} at once"].append(figures)
    limits = {
        count: 1.5 * median(results[f"alone, {count} at once"], "p99_ms") + BATCH_S * 1e3 for count in (1, 8)
    }
    show(
        "One client beside another that floods",
        ("flood", "p50 ms", "p99 ms", "p99, least to most", "of the limit", "failed"),
        [
            (
                name,
                f"{median(done, 'p50_ms'):.1f}",
                f"{median(done, 'p99_ms'):.1f}",
                spread(done, "p99_ms"),
                f"{median(done, 'p99_ms') / limits[8 if ', 8 at once' in name else 1]:.2f}",
                str(sum(run["failed"] for run in done)),
            )
            for name, done in results.items()
        ],
        f"medians of {options.repeats} runs of {options.seconds:g} s in turn; limit: 1.5 x alone + a batch;",
    )
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
