"""The models of ``ort_cuda``: their rows, and three that torch exports where it is installed.

magika, silero-vad and the detector and recogniser of PP-OCR come from packages of theirs
(``tests/benchmarks/README.md``). ResNet-50, an encoder as large as BERT's base and a vision transformer are
made here with random weights: what they compute takes as long as with trained ones.
"""

from dataclasses import dataclass

import numpy as np

LENGTHS = (32, 64, 128)
VOCABULARY = 30_522
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
    Subject("silero_vad", 64, {"input": ("float32", (576,)), "state": ("float32", (2, 128))}),
    Subject("ppocr_det", 32, {"x": ("float32", (3, 320, 320))}),
    Subject("ppocr_rec", 32, {"x": ("float32", (3, 48, 320))}),
    Subject("resnet50", 64, {"image": ("float32", (3, 224, 224))}),
    Subject("encoder", 64, {"tokens": ("int64", ("length",))}, LENGTHS),
    Subject("vit", 64, {"image": ("float32", (3, 224, 224))}),
)


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
        "vit": lambda: (torchvision.models.vit_b_16(weights=None), image, "image"),
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
