"""The models of ``ort_cuda``: their rows, and three that torch exports where it is installed.

magika, silero-vad and the detector and recogniser of PP-OCR come from packages of theirs, with their axes as
the engine needs them. This writes them to a folder; ``magika``, ``silero-vad``, ``rapidocr-onnxruntime`` and
``onnx`` have to be installed:

    python -m tests.benchmarks.gpu.onnx_models DIR

ResNet-50, an encoder as large as BERT's base and a vision transformer are made with random weights where
torch is installed: what they compute takes as long as with trained ones.
"""

import argparse
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from asynctrt.cli.demo import ContentModel

LENGTHS = (32, 64, 128)
VOCABULARY = 30_522
SOUND = 576
SAMPLES = 24


@dataclass(frozen=True)
class Subject:
    """A model and what its callers send."""

    name: str
    rows_max: int
    shapes: dict
    """For each input its dtype and the dimensions of a row; ``"length"`` stands for one of ``LENGTHS``."""
    lengths: tuple = (0,)

    def samples(self):
        """Return rows that differ: a mapping for each sample, of one row."""
        rng = np.random.default_rng(7)
        made = []
        for number in range(SAMPLES):
            length = self.lengths[number % len(self.lengths)]
            made.append({name: _row(rng, *spec, length) for name, spec in self.shapes.items()})
        return made


def _row(rng, dtype, dims, length):
    shape = (1, *(length if dim == "length" else dim for dim in dims))
    if dtype == "float32":
        return rng.random(shape, dtype=np.float32)
    return rng.integers(0, 256, shape).astype(dtype)


SUBJECTS = (
    Subject("magika", 64, {"bytes": ("int32", (2048,))}),
    Subject("silero_vad", 64, {"input": ("float32", (SOUND,)), "state": ("float32", (2, 128))}),
    Subject("ppocr_det", 32, {"x": ("float32", (3, 320, 320))}),
    Subject("ppocr_rec", 32, {"x": ("float32", (3, 48, 320))}),
    Subject("resnet50", 64, {"image": ("float32", (3, 224, 224))}),
    Subject("encoder", 64, {"tokens": ("int64", ("length",))}, LENGTHS),
    Subject("vit", 64, {"image": ("float32", (3, 224, 224))}),
)


PPOCR = ("det", (3, 320, 320), (1, 320, 320)), ("rec", (3, 48, 320), (40, 6625))
"""The models of PP-OCR, and the shapes of their inputs and outputs."""


def collect(folder):
    """Write the models that come from packages."""
    import onnx

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ContentModel().path, folder / "magika.onnx")
    for name, *shapes in PPOCR:
        model = onnx.load(_packaged("rapidocr_onnxruntime", f"models/ch_PP-OCRv4_{name}_infer.onnx"))
        for value, shape in zip((*model.graph.input, *model.graph.output), shapes, strict=True):
            rows, *others = value.type.tensor_type.shape.dim
            rows.dim_param = "batch"
            for dim, size in zip(others, shape, strict=True):
                dim.dim_value = size
        onnx.save(model, folder / f"ppocr_{name}.onnx")
    model = onnx.load(_packaged("silero_vad", "data/silero_vad_16k_op15.onnx"))
    onnx.save(_rows_first(onnx, model), folder / "silero_vad.onnx")


def _packaged(package, path):
    found = find_spec(package)
    if found is None:
        raise SystemExit(f"{package} is not installed: see {__doc__}")
    return Path(found.origin).parent / path


def _rows_first(onnx, model):
    """Return silero-vad with the first axis of its state that of rows, for 36 ms of sound of 16 kHz."""
    graph, make = model.graph, onnx.helper
    kept = [value for value in graph.input if value.name == "input"]
    kept[0].type.tensor_type.shape.dim[1].dim_value = SOUND
    rate = onnx.numpy_helper.from_array(np.array(16_000, np.int64), "sr")
    shape = ["batch", 2, 128]
    state = make.make_tensor_value_info("state", onnx.TensorProto.FLOAT, shape)
    after = make.make_tensor_value_info("stateN", onnx.TensorProto.FLOAT, shape)
    _rename(graph, {"state": "state_inside", "stateN": "stateN_inside"})
    turn_in = make.make_node("Transpose", ["state"], ["state_inside"], perm=(1, 0, 2))
    turn_out = make.make_node("Transpose", ["stateN_inside"], ["stateN"], perm=(1, 0, 2))
    nodes = [turn_in, *graph.node, turn_out]
    outputs = [graph.output[0], after]
    made = make.make_graph(nodes, graph.name, [*kept, state], outputs, [*graph.initializer, rate])
    return make.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)


def _rename(graph, names):
    """Rename what nodes read and write, also in branches."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
        for branch in node.attribute:
            _rename(branch.g, names)


def export(folder):
    """Export the models that torch makes, unless they are there; return the names of those that failed."""
    import torch
    import torchvision

    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)
    image = torch.rand(2, 3, 224, 224)
    makers = {
        "resnet50": lambda: (torchvision.models.resnet50(weights=None), image, "image"),
        "encoder": lambda: (_encoder(torch), torch.randint(0, 256, (2, 64)), "tokens"),
        "vit": lambda: (_vision_transformer(torch, torchvision), image, "image"),
    }
    failed = {}
    for name, make in makers.items():
        path = folder / f"{name}.onnx"
        if path.exists():
            continue
        try:
            _export(torch, *make(), path)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            path.unlink(missing_ok=True)
    return failed


def _export(torch, module, example, name, path):
    axes = {0: "batch"} | ({1: "length"} if name == "tokens" else {})
    torch.onnx.export(
        module.eval(),
        (example,),
        str(path),
        input_names=[name],
        output_names=["output"],
        dynamic_axes={name: axes, "output": {0: "batch"}},
        opset_version=17,
        dynamo=False,
    )


def _vision_transformer(torch, torchvision):
    made = torchvision.models.vit_b_16(weights=None)
    # It begins with a head of zeros, and so with answers that are right whatever comes before.
    torch.nn.init.normal_(made.heads.head.weight, std=0.02)
    return made


def _encoder(torch, *, layers=12, width=768, heads=12):
    nn = torch.nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

        def forward(self, x):
            rows, length = x.shape[0], x.shape[1]
            qkv = self.qkv(x).reshape(rows, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            scores = qkv[0] @ qkv[1].transpose(-1, -2) / (width // heads) ** 0.5
            mixed = (scores.softmax(-1) @ qkv[2]).transpose(1, 2).reshape(rows, length, width)
            x = self.first(x + self.out(mixed))
            return self.second(x + self.down(nn.functional.gelu(self.up(x))))

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, width)
            self.layers = nn.Sequential(*(Layer() for _ in range(layers)))

        def forward(self, tokens):
            return self.layers(self.words(tokens)).mean(dim=1)

    return Encoder()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    collect(parser.parse_args().folder)
