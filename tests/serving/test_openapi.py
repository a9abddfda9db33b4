"""The server's OpenAPI document is valid and true of what the server accepts, and its page sends requests."""

import asyncio
import json
from contextlib import contextmanager

import numpy as np
import pytest
import requests
from playwright.async_api import expect

from asynctrt import FunctionModel, TensorSpec
from asynctrt.serving.openapi import EXAMPLE_SIZE_MAX, FILES, docs_pages, document, example
from tests.models import double_model
from tests.serving.support import WAIT_S, ask, serving
from tests.serving.test_dashboard import WAIT_MS, browser

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


@pytest.fixture
def anyio_backend():
    """One loop is enough: what is tested here is the document."""
    return ("asyncio", {"use_uvloop": False})


def several(inputs):
    rows = len(inputs["flags"])
    return {"words": np.full(rows, "ü".encode(), "S4"), "half": np.zeros((rows, 2), np.float16)}


MODELS = {
    "double": double_model(),
    ("versions", "1"): double_model(),
    ("versions", "2"): double_model(),
    "a/b {c}": FunctionModel(
        several,
        inputs=[
            TensorSpec("flags", "bool"),
            TensorSpec("small", "uint8", (2, 1)),
            TensorSpec("text", "str"),
            TensorSpec("bytes", "S3"),
        ],
        outputs=[TensorSpec("words", "S4"), TensorSpec("half", "float16", (2,))],
    ),
    "wide": double_model(dims=(EXAMPLE_SIZE_MAX + 1,)),
    "alone": FunctionModel(
        lambda inputs: {"y": inputs["x"]},
        inputs=TensorSpec("x", "float32", (2,), axis=None),
        outputs=TensorSpec("y", "float32", (2,), axis=None),
    ),
}


def operations(content):
    import schemathesis

    return [result.ok() for result in schemathesis.openapi.from_dict(content).get_all_operations()]


@contextmanager
def asking(server):
    with requests.Session() as session:
        yield lambda method, path, **kw: session.request(method, server.http_url + path, timeout=WAIT_S, **kw)


@pytest.mark.tier2
async def test_it_is_valid_and_has_every_model():
    async with serving(MODELS) as server:
        status, headers, body = await ask(server, "/openapi.json")
        assert (status, headers["content-type"]) == (200, "application/json")
        content = json.loads(body)
        paths = content["paths"]
        for name in ("double", "versions", "versions/versions/1", "a%2Fb%20%7Bc%7D", "wide", "alone"):
            assert f"/v1/models/{name}:predict" in paths
        found = await asyncio.to_thread(operations, content)
        assert len(found) == sum(map(len, paths.values()))


async def test_every_path_that_is_got_is_there_and_every_example_is_answered():
    async with serving(MODELS) as server:
        paths = document(server.api)["paths"]

        def check():
            with asking(server) as asked:
                for path, methods in paths.items():
                    for method, about in methods.items():
                        body = about.get("requestBody", {}).get("content", {}).get("application/json", {})
                        if method == "post" and "example" not in body and "index" not in path:
                            assert "/wide" in path
                            continue
                        answer = asked(method, path, json=body.get("example"))
                        assert answer.status_code == 200, (path, answer.text)

        await asyncio.to_thread(check)


async def test_a_token_is_required_and_said_to_be():
    async with serving(tokens=("s3cret",)) as server:
        assert (await ask(server, "/openapi.json"))[0] == 401
        status, _, body = await ask(server, "/openapi.json", Authorization="Bearer s3cret")
        assert (status, json.loads(body)["security"]) == (200, [{"token": []}])
        assert (await ask(server, "/docs"))[0] == 200


async def test_examples_are_shown_if_they_are_short():
    async with serving(MODELS) as server:
        shown = {served.name: example(served) for served in server.repository}
        assert shown["double"] == {"instances": [[0, 0, 0, 0]]}
        assert shown["wide"] is None
        assert shown["alone"] == {"inputs": {"x": [0, 0]}}
        assert shown["a/b {c}"] == {
            "instances": [{"flags": False, "small": [[0], [0]], "text": "", "bytes": ""}]
        }


class TestThePage:
    async def test_it_has_what_it_needs_and_nothing_inline(self):
        async with serving() as server:
            assert set(docs_pages(server.api)) == {*FILES, "/openapi.json"}
            for path in FILES:
                status, headers, _ = await ask(server, path)
                assert (status, "default-src 'self'" in headers["content-security-policy"]) == (200, True)

    async def test_a_request_is_sent_from_it(self, chromium):
        async with (
            serving(MODELS) as server,
            browser(chromium, 360, 900) as (page, wrong),
        ):
            await page.goto(f"{server.http_url}/docs")
            await expect(page.get_by_role("heading", level=2, name="double")).to_be_visible(timeout=WAIT_MS)
            first = page.locator("details").first
            await expect(first.get_by_label("Body, as JSON")).to_have_value('{"instances":[[0,0,0,0]]}')
            await first.get_by_label("Body, as JSON").fill('{"instances":[[1,2,3,4]]}')
            await first.get_by_role("button", name="Send POST /v1/models/double:predict").click()
            await expect(first.get_by_role("status")).to_contain_text("Status 200", timeout=WAIT_MS)
            answer = await first.get_by_label("Answer").text_content()
            assert json.loads(answer) == {"predictions": [[2, 4, 6, 8]]}
            assert not wrong
            await first.get_by_label("Body, as JSON").fill('{"instances":[[1]]}')
            await first.get_by_role("button", name="Send").click()
            await expect(first.get_by_role("status")).to_contain_text("Status 400", timeout=WAIT_MS)
            await expect(first.get_by_label("Answer")).to_contain_text("takes shape (rows, 4)")
            assert await page.evaluate("document.documentElement.scrollWidth") <= 360
            unnamed = "fields => fields.filter(({ labels }) => labels.length === 0).length"
            assert await page.locator("textarea").evaluate_all(unnamed) == 0

    async def test_it_says_where_a_token_is_entered(self, chromium):
        async with serving(tokens=("s3cret",)) as server, browser(chromium) as (page, _):
            await page.goto(f"{server.http_url}/docs")
            await expect(page.locator("#about")).to_contain_text("enter it on the dashboard", timeout=WAIT_MS)
            await page.evaluate("sessionStorage.setItem('asynctrt-token', 's3cret')")
            await page.reload()
            await expect(page.get_by_role("heading", level=2, name="double")).to_be_visible(timeout=WAIT_MS)
