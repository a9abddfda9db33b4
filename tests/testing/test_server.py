"""The page about testing, in an application's own run of pytest; and the server for tests."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import asynctrt.client
from asynctrt.errors import OptionsError, TooLargeError
from asynctrt.testing import serve_locally
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio

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


async def test_the_settings_of_a_server_for_a_test_hold():
    async with (
        serve_locally({"double": double_model()}, max_json=16) as server,
        asynctrt.client.connect(server.http_url) as client,
    ):
        with pytest.raises(TooLargeError, match="at most 16 are accepted"):
            await client.infer("double", {"input": rows(3)})
