"""Clients are told why a model cannot be loaded, and not where the server keeps its files."""

import asyncio
import json

import pytest

import asynctrt
from asynctrt.errors import ModelNotFoundError
from asynctrt.serving import Repository, Server, ServerSettings
from asynctrt.serving.responses import told, without_folders
from tests.serving.support import WAIT_S, connected, request

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("whole", "said"),
    [
        ("no file '/srv/models/m.onnx'. Give one", "no file 'm.onnx'. Give one"),
        ('no file "/srv/my models/m.onnx"', 'no file "m.onnx"'),
        ("Load model from /srv/models/m.onnx failed:Protobuf", "Load model from m.onnx failed:Protobuf"),
        ("give a path; the working directory is '/home/joe'", "give a path"),
        ("'m/1/model.onnx' and 1/2 and a / b", "'m/1/model.onnx' and 1/2 and a / b"),
        ("see https://example.org/a/b.html", "see https://example.org/a/b.html"),
        ("POST /v2 is", "POST /v2 is"),
        ("'/srv/repo/m/1/model.onnx' is broken", "'m/1/model.onnx' is broken"),
        ("from /srv/repo/m/config.pbtxt: no", "from m/config.pbtxt: no"),
        ("it's '/a/b' or it's '/c/d'", "it's 'b' or it's 'd'"),
    ],
)
def test_paths_become_names(whole, said):
    assert without_folders(whole) == said


def test_the_error_stays_what_it_is():
    error = ModelNotFoundError("no file '/srv/m.onnx'")
    copy = told(error)
    assert type(copy) is ModelNotFoundError
    assert str(copy) == "no file 'm.onnx'"
    assert copy.http_status == error.http_status
    assert str(error) == "no file '/srv/m.onnx'"


async def test_no_client_learns_where_the_files_are(tmp_path, caplog):
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "m.onnx").write_bytes(b"garbage")
    repository = Repository()
    for name in ("m", "none"):
        path = str(folder / f"{name}.onnx")
        repository.add(name, opener=lambda path=path: asynctrt.open(path)._open())
    settings = ServerSettings(http_port=0, grpc=False, model_control=True)
    async with Server(repository, settings) as server, connected(server) as raw, asyncio.timeout(WAIT_S):
        answers = []
        for name in ("m", "none"):
            for path in (
                f"/v2/repository/models/{name}/load",
                f"/v2/models/{name}/infer",
                "/v2/repository/index",
            ):
                raw.send(request(path, b"{}", Content_Type="application/json"))
                status, _, body = await raw.answer()
                answers.append(body)
                assert (status == 200) == path.endswith("index")
        assert b"m.onnx" in answers[0]
        assert b"none.onnx" in answers[3]
        assert {entry["name"] for entry in json.loads(answers[-1])} == {"m", "none"}
        for body in answers:
            assert b"a folder" not in body
            assert str(tmp_path).encode() not in body
            assert b"working directory" not in body
    assert str(folder) in caplog.text, "the log has the whole"
