"""A text encoder as people export it, as large as BERT's base, with texts of all lengths: opened by default.

Batch and length are symbolic, a mask says what is text, and the shapes that attention needs are computed by
nodes, as torch exports them. In one run: ONNX Runtime by single runs, and by hand in batches that are padded
to the longest text; how long it takes to open the engine; callers who send texts one after the other, and
callers who wait at random between two, at first and once the lengths that recur have contexts of their own.
"""

import asyncio
import logging
import tempfile
from pathlib import Path

import numpy as np
import uvloop
from onnx import TensorProto

import asynctrt
from asynctrt._util import clock
from asynctrt._util.process import freeze_gc
from tests.benchmarks.common import arguments, save
from tests.benchmarks.gpu.detector import call, line, session_of
from tests.benchmarks.gpu.support import open_device
from tests.models import node
from tests.models import save as save_model

CALLERS = (1, 64, 256)
RANDOM_CALLERS, RANDOM_S = 256, 0.1
WORDS, POSITIONS = 30_522, 512
SHORTEST, LONGEST = 5, 127
BY_HAND = 64
UNCHANGED_S = 7
"""If no shape gets contexts for so long, none will."""


def encoder_onnx(path, layers, width, words=WORDS):
    """Make an encoder with attention and random weights, for ids and a mask; it answers with one row."""
    rng, heads = np.random.default_rng(0), max(width // 64, 1)
    weights = [
        ("words", rng.normal(0, 0.02, (words, width)).astype(np.float32)),
        ("positions", rng.normal(0, 0.02, (1, POSITIONS, width)).astype(np.float32)),
        *((name, np.array([number])) for name, number in (("zero", 0), ("one", 1), ("two", 2))),
        ("sizes", np.array([heads, width // heads])),
        ("width", np.array([width])),
        ("nothing", np.array(0)),
        *((name, np.float32(value)) for name, value in (("unit", 1), ("far", -1e9), ("half", 0.5))),
        ("root", np.float32(2**0.5)),
        ("scale", np.float32((width // heads) ** -0.5)),
    ]
    nodes = [
        node("Shape", "input_ids", "shape"),
        node("Slice", "shape one two", "length"),
        node("Slice", "positions zero length one", "places"),
        node("Gather", "words input_ids", "embedded"),
        node("Add", "embedded places", "sum"),
        node("Cast", "attention_mask", "shown", to=TensorProto.FLOAT),
        node("Sub", "unit shown", "hidden"),
        node("Mul", "hidden far", "penalty"),
        node("Unsqueeze", "penalty both", "bias"),
    ]
    weights.append(("both", np.array([1, 2])))

    def linear(name, given, wide, narrow):
        weights.append((f"{name}_w", rng.normal(0, 0.03, (wide, narrow)).astype(np.float32)))
        weights.append((f"{name}_b", rng.normal(0, 0.03, narrow).astype(np.float32)))
        nodes.append(node("MatMul", f"{given} {name}_w", f"{name}_m"))
        nodes.append(node("Add", f"{name}_m {name}_b", name))

    def normal(name, given):
        weights.append((f"{name}_g", np.ones(width, np.float32)))
        weights.append((f"{name}_h", np.zeros(width, np.float32)))
        nodes.append(node("LayerNormalization", f"{given} {name}_g {name}_h", name, axis=-1))

    normal("x0", "sum")
    for number in range(layers):
        x, own = f"x{number}", f"l{number}_"
        nodes.append(node("Shape", x, f"{own}shape"))
        nodes.append(node("Slice", f"{own}shape zero two", f"{own}rows"))
        nodes.append(node("Concat", f"{own}rows sizes", f"{own}split", axis=0))
        nodes.append(node("Concat", f"{own}rows width", f"{own}joined", axis=0))
        for letter, order in (("q", (0, 2, 1, 3)), ("k", (0, 2, 3, 1)), ("v", (0, 2, 1, 3))):
            linear(f"{own}{letter}", x, width, width)
            nodes.append(node("Reshape", f"{own}{letter} {own}split", f"{own}{letter}r"))
            nodes.append(node("Transpose", f"{own}{letter}r", f"{own}{letter}t", perm=order))
        nodes += [
            node("MatMul", f"{own}qt {own}kt", f"{own}scores"),
            node("Mul", f"{own}scores scale", f"{own}scaled"),
            node("Add", f"{own}scaled bias", f"{own}masked"),
            node("Softmax", f"{own}masked", f"{own}shares", axis=-1),
            node("MatMul", f"{own}shares {own}vt", f"{own}mixed"),
            node("Transpose", f"{own}mixed", f"{own}turned", perm=(0, 2, 1, 3)),
            node("Reshape", f"{own}turned {own}joined", f"{own}flat"),
        ]
        linear(f"{own}out", f"{own}flat", width, width)
        nodes.append(node("Add", f"{own}out {x}", f"{own}first"))
        normal(f"{own}n", f"{own}first")
        linear(f"{own}up", f"{own}n", width, 4 * width)
        nodes += [
            node("Div", f"{own}up root", f"{own}divided"),
            node("Erf", f"{own}divided", f"{own}erf"),
            node("Add", f"{own}erf unit", f"{own}more"),
            node("Mul", f"{own}up {own}more", f"{own}product"),
            node("Mul", f"{own}product half", f"{own}gelu"),
        ]
        linear(f"{own}down", f"{own}gelu", 4 * width, width)
        nodes.append(node("Add", f"{own}down {own}n", f"{own}second"))
        normal(f"x{number + 1}", f"{own}second")
    nodes.append(node("Gather", f"x{layers} nothing", "first", axis=1))
    linear("pooled", "first", width, width)
    nodes.append(node("Tanh", "pooled", "embedding"))
    sides = ["batch", "sequence"]
    inputs = [(name, TensorProto.INT64, sides) for name in ("input_ids", "attention_mask")]
    return save_model(path, nodes, inputs, [("embedding", TensorProto.FLOAT, ["batch", width])], weights)


def texts(count, words=WORDS):
    """Return texts of random lengths."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(SHORTEST, LONGEST + 1, count)
    return [
        {"input_ids": rng.integers(5, words, (1, n)), "attention_mask": np.ones((1, n), np.int64)}
        for n in lengths
    ]


def padded(some):
    """Return one batch of texts, padded to the longest."""
    longest = max(one["input_ids"].shape[1] for one in some)
    joined = {name: np.zeros((len(some), longest), np.int64) for name in some[0]}
    for number, one in enumerate(some):
        for name, row in one.items():
            joined[name][number, : row.shape[1]] = row[0]
    return joined


def by_hand(path, given, sent):
    """Return texts a second of ONNX Runtime, by single runs and in padded batches."""
    session = session_of(path, given.device)

    def rate(size):
        session.run(None, padded(sent[:size]))
        start_ns, done = clock.now_ns(), 0
        while clock.now_ns() - start_ns < given.seconds / 2 * 1e9:
            session.run(None, padded([sent[(done + n) % len(sent)] for n in range(size)]))
            done += size
        return done / (clock.now_ns() - start_ns) * 1e9

    return {"single runs": rate(1), f"{BY_HAND} padded to the longest": rate(BY_HAND)}


async def rounds(engine, given, sent, figures, when):
    """Print and note what callers get."""
    for count in map(int, given.callers.split(",")):
        await call(engine.infer, sent, count, given.seconds / 10)
        before = engine.statistics()
        found = figures[f"{when}, {count} callers"] = await call(engine.infer, sent, count, given.seconds)
        after = engine.statistics()
        found["rows"] = (after.rows - before.rows) / max(after.batches - before.batches, 1)
        line(f"{count} callers", found)
    found = await call(engine.infer, sent, given.random, given.seconds, RANDOM_S)
    figures[f"{when}, at random"] = found
    line(f"{given.random} at random", found)


async def until_built(engine, sent, patience_s):
    """Return when each shape had contexts of its own, with the longest pause of the loop meanwhile."""
    start_ns, built, pause_ms = clock.now_ns(), [], 0.0
    for count in (8, 1):
        unchanged_ns = clock.now_ns()
        while clock.now_ns() - unchanged_ns < UNCHANGED_S * 1e9:
            if clock.now_ns() - start_ns > patience_s * 1e9:
                break
            found = await call(engine.infer, sent, count, 0.5)
            pause_ms = max(pause_ms, found["pause_ms"])
            for one in engine.statistics().specialised[len(built) :]:
                built.append(((clock.now_ns() - start_ns) / 1e9, str(one)))
                print(f"  after {built[-1][0]:.1f} s: {one}", flush=True)
                unchanged_ns = clock.now_ns()
    return {"built": built, "pause_ms": pause_ms}


async def measure(path, given):
    """Print and return all figures, and the device."""
    sent = texts(256, given.words)
    figures = {"by hand": by_hand(path, given, sent)}
    for name, rate in figures["by hand"].items():
        print(f"  ONNX Runtime, {name:28} {rate:8,.0f}/s", flush=True)
    device = open_device(given.device)
    start_ns = clock.now_ns()
    async with asynctrt.open(path, device=device) as engine:
        figures["opened_s"] = (clock.now_ns() - start_ns) / 1e9
        print(f"  opened in {figures['opened_s']:.1f} s. {engine.batching.lengths}", flush=True)
        expected = [await engine.infer(one) for one in sent[:32]]
        freeze_gc()
        await rounds(engine, given, sent, figures, "at first")
        figures["building"] = await until_built(engine, sent, given.patience)
        print(f"  longest pause of the loop meanwhile {figures['building']['pause_ms']:.1f} ms")
        await rounds(engine, given, sent, figures, "then")
        answers = await asyncio.gather(*(engine.infer(one) for one in sent[:32]))
        off = max(
            float(np.abs(one["embedding"] - before["embedding"]).max())
            for one, before in zip(answers, expected, strict=True)
        )
        figures["off_by"] = off
        print(f"  answers are off by {off:.2g} at most")
    return figures, device


async def main():
    given = arguments(
        __doc__,
        device="cuda:0",
        layers=12,
        width=768,
        words=WORDS,
        seconds=3.0,
        callers=",".join(map(str, CALLERS)),
        random=RANDOM_CALLERS,
        patience=90.0,  # How long to wait for contexts, in s.
    )
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(encoder_onnx(Path(folder) / "encoder.onnx", given.layers, given.width, given.words))
        print(f"{given.layers} layers of {given.width}")
        figures, device = await measure(path, given)
    settings = {name: str(value) for name, value in vars(given).items()}
    save(given.json, "a text encoder with symbolic dimensions", {"settings": settings, **figures}, device)
    device.close()


if __name__ == "__main__":
    uvloop.run(main())
