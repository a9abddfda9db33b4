"""Peers of the benchmark of frameworks: ``python peer_servers.py KIND PORT MODEL``, where they are installed.

Each has the perceptron behind it, in batches of up to 64 rows, in two workers of one thread each where it has
workers. The request is JSON, ``{"row": [...]}``; so is the answer, in the framework's own way. Nothing of
asynctrt is imported but where that is what is measured.
"""

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

ROWS_MAX = 64
WAIT_S = 0.001
WORKERS = 2


class Perceptron:
    """The model, on one thread."""

    def __init__(self, path):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(self, rows):
        return self.session.run(None, {"input": rows})[0]


class Batcher:
    """What one writes by hand: a queue, and as many threads as there are workers, which take what waits."""

    def __init__(self, path):
        self.models = [Perceptron(path) for _ in range(WORKERS)]
        self.threads = ThreadPoolExecutor(WORKERS)
        self.queue = asyncio.Queue()
        self.tasks = [asyncio.create_task(self.serve(model)) for model in self.models]

    async def serve(self, model):
        loop = asyncio.get_running_loop()
        while True:
            taken = [await self.queue.get()]
            while len(taken) < ROWS_MAX and not self.queue.empty():
                taken.append(self.queue.get_nowait())
            rows = np.stack([row for row, _ in taken])
            found = await loop.run_in_executor(self.threads, model.run, rows)
            for (_, future), row in zip(taken, found, strict=True):
                if not future.done():
                    future.set_result(row)

    async def infer(self, row):
        future = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((row, future))
        return await future


def fastapi(port, path, opened):
    """Serve by FastAPI, whose lifespan opens what infers."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Body(BaseModel):
        row: list[float]

    infer = None

    @asynccontextmanager
    async def lifespan(app):
        nonlocal infer
        async with opened(path) as infer:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/predict")
    async def predict(body: Body) -> list[float]:
        return (await infer(np.asarray(body.row, np.float32))).tolist()

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


@asynccontextmanager
async def by_hand(path):
    yield Batcher(path).infer


@asynccontextmanager
async def by_asynctrt(path):
    import asynctrt

    async with asynctrt.open(path, max_rows=ROWS_MAX) as engine:

        async def infer(row):
            return (await engine.infer(row[None]))["output"][0]

        yield infer


def litserve(port, path):
    import litserve
    from peer_lit import Mlp

    os.environ["PEER_MODEL"] = path
    api = Mlp(max_batch_size=ROWS_MAX, batch_timeout=WAIT_S)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=WORKERS)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning", access_log=False)


def bentoml(port, path):
    os.environ["PEER_MODEL"] = path
    os.chdir(Path(__file__).parent)
    command = ["serve", "peer_bento:Mlp", "--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *command])


def ray(port, path):
    import time

    # Not `ray` itself at the top of the file: this function has its name.
    import ray as ray_
    from ray import serve
    from starlette.responses import JSONResponse

    @serve.deployment(num_replicas=WORKERS, max_ongoing_requests=512, ray_actor_options={"num_cpus": 0.5})
    class Mlp:
        def __init__(self):
            self.model = Perceptron(path)

        @serve.batch(max_batch_size=ROWS_MAX, batch_wait_timeout_s=WAIT_S)
        async def infer(self, rows):
            return list(self.model.run(np.stack(rows)))

        async def __call__(self, request):
            row = np.asarray((await request.json())["row"], np.float32)
            return JSONResponse((await self.infer(row)).tolist())

    ray_.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Mlp.bind(), route_prefix="/predict")
    while True:
        time.sleep(60)


if __name__ == "__main__":
    kind, port, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    match kind:
        case "fastapi-asynctrt":
            fastapi(port, path, by_asynctrt)
        case "fastapi-hand":
            fastapi(port, path, by_hand)
        case "litserve":
            litserve(port, path)
        case "bentoml":
            bentoml(port, path)
        case "ray":
            ray(port, path)
