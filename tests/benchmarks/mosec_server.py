"""A peer of the benchmark of serving: Mosec, an HTTP front end in Rust and batches in worker processes.

It receives and returns the bare tensor, without a header. ``python -m tests.benchmarks.mosec_server PORT
[MODEL]``
"""

import os
import sys

import numpy as np
from mosec import Server, Worker


class Bytes(Worker):
    def deserialize(self, data):
        return np.frombuffer(data, np.float32)

    def serialize(self, data):
        return data.tobytes()


class Noop(Bytes):
    def forward(self, data):
        return list(np.stack(data))


class Mlp(Bytes):
    def __init__(self):
        super().__init__()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = os.environ["MOSEC_MODEL"]
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(self, data):
        return list(self.session.run(None, {"input": np.stack(data)})[0])


if __name__ == "__main__":
    port, *model = sys.argv[1:]
    os.environ["MOSEC_MODEL"] = model[0] if model else ""
    sys.argv = ["mosec", "--address", "127.0.0.1", "--port", port, "--log-level", "warning"]
    server = Server()
    server.append_worker(Mlp if model else Noop, num=2 if model else 1, max_batch_size=64, max_wait_time=1)
    server.run()
