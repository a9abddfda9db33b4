"""The example that reads text: its pieces, and the page in a browser, with the real models."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from playwright.async_api import async_playwright, expect

from asynctrt import InputError
from tests.helpers import free_port, needed
from tests.serving.support import CHROMIUM_FLAGS

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(240)]
EXAMPLE = Path(__file__).parent.parent / "examples" / "ocr" / "read_text.py"
FONT = Path(importlib.util.find_spec("matplotlib").origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf"
LINES = ["Invoice 2026-117", "Total: 48.50 EUR", "Thank you, come again"]
WAIT_S = 60


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("read_text", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["read_text"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(example):
    there = importlib.util.find_spec("rapidocr_onnxruntime") is not None
    needed(there, "the models are missing: pip install --no-deps rapidocr-onnxruntime")
    return example.find_models()


def picture(lines, size=36):
    image = Image.new("RGB", (700, 60 + 2 * size * len(lines)), "white")
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((30, 30 + 2 * size * number), line, fill="black", font=ImageFont.truetype(FONT, size))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_areas_that_touch_are_one(example):
    mask = np.zeros((9, 12), bool)
    mask[1:3, 1:4] = mask[2:6, 3] = mask[5, 3:9] = mask[1:6, 8] = True  # A U, whose arms meet below.
    mask[7:9, 10:12] = True
    assert sorted(example.connected(mask)) == [(1, 1, 9, 6), (10, 7, 12, 9)]
    assert example.connected(np.zeros((3, 3), bool)) == []


def test_repetitions_and_blanks_are_left_out(example):
    scores = np.eye(4, dtype=np.float32)[[0, 1, 1, 0, 1, 2, 2, 0]]
    assert example.read(scores, ["", "a", "b", "c"]) == ("aab", 1.0)
    assert example.read(scores[:1], ["", "a", "b", "c"]) == ("", 0.0)


def test_pictures_are_turned_as_they_were_held_and_what_is_none_is_the_caller_s_mistake(example):
    image, file = Image.new("RGB", (40, 20), "white"), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6  # To be shown turned by 90 degrees, as browsers do.
    image.save(file, "JPEG", exif=exif)
    assert example.decode({"image": np.frombuffer(file.getvalue(), np.uint8)[None]})["size"] == [40, 80]
    whole = picture(LINES)
    for wrong in (b"", b"GIF89a", whole[:40], whole[: len(whole) // 2]):
        with pytest.raises(InputError, match="not a picture"):
            example.decode({"image": np.frombuffer(wrong, np.uint8)[None]})


def test_texts_are_cut_between_characters(example):
    assert example.shortened("grüße", 3) == b"gr"
    assert example.shortened("grüße", 64) == "grüße".encode()


def test_lines_are_read(example, models):
    async def main():
        async with example.open_reader() as reader:
            row = np.frombuffer(picture(LINES), np.uint8)[None]
            empty = np.frombuffer(picture([]), np.uint8)[None]

            async def ask(rows):
                return await reader.infer(rows, timeout=WAIT_S)

            results = {}
            async with anyio.create_task_group() as group:
                for name, rows in (("one", row), ("two", row), ("none", empty)):

                    async def keep(name=name, rows=rows):
                        results[name] = await ask(rows)

                    group.start_soon(keep)
            one, two, none = (results[name] for name in ("one", "two", "none"))
            for result in (one, two):
                assert [text.decode() for text in result["text"][0]] == LINES
                assert (result["score"] > 0.9).all()
            left, top, right, bottom = one["box"][0, 0]
            assert 15 < left < 35
            assert top < 45 < bottom
            assert 300 < right < 400
            assert none["text"].shape == (1, 0)
            with pytest.raises(Exception, match="cannot identify image file"):
                await ask(np.zeros((1, 10), np.uint8))

    anyio.run(main)


def test_the_page(chromium, models, tmp_path):
    (tmp_path / "invoice.png").write_bytes(picture(LINES))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, str(EXAMPLE), str(port)], env=environment)

    async def main():
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
            page = await browser.new_page(viewport={"width": 390, "height": 800})
            trouble = []
            page.on("pageerror", lambda error: trouble.append(str(error)))
            with anyio.fail_after(WAIT_S):
                while True:
                    try:
                        await page.goto(f"http://127.0.0.1:{port}/")
                        break
                    except Exception:
                        assert process.poll() is None
                        await anyio.sleep(0.2)
            await expect(page.locator("#state")).to_have_text("connected", timeout=WAIT_S * 1000)
            await page.set_input_files("#files", [str(path) for path in sorted(tmp_path.iterdir())])
            lines = page.locator("article li")
            await expect(lines).to_have_count(len(LINES), timeout=WAIT_S * 1000)
            said = [text.rpartition(" ")[0].rpartition(" ")[0] for text in await lines.all_inner_texts()]
            assert said == LINES
            assert await page.locator("rect").count() == len(LINES)
            await expect(page.locator(".bad")).to_contain_text("cannot identify image file")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
            assert not trouble
            await browser.close()

    try:
        anyio.run(main)
    finally:
        process.terminate()
        process.wait(WAIT_S)
