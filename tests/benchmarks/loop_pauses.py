"""How long do large messages hold a server's event loop? By what is in them, and by size.

``python -m tests.benchmarks.loop_pauses``: a client in a process of its own sends one request after another.
A callback that does nothing runs in every turn of the server's loop, and the longest time between two of them
is what a request held it for. Beside it stand the CPU time of the loop's thread in a turn, which is steadier
on a busy machine but leaves out waits for Python's lock, and as long without a request. A loop that is always
awake is the hardest case: it competes with threads for the lock.

"p99.9" is how long another client would wait at most, but for one in a thousand, if it sent something at any
moment while such requests are under way: of a turn of 5 ms it meets 5 ms to nothing, and long turns are met
more often than short ones. It is of the CPU time of the loop's thread.
"""

import asyncio
import contextlib
import gzip
import os
import socket
import statistics
import struct
import sys
import time

import numpy as np
import orjson
import uvloop

from asynctrt._util.process import freeze_gc, shorten_switch_interval
from asynctrt.backends.function import FunctionModel
from asynctrt.kserve.protobuf import message_classes
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, save, show
from tests.benchmarks.scrape import Watch
from tests.serving.support import serving

MIB = 1 << 20
NUMBERS = 262_000
"""About as many values of JSON, and byte strings, as a request may have."""


TURN_NS_MIN = 50_000
"""Shorter turns of the loop are of no interest one by one."""


def waiting_ms(turns_ns, total_ns, share=0.001):
    """Return the wait that all but a share of the moments within these turns are spared."""
    low, high = 0, max(turns_ns, default=0)
    while high - low > 1000:
        middle = (low + high) // 2
        beyond = sum(ns - middle for ns in turns_ns if ns > middle)
        low, high = (middle, high) if beyond > share * total_ns else (low, middle)
    return high / 1e6


class CpuWatch(Watch):
    """Note also the most CPU time that the loop's thread used in a turn, and every long turn."""

    def begin(self):
        super().begin()
        self.most_cpu_ns = 0
        self._cpu_ns = time.thread_time_ns()
        self.long_ns = []
        self.began_ns = time.thread_time_ns()

    def _turn(self):
        cpu_ns = time.thread_time_ns()
        if cpu_ns - self._cpu_ns > TURN_NS_MIN:
            self.long_ns.append(cpu_ns - self._cpu_ns)
        self.most_cpu_ns = max(self.most_cpu_ns, cpu_ns - self._cpu_ns)
        self._cpu_ns = cpu_ns
        super()._turn()


def model(dtype, dims, dims_out, dtype_out=None):
    """Take anything, and give anything."""

    def function(inputs, outputs):
        outputs["out"][...] = outputs["out"].dtype.type(b"abcdef" if dtype_out == "S8" else 0.1234567)

    return FunctionModel(
        function,
        inputs=TensorSpec("in", np.dtype(dtype), dims),
        outputs=TensorSpec("out", np.dtype(dtype_out or "float32"), dims_out),
    )


def described(name, datatype, shape, values=None, **parameters):
    tensor = {"name": name, "datatype": datatype, "shape": shape}
    if values is not None:
        tensor["data"] = values
    return tensor | ({"parameters": parameters} if parameters else {})


def head_of(tensor, *, binary=False):
    content = {"model_name": "m", "inputs": [tensor], "parameters": {"binary_data_output": binary}}
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def http(body, head_nbytes=None, **headers):
    lines = ["POST /v2/models/m/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    if head_nbytes is not None:
        lines.append(f"Inference-Header-Content-Length: {head_nbytes}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def floats(count):
    return np.random.default_rng(0).random(count, np.float32)


def json_in(count):
    return model("float32", ("n",), (1,)), http(head_of(described("in", "FP32", [1, count], floats(count))))


def json_rows_in(count):
    values = floats(count // 16 * 16).reshape(-1, 16)
    tensor = described("in", "FP32", [1, len(values), 16], [values])
    return model("float32", ("n", 16), (1,)), http(head_of(tensor))


def json_text_in(count):
    tensor = described("in", "BYTES", [1, count], ["abcdef"] * count)
    return model("S8", ("n",), (1,)), http(head_of(tensor))


def small(**kw):
    return head_of(described("in", "FP32", [1, 1], [1.0]), **kw)


def json_out(count):
    return model("float32", (1,), (count,)), http(small())


def json_text_out(count):
    return model("float32", (1,), (count,), "S8"), http(small())


def strings(count):
    return b"\6\0\0\0abcdef" * count


def bytes_in(count):
    raw = strings(count)
    head = head_of(described("in", "BYTES", [1, count], binary_data_size=len(raw)))
    return model("S8", ("n",), (1,)), http(head + raw, len(head))


def bytes_out(count):
    return model("float32", (1,), (count,), "S8"), http(small(binary=True))


def binary(nbytes, datatype="FP32"):
    count = nbytes // 4 if datatype == "FP32" else nbytes
    head = head_of(described("in", datatype, [1, count], binary_data_size=nbytes), binary=True)
    return head, count


def binary_in(nbytes):
    head, _ = binary(nbytes)
    return model("float32", ("n",), (1,)), http(head + bytes(nbytes), len(head))


def bool_in(nbytes):
    head, _ = binary(nbytes, "BOOL")
    return model("bool", ("n",), (1,)), http(head + bytes(nbytes), len(head))


def binary_out(nbytes):
    return model("float32", (1,), (nbytes // 4,)), http(small(binary=True))


def gzip_in(nbytes):
    head, count = binary(nbytes)
    body = gzip.compress(head + floats(count).tobytes(), 1)
    return model("float32", ("n",), (1,)), http(body, len(head), Content_Encoding="gzip")


def gzip_out(nbytes):
    return model("float32", (1,), (nbytes // 4,)), http(small(binary=True), Accept_Encoding="gzip")


def frame(message, opcode):
    """A masked frame, as clients send them."""
    nbytes = len(message)
    size = struct.pack("!BQ", 0xFF, nbytes) if nbytes > 65535 else struct.pack("!BH", 0xFE, nbytes)
    return bytes([0x80 | opcode]) + size + bytes(4) + message


def websocket_in(nbytes):
    head, _ = binary(nbytes)
    message = len(head).to_bytes(4, "little") + head + bytes(nbytes)
    return model("float32", ("n",), (1,)), frame(message, 2)


def websocket_out(nbytes):
    head = small(binary=True)
    return model("float32", (1,), (nbytes // 4,)), frame(len(head).to_bytes(4, "little") + head, 2)


def websocket_text(count):
    head = head_of(described("in", "FP32", [1, count], floats(count)))
    return model("float32", ("n",), (1,)), frame(head, 1)


def message(datatype, count):
    request = message_classes()["ModelInferRequest"](model_name="m")
    tensor = request.inputs.add(name="in", datatype=datatype)
    tensor.shape.extend([1, count])
    return request, tensor.contents


def grpc_in(nbytes):
    request, _ = message("FP32", nbytes // 4)
    request.raw_input_contents.append(bytes(nbytes))
    return model("float32", ("n",), (1,)), request


def grpc_out(nbytes):
    request, contents = message("FP32", 1)
    contents.fp32_contents.append(1)
    return model("float32", (1,), (nbytes // 4,)), request


def grpc_floats(count):
    request, contents = message("FP32", count)
    contents.fp32_contents.extend(floats(count).tolist())
    return model("float32", ("n",), (1,)), request


def grpc_ints(count):
    request, contents = message("INT32", count)
    contents.int_contents.extend([3] * count)
    return model("int32", ("n",), (1,)), request


def grpc_bytes(count):
    request, contents = message("BYTES", count)
    contents.bytes_contents.extend([b"abcdef"] * count)
    return model("S8", ("n",), (1,)), request


COUNTS = (2_000, 16_000, NUMBERS)
SIZES = (64 << 10, MIB, 60 * MIB)
GRPC_SIZES = (64 << 10, MIB, 4 * MIB, 16 * MIB, 60 * MIB)
"""Up to 4 MiB is what a server accepts by default."""
KINDS = {
    "JSON numbers in": (json_in, COUNTS),
    "JSON rows of 16 in": (json_rows_in, (*COUNTS[:2], 16 * 16_000)),
    "JSON strings in": (json_text_in, COUNTS),
    "JSON numbers out": (json_out, COUNTS),
    "JSON strings out": (json_text_out, COUNTS),
    "BYTES in": (bytes_in, COUNTS),
    "BYTES out": (bytes_out, COUNTS),
    "raw floats in": (binary_in, SIZES),
    "raw floats out": (binary_out, SIZES),
    "raw BOOL in": (bool_in, SIZES),
    "gzip in": (gzip_in, (16 << 10, 256 << 10, 16 * MIB)),
    "gzip out": (gzip_out, (16 << 10, 256 << 10, 16 * MIB)),
    "websocket in": (websocket_in, SIZES),
    "websocket out": (websocket_out, SIZES),
    "websocket JSON in": (websocket_text, COUNTS),
    "gRPC raw in": (grpc_in, GRPC_SIZES),
    "gRPC raw out": (grpc_out, GRPC_SIZES),
    "gRPC typed floats in": (grpc_floats, (*COUNTS, MIB - 100)),
    "gRPC typed ints in": (grpc_ints, (*COUNTS, 4 * MIB - 100)),
    "gRPC typed bytes in": (grpc_bytes, COUNTS),
}


def client(port, protocol):
    """Send the request that standard input begins with for each further byte; say when it is answered."""
    nbytes = int.from_bytes(sys.stdin.buffer.read(8), "little")
    request = sys.stdin.buffer.read(nbytes)
    if protocol == "grpc":
        import grpc

        channel = grpc.insecure_channel(
            f"127.0.0.1:{port}",
            options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)],
        )
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        ask = lambda: call(request)  # noqa: E731
    else:
        sock = socket.create_connection(("127.0.0.1", port))
        if protocol == "websocket":
            sock.sendall(
                b"GET /v2/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            )
            sock.recv(1000)
        ask = lambda: ask_by_socket(sock, request, protocol)  # noqa: E731
    while sys.stdin.buffer.read(1):
        ask()
        sys.stdout.write("\n")
        sys.stdout.flush()


def ask_by_socket(sock, request, protocol):
    sock.sendall(request)
    got = sock.recv(1 << 20)
    if protocol == "http":
        while b"\r\n\r\n" not in got:
            got += sock.recv(1 << 20)
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), got[:500]
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                left = int(line.partition(b":")[2]) - len(body)
    else:
        while len(got) < 10:
            got += sock.recv(1 << 20)
        short = got[1] & 127
        start, size = {126: (4, got[2:4]), 127: (10, got[2:10])}.get(short, (2, bytes([short])))
        assert b'"error"' not in got[:100], got[:500]
        left = int.from_bytes(size, "big") + start - len(got)
    while left > 0:
        left -= len(sock.recv(min(left, 1 << 20)))


async def measure(make, size, repeats):
    served, request = make(size)
    is_bytes = isinstance(request, bytes)
    protocol = "grpc" if not is_bytes else "http" if request.startswith(b"POST") else "websocket"
    raw = request if is_bytes else request.SerializeToString()
    engine = {"max_rows": 1, "contexts": 1}
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            serving(
                {"m": served},
                engine=engine,
                grpc=protocol == "grpc",
                max_body=65 * MIB,
                max_grpc_message=65 * MIB,
            )
        )
        address = server.grpc_target if protocol == "grpc" else server.http_url
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", __spec__.name, "client", address.rpartition(":")[2], protocol),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ},
        )
        child.stdin.write(len(raw).to_bytes(8, "little") + raw)
        await child.stdin.drain()
        freeze_gc()
        watch, held, alone, computed = CpuWatch(), [], [], []
        turns_ns, total_ns = [], 0
        for number in range(repeats + 1):
            child.stdin.write(b".")
            await child.stdin.drain()
            watch.begin()
            began_ns = time.monotonic_ns()
            assert await child.stdout.readline()
            took_ns = time.monotonic_ns() - began_ns
            if number:  # The first makes slabs and caches.
                held.append(watch.longest_ns / 1e6)
                computed.append(watch.most_cpu_ns / 1e6)
                turns_ns += watch.long_ns
                total_ns += time.thread_time_ns() - watch.began_ns
            watch.begin()
            await asyncio.sleep(max(0.02, min(0.1, took_ns / 1e9)))
            alone.append(watch.longest_ns / 1e6)
        child.stdin.close()
        await child.wait()
        watch.stop()
        waits_ms = waiting_ms(turns_ns, total_ns)
        return {
            "size": size,
            "waits_ms": waits_ms,
            "computed_ms": computed,
            "held_ms": held,
            "alone_ms": alone,
        }


def main():
    if sys.argv[1:2] == ["client"]:
        client(int(sys.argv[2]), sys.argv[3])
        return
    options = arguments(__doc__, repeats=10, only="", sizes=9)
    shorten_switch_interval()
    figures, lines = {}, []
    for kind, (make, sizes) in KINDS.items():
        if options.only not in kind:
            continue
        figures[kind] = [uvloop.run(measure(make, size, options.repeats)) for size in sizes[: options.sizes]]
        for case in figures[kind]:
            times = [
                f"{figure(case[of]):.1f}"
                for of in ("computed_ms", "held_ms", "alone_ms")
                for figure in (statistics.median, max)
            ]
            lines.append((kind, f"{case['size']:,}", f"{case['waits_ms']:.1f}", *times))
    show(
        "The longest turn of the loop while one request is received, answered and sent, in ms",
        (
            "",
            "values or bytes",
            "p99.9",
            "CPU: median",
            "most",
            "held: median",
            "most",
            "without: median",
            "most",
        ),
        lines,
    )
    save(options.json, __doc__, figures)


if __name__ == "__main__":
    main()
