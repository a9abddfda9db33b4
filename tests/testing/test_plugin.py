"""The fixtures, as the page about them uses them, in an application's own run of pytest."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import asynctrt.client
from asynctrt.errors import OptionsError, TooLargeError
from asynctrt.testing import serve_locally
from tests.models import double_model, rows

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "testing.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))


def pytest_in(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.tier2
def test_the_page_runs_as_it_stands(tmp_path):
    assert len(FILES) == 3
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code, said = pytest_in(tmp_path)
    assert code == 0, said
    assert "4 passed" in said


@pytest.mark.tier2
def test_mistakes_are_explained(tmp_path):
    """No model; a batch that never comes; a release before there is a batch."""
    (tmp_path / "conftest.py").write_text(
        FILES["conftest.py"].split("@pytest.fixture\ndef asynctrt_model")[0]
    )
    (tmp_path / "test_them.py").write_text(
        "import pytest\n"
        "pytestmark = pytest.mark.anyio\n"
        "async def test_model(asynctrt_engine): pass\n"
        "async def test_wait(asynctrt_latch): await asynctrt_latch.wait_held(2, timeout=0)\n"
        "async def test_release(asynctrt_latch): asynctrt_latch.release()\n"
    )
    code, said = pytest_in(tmp_path)
    assert code == 1
    assert "Define a fixture `asynctrt_model` in conftest.py" in said
    assert "0 of 2 batches are held after 0 s" in said
    assert "await device.wait_held(1)" in said


@pytest.mark.tier2
def test_a_batch_that_is_still_held_keeps_no_server(tmp_path):
    """A server that closes waits for its answers, 5 s long; the latch lets go of them first."""
    (tmp_path / "conftest.py").write_text(FILES["conftest.py"])
    (tmp_path / "test_it.py").write_text(
        "import numpy as np, pytest, time\n"
        "@pytest.fixture(autouse=True, scope='module')\n"
        "def in_time():\n"
        "    began = time.monotonic()\n"
        "    yield\n"
        "    assert time.monotonic() - began < 4\n"
        "@pytest.mark.anyio\n"
        "async def test_it(asynctrt_server, asynctrt_latch, asynctrt_engine):\n"
        "    asynctrt_engine.submit(np.ones((1, 1), np.float32))\n"
        "    await asynctrt_latch.wait_held()\n"
    )
    code, said = pytest_in(tmp_path)
    assert code == 0, said


@pytest.mark.anyio
async def test_a_server_for_a_test():
    async with (
        serve_locally({"double": double_model()}, engine={"max_rows": 2}) as server,
        asynctrt.client.connect(server.websocket_url) as client,
    ):
        assert (await client.infer("double", {"input": rows(3)}))["output"].tolist() == rows(6).tolist()
        assert server.grpc_target is None
    with pytest.raises(OptionsError, match="ports"):
        async with serve_locally({}, ports=1):
            pass


@pytest.mark.anyio
async def test_the_settings_of_a_server_for_a_test_hold():
    async with (
        serve_locally({"double": double_model()}, max_json=16) as server,
        asynctrt.client.connect(server.http_url) as client,
    ):
        with pytest.raises(TooLargeError, match="at most 16 are accepted"):
            await client.infer("double", {"input": rows(3)})
