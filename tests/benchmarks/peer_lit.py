"""The perceptron behind LitServe, for the benchmark of frameworks. It is started by ``peer_servers.py``."""

import os

import litserve
import numpy as np
from peer_servers import Perceptron


class Mlp(litserve.LitAPI):
    def setup(self, device):
        self.model = Perceptron(os.environ["PEER_MODEL"])

    def decode_request(self, request):
        return np.asarray(request["row"], np.float32)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, rows):
        return self.model.run(rows)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"output": output.tolist()}
