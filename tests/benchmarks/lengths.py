"""Texts of all lengths through an encoder: not padded, padded to some sizes, and all padded to the longest.

Two encoders of different widths, and instead of one a product, which takes less time than the engine.

Each of 64 callers sends one text after the other. The lengths are skewed: half of them are below 20 tokens,
and one in a hundred has more than 168. Some answers are compared with those of the same texts alone.
"""

import asyncio
import tempfile
from functools import partial
from itertools import cycle
from pathlib import Path

import anyio
import numpy as np
from onnx import TensorProto

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec
from tests.benchmarks.common import arguments, in_turn, report, requests_of, save
from tests.models import node
from tests.models import save as save_model

WIDTHS, LAYERS, WORDS, LONGEST = (32, 128), 2, 1000, 256
SIZES = (16, 32, 64, 128, LONGEST)
FINE = (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 160, 192, LONGEST)
WAYS = {
    "each length apart": None,
    f"padded to {len(SIZES)} sizes": SIZES,
    f"padded to {len(FINE)} sizes": FINE,
    f"all padded to {LONGEST}": (LONGEST,),
}


def encoder_onnx(path, width):
    """Make an encoder with attention, whose mask hides padding: a token becomes ``width`` numbers."""
    rng = np.random.default_rng(0)
    weights = [
        ("words", rng.standard_normal((WORDS, width)).astype(np.float32)),
        ("one", np.float32(1)),
        ("far", np.float32(-1e9)),
        ("scale", np.float32(width**-0.5)),
        ("axis", np.array([1], np.int64)),
    ]
    nodes = [
        node("Gather", "words input_ids", "x0"),
        node("Cast", "attention_mask", "shown", to=TensorProto.FLOAT),
        node("Sub", "one shown", "hidden"),
        node("Mul", "hidden far", "penalty"),
        node("Unsqueeze", "penalty axis", "bias"),
    ]
    for layer in range(LAYERS):
        for name, wide, narrow in (
            ("q", width, width),
            ("k", width, width),
            ("v", width, width),
            ("up", width, 4 * width),
            ("down", 4 * width, width),
        ):
            weights.append(
                (f"{name}{layer}", rng.standard_normal((wide, narrow)).astype(np.float32) / wide**0.5)
            )
        x, n = f"x{layer}", layer
        nodes += [
            *(node("MatMul", f"{x} {name}{n}", f"{name}_{n}") for name in "qkv"),
            node("Transpose", f"k_{n}", f"kt_{n}", perm=[0, 2, 1]),
            node("MatMul", f"q_{n} kt_{n}", f"dots_{n}"),
            node("Mul", f"dots_{n} scale", f"scaled_{n}"),
            node("Add", f"scaled_{n} bias", f"biased_{n}"),
            node("Softmax", f"biased_{n}", f"weights_{n}", axis=-1),
            node("MatMul", f"weights_{n} v_{n}", f"seen_{n}"),
            node("Add", f"{x} seen_{n}", f"mid_{n}"),
            node("MatMul", f"mid_{n} up{n}", f"wide_{n}"),
            node("Relu", f"wide_{n}", f"relu_{n}"),
            node("MatMul", f"relu_{n} down{n}", f"back_{n}"),
            node("Tanh", f"back_{n}", f"x{n + 1}"),
        ]
    nodes.append(node("Identity", f"x{LAYERS}", "output"))
    text = ["rows", "sequence"]
    return save_model(
        path,
        nodes,
        [("input_ids", TensorProto.INT64, text), ("attention_mask", TensorProto.INT64, text)],
        [("output", TensorProto.FLOAT, [*text, width])],
        weights,
    )


def product():
    """Make a model for which there is hardly anything to compute: ids times mask."""
    dims = ("sequence",)
    return FunctionModel(
        lambda inputs: {"output": inputs["input_ids"] * inputs["attention_mask"]},
        inputs=[TensorSpec("input_ids", "int64", dims), TensorSpec("attention_mask", "int64", dims)],
        outputs=TensorSpec("output", "int64", dims),
        name="product",
    )


def texts(count):
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(3.0, 0.9, count).astype(int), 1, LONGEST)
    return [rng.integers(0, WORDS, (1, length)) for length in lengths]


async def measure(model, sizes, callers, seconds, sent):
    options = {} if sizes is None else {"pad": {"sequence": sizes}, "pad_with": {"attention_mask": "mask"}}
    async with asynctrt.open(model, **options) as engine:

        def request(ids):
            return {"input_ids": ids} | ({} if sizes else {"attention_mask": np.ones_like(ids)})

        sent = [request(ids) for ids in sent]
        # Each caller sends its share of the texts, one after the other.
        shares = [cycle(sent[first::callers]) for first in range(callers)]
        for one in sent[:8]:
            await engine.infer(one)
        return await requests_of(
            lambda share: engine.infer(next(share)), shares, seconds, look=engine.statistics
        )


async def check(model, sent):
    """Compare the answers of padded texts with those of each text alone."""
    async with (
        asynctrt.open(model, max_rows=1) as alone,
        asynctrt.open(model, pad={"sequence": SIZES}, pad_with={"attention_mask": "mask"}) as padded,
    ):
        answers = await asyncio.gather(*[padded.infer(ids) for ids in sent])
        for ids, answer in zip(sent, answers, strict=True):
            expected = await alone.infer({"input_ids": ids, "attention_mask": np.ones_like(ids)})
            np.testing.assert_allclose(answer["output"], expected["output"], atol=1e-4)


def main():
    options = arguments(__doc__, repeats=5, seconds=3.0, callers=64)
    sent = texts(4096)
    with tempfile.TemporaryDirectory() as folder:
        models = {
            f"width {width}": encoder_onnx(Path(folder) / f"encoder{width}.onnx", width) for width in WIDTHS
        }
        runs = {}
        for which, model in (models | {"no encoder": product()}).items():
            anyio.run(check, model, sent[:64])
            for name, sizes in WAYS.items():
                given = model, sizes, options.callers, options.seconds, sent
                runs[f"{which}, {name}"] = partial(measure, *given)
        results = in_turn(runs, options.repeats, "measuring")
    formats = {"requests_per_s": ",.0f", "mean_batch_rows": ".1f", "p50_us": ",.0f", "p99_us": ",.0f"}
    report(f"Texts of all lengths, {options.callers} callers", results, **formats)
    save(options.json, __doc__, results)


if __name__ == "__main__":
    main()
