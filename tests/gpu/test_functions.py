"""PyTorch functions on a GPU, as the documentation shows them."""

import asyncio
import re
import threading
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from tests.gpu.support import gpu_is_here, torch_is_here

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not gpu_is_here() or not torch_is_here(), reason="needs a GPU and PyTorch"),
]
PAGE = Path(__file__).parent.parent.parent / "docs" / "functions-on-a-gpu.md"


async def test_the_function_of_the_page_sees_its_sizes_and_answers_right():
    import torch

    names = {}
    (snippet,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(snippet, PAGE.name, "exec"), names)
    seen = []

    class Network(torch.nn.Module):
        def forward(self, images):
            seen.append((threading.get_ident(), len(images)))
            return images.flatten(1).sum(dim=1, keepdim=True)

    rows = np.arange(100, dtype=np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 3, 4, 4), np.float32)
    async with asynctrt.open(names["served"](Network(), (3, 4, 4), 1), contexts=2) as engine:
        beforehand = set(seen)
        answers = await asyncio.gather(*[engine.infer(row[np.newaxis]) for row in rows])
    assert [answer["logits"].item() for answer in answers] == [48.0 * number for number in range(100)]
    assert {size for _, size in beforehand} == set(names["SIZES"])
    assert set(seen) <= beforehand
