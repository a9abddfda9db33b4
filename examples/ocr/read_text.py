"""Read the text in pictures: a detector and a recogniser chained, over a websocket with a page.

    pip install 'asynctrt[cpu,client,serve]' onnx pillow starlette uvicorn
    pip install --no-deps rapidocr-onnxruntime      # Its two PP-OCRv4 models, without what else it needs.
    python examples/ocr/read_text.py                # Then open http://127.0.0.1:8080/

The detector finds the lines of a picture. Each line goes to the recogniser by itself, where it shares batches
with the lines of all other pictures. Decoding and cutting out is done in threads.
"""

import asyncio
import io
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import uvicorn
from PIL import Image, ImageOps
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Mount, Route

import asynctrt
from asynctrt import Array, Engine, InputError, Pipeline, TensorSpec
from asynctrt.client import JAVASCRIPT
from asynctrt.serving import kserve_app

HERE = Path(__file__).parent
SIDE = 640
"""Pictures are scaled and padded to this size, so that they fit into one batch."""
HEIGHT = 48
"""The height that the recogniser expects of a line."""
WIDTH_STEP = 160
"""Lines are padded to a multiple of this width, so that lines of about the same length share batches."""
INSIDE, SURE, GROWTH = 0.3, 0.5, 1.6
"""A pixel and a line are text from these probabilities on; a line is this much larger than its core."""

IMAGE = TensorSpec("image", np.dtype("uint8"), ("nbytes",))
TEXT = TensorSpec("text", np.dtype("S256"), ("lines",))
SCORE = TensorSpec("score", np.dtype("float32"), ("lines",))
BOX = TensorSpec("box", np.dtype("float32"), ("lines", 4))


def find_models() -> Path:
    """Return the folder with the models of the package."""
    spec = find_spec("rapidocr_onnxruntime")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the models are missing: pip install --no-deps rapidocr-onnxruntime")
    return Path(spec.submodule_search_locations[0]) / "models"


def characters_of(recogniser: Path) -> list[str]:
    """Return the characters that a recogniser's scores are of, in order."""
    metadata = onnx.load(recogniser).metadata_props
    (characters,) = [item.value for item in metadata if item.key == "character"]
    return ["", *characters.split("\n"), " "]  # The first one is the blank.


def as_input(pixels: Array) -> Array:
    """Return a picture as both models take it: one row, channels first, from -1 to 1, blue first."""
    scaled = pixels[:, :, ::-1].astype(np.float32) / 127.5 - 1
    return np.ascontiguousarray(scaled.transpose(2, 0, 1))[None]


def decode(inputs: dict[str, Array]) -> dict[str, Any]:
    """Return the picture, scaled and padded, as the detector takes it."""
    if len(inputs["image"]) != 1:
        raise InputError("give one picture a request")
    try:
        with Image.open(io.BytesIO(inputs["image"][0].tobytes())) as image:
            # Browsers also turn pictures as the camera was held.
            picture = ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"these bytes are not a picture that can be read: {error}") from error
    scale = min(SIDE / max(picture.size), 2.0)
    size = [max(1, round(side * scale)) for side in picture.size]
    page = np.zeros((SIDE, SIDE, 3), np.uint8)
    page[: size[1], : size[0]] = np.asarray(picture.resize((size[0], size[1])))
    return {"x": as_input(page), "page": page, "scale": scale, "size": size}


def find_boxes(probability: Array, size: list[int]) -> list[tuple[int, int, int, int]]:
    """Return left, top, right and bottom of every line, in reading order."""
    found = []
    for left, top, right, bottom in connected(probability > INSIDE):
        width, height = right - left, bottom - top
        if min(width, height) < 3 or probability[top:bottom, left:right].mean() < SURE:
            continue
        margin = round(width * height * GROWTH / (2 * (width + height)))
        found.append(
            (
                max(left - margin, 0),
                max(top - margin, 0),
                min(right + margin, size[0]),
                min(bottom + margin, size[1]),
            )
        )
    return sorted(found, key=lambda box: (box[1] // 10, box[0]))


def connected(mask: Array) -> list[tuple[int, int, int, int]]:
    """Return the boxes around connected areas: runs of a row join the runs above that they touch."""
    boxes: list[list[int]] = []
    parents: list[int] = []

    def root(number: int) -> int:
        while parents[number] != number:
            number = parents[number]
        return number

    above: list[tuple[int, int, int]] = []
    for y, row in enumerate(mask):
        edges = np.flatnonzero(np.diff(row.astype(np.int8), prepend=0, append=0))
        runs = []
        for start, stop in edges.reshape(-1, 2).tolist():
            number = len(parents)
            parents.append(number)
            boxes.append([start, y, stop, y + 1])
            for begin, end, other in above:
                if begin < stop and start < end:
                    parents[root(number)] = root(other)
            runs.append((start, stop, number))
        above = runs
    joined: dict[int, list[int]] = {}
    for number, (left, top, right, bottom) in enumerate(boxes):
        whole = joined.setdefault(root(number), [left, top, right, bottom])
        whole[:] = [min(whole[0], left), min(whole[1], top), max(whole[2], right), max(whole[3], bottom)]
    return [(box[0], box[1], box[2], box[3]) for box in joined.values()]


def cut_out(page: Array, box: tuple[int, int, int, int]) -> Array:
    """Return a line as the recogniser takes it."""
    left, top, right, bottom = box
    line = Image.fromarray(page[top:bottom, left:right])
    width = max(8, round(HEIGHT * line.width / line.height))
    row = as_input(np.asarray(line.resize((width, HEIGHT))))
    padding = -width % WIDTH_STEP
    return np.pad(row, ((0, 0), (0, 0), (0, 0), (0, padding)))


def read(scores: Array, characters: list[str]) -> tuple[str, float]:
    """Return the text of a line, and how sure it is: repeated characters and blanks are left out."""
    best = scores.argmax(1)
    keep = (best != 0) & (best != np.concatenate([[0], best[:-1]]))
    if not keep.any():
        return "", 0.0
    return "".join(characters[index] for index in best[keep]), float(scores.max(1)[keep].mean())


def shortened(text: str, nbytes: int) -> bytes:
    """Return a text in UTF-8, cut between two characters if it is longer."""
    return text.encode()[:nbytes].decode(errors="ignore").encode()


def make_reader(detector: Engine, recogniser: Engine, characters: list[str]) -> Pipeline:
    """Return the pipeline: from the bytes of a picture to its lines."""

    async def read_lines(inputs: dict[str, Array]) -> dict[str, Any]:
        given = await asyncio.to_thread(decode, inputs)
        (areas,) = (await detector.infer(given["x"])).values()
        boxes = await asyncio.to_thread(find_boxes, areas[0, 0], given["size"])

        async def line(box: tuple[int, int, int, int]) -> tuple[str, float]:
            row = await asyncio.to_thread(cut_out, given["page"], box)
            (scores,) = (await recogniser.infer(row)).values()
            return await asyncio.to_thread(read, scores[0], characters)

        # Unlike gather, it leaves nothing behind if a line fails.
        async with asyncio.TaskGroup() as group:
            lines = [group.create_task(line(box)) for box in boxes]
        found = [(*task.result(), box) for task, box in zip(lines, boxes, strict=True)]
        kept = [one for one in found if one[0]]
        return {
            "text": np.array([[shortened(text, 256) for text, _, _ in kept]], "S256").reshape(1, -1),
            "score": np.array([[score for _, score, _ in kept]], np.float32).reshape(1, -1),
            "box": np.array([box for _, _, box in kept], np.float32).reshape(1, -1, 4) / given["scale"],
        }

    return Pipeline(read_lines, inputs=IMAGE, outputs=[TEXT, SCORE, BOX], name="reader")


@asynccontextmanager
async def open_reader() -> AsyncIterator[Pipeline]:
    """Open both models, and the pipeline over them."""
    models = find_models()
    path = models / "ch_PP-OCRv4_rec_infer.onnx"
    async with (
        asynctrt.open(models / "ch_PP-OCRv4_det_infer.onnx", max_rows=4) as detector,
        asynctrt.open(path, max_rows=16) as recogniser,
        make_reader(detector, recogniser, characters_of(path)) as reader,
    ):
        yield reader


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with open_reader() as app.state.reader:
        yield


async def page(_: Request) -> FileResponse:
    return FileResponse(HERE / "index.html")


async def client(_: Request) -> FileResponse:
    """Return asynctrt's own client for browsers."""
    return FileResponse(JAVASCRIPT, media_type="text/javascript")


app: Starlette = Starlette(
    routes=[
        Route("/", page),
        Route("/asynctrt.js", client),
        Mount("/kserve", kserve_app(lambda: app.state.reader)),
    ],
    lifespan=lifespan,
)

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8080
    uvicorn.run(app, port=port, ws="websockets-sansio", log_level="warning")
