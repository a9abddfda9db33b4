"""ResNet-50 of torchvision as a model of the engine: one CUDA graph for each batch size and slab.

Torch captures the graphs, and the driver launches them, in one call as TensorRT does: torch's own way to
choose the stream is Python, and takes most of the time of a launch.
"""

from copy import copy

import numpy as np
import torch
import torchvision

from asynctrt.backends.base import Capabilities, ModelBase
from asynctrt.devices.cuda.bindings import driver
from asynctrt.tensors import TensorSpec

IMAGE = (3, 224, 224)
CLASSES = 1000
CLOSE_S = 5


class Memory:
    """Device memory in the form that torch wraps without a copy."""

    def __init__(self, memory, rows):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (rows, *memory.dims),
            "typestr": memory.dtype.str,
            "data": (memory.address, False),
        }


class ResNet50(ModelBase):
    """Half precision, channels last, random weights. Rows are images, ``float32`` or ``uint8``.

    :param sizes: batch sizes that are captured, rising; a batch of another size runs the next larger graph.
    """

    platform = "benchmark"

    def __init__(self, device, dtype, sizes):
        self.name = f"resnet50, {dtype} images"
        self.sizes = sizes
        # Not capturable: it is a graph already, and torch launches it.
        self.capabilities = Capabilities(rows_max=sizes[-1], is_pure=True)
        self.inputs = (TensorSpec("image", np.dtype(dtype), IMAGE),)
        self.outputs = (TensorSpec("logits", np.dtype("float32"), (CLASSES,)),)
        self.device = torch.device("cuda", device.ordinal)
        torch.manual_seed(0)
        network = torchvision.models.resnet50(weights=None).eval().half()
        self.network = network.to(self.device, memory_format=torch.channels_last)
        for parameter in self.network.parameters():
            parameter.requires_grad_(False)

    def sized(self, sizes):
        """Return the same network, to be captured for other batch sizes."""
        model = copy(self)
        model.sizes, model.capabilities = sizes, Capabilities(rows_max=sizes[-1], is_pure=True)
        return model

    def create_context(self, device):
        return Context(self, device)

    def forward(self, images):
        """Run the network on images as they lie in the slab."""
        half = images.half().contiguous(memory_format=torch.channels_last)
        if images.dtype == torch.uint8:
            half = half / 255
        return self.network(half).float()

    @torch.inference_mode()
    def expected(self, rows):
        """Return the expected answer, computed without graphs and without the engine."""
        images = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        return {"logits": self.forward(images).cpu().numpy()}

    def close(self):
        """Do nothing: the weights belong to torch, and are freed with the last copy of this object."""


class Context:
    """A context whose graphs share one memory pool, since it runs one batch at a time."""

    def __init__(self, model, device):
        self.model = model
        self.pool = torch.cuda.graph_pool_handle()
        # A graph runs where it was captured: on all of the GPU, or on the part that the context is for.
        self._captures_on = device.create_stream()
        self.stream = torch.cuda.ExternalStream(self._captures_on.handle, device=model.device)

    def bind(self, inputs, outputs):
        return Binding(self, inputs[0], outputs[0])

    def close(self):
        torch.cuda.synchronize(self.model.device)
        self._captures_on.close(CLOSE_S)


class Binding:
    """The graphs over one slab's memory."""

    def __init__(self, context, source, target):
        model = context.model
        self._captures, self._graphs = [], {}
        # The largest first, so that the smaller ones find room in what it took.
        for rows in sorted(model.sizes, reverse=True):
            captured = self._captured(context, model, source, target, rows)
            self._captures.append(captured)
            self._graphs[rows] = driver.CUgraphExec(captured.raw_cuda_graph_exec())

    @torch.inference_mode()
    def _captured(self, context, model, source, target, rows):
        images = torch.as_tensor(Memory(source, rows), device=model.device)
        logits = torch.as_tensor(Memory(target, rows), device=model.device)
        with torch.cuda.stream(context.stream):
            for _ in range(2):  # So that cuDNN has chosen its algorithms.
                logits.copy_(model.forward(images))
        context.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=context.pool, stream=context.stream, capture_error_mode="thread_local"
        ):
            logits.copy_(model.forward(images))
        return graph

    def enqueue(self, rows, *, profile, stream, arena):
        graph = self._graphs.get(rows)
        if graph is None:
            graph = self._graphs[rows] = self._graphs[min(size for size in self._graphs if size > rows)]
        (code,) = driver.cuGraphLaunch(graph, stream.handle)
        if code != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"launching a graph failed with {code.name}")

    def may_block(self, rows, *, profile):
        """Return False: what TensorRT's engines say once it was measured that an enqueue is short."""
        return False

    def unbound_outputs(self, rows):
        return {}
