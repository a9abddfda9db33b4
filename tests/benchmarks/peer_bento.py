"""The perceptron behind BentoML, for the benchmark of frameworks. It is started by ``peer_servers.py``."""

import os

import bentoml
import numpy as np
from peer_servers import ROWS_MAX, WORKERS, Perceptron


@bentoml.service(workers=WORKERS, traffic={"timeout": 60}, logging={"access": {"enabled": False}})
class Mlp:
    def __init__(self):
        self.model = Perceptron(os.environ["PEER_MODEL"])

    @bentoml.api(batchable=True, max_batch_size=ROWS_MAX, max_latency_ms=1000)
    def predict(self, row: np.ndarray) -> np.ndarray:
        return self.model.run(row.astype(np.float32))
