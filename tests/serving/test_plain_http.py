"""Plain JSON over HTTP: the routes of TensorFlow Serving and KServe V1, as curl and requests use them."""

import asyncio
import json
import shutil
import subprocess

import numpy as np
import pytest
import requests

import asynctrt
from asynctrt import FunctionModel, TensorSpec
from asynctrt.errors import ModelError
from asynctrt.kserve.json_codec import FAST_JSON_NBYTES
from asynctrt.serving import Repository, kserve_app
from tests.helpers import needed
from tests.models import double_model
from tests.serving.support import WAIT_S, ask, connected, engine_of, request, serving
from tests.serving.test_asgi import running

pytestmark = pytest.mark.anyio
PREDICT = "/v1/models/double:predict"
ROWS = {"instances": [[1, 2, 3, 4], [5, 6, 7, 8.5]]}
DOUBLED = [[2, 4, 6, 8], [10, 12, 14, 17]]


async def predict(server, content, path=PREDICT, **kw):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    status, _, body = await ask(server, path, body, **kw)
    return status, json.loads(body)


def posted(url, content):
    answer = requests.post(url, json=content, timeout=WAIT_S)
    return answer.status_code, answer.json()


class TestPredict:
    async def test_rows_and_whole_tensors(self):
        async with serving() as server:
            assert await predict(server, ROWS) == (200, {"predictions": DOUBLED})
            assert await predict(server, {"inputs": ROWS["instances"]}) == (200, {"outputs": DOUBLED})
            versioned = "/v1/models/double/versions/1:predict"
            assert await predict(server, ROWS, versioned) == (200, {"predictions": DOUBLED})
            done = engine_of(server).statistics()
            assert (done.succeeded, done.rows) == (3, 6)

    async def test_curl_and_requests(self):
        curl = shutil.which("curl")
        needed(curl, "curl is missing")
        async with serving() as server:
            url = server.http_url + PREDICT
            assert await asyncio.to_thread(posted, url, ROWS) == (200, {"predictions": DOUBLED})
            words = [curl, "-s", "-d", json.dumps(ROWS), url]
            run = await asyncio.to_thread(
                subprocess.run, words, capture_output=True, check=True, timeout=WAIT_S
            )
            assert json.loads(run.stdout) == {"predictions": DOUBLED}

    async def test_in_an_application(self):
        async with asynctrt.open(double_model()) as engine:
            repository = Repository()
            repository.add("double", engine)
            async with running(kserve_app(repository)) as where:
                assert await asyncio.to_thread(posted, f"http://{where}{PREDICT}", ROWS) == (
                    200,
                    {"predictions": DOUBLED},
                )
                status, said = await asyncio.to_thread(posted, f"http://{where}{PREDICT}", {"instances": 1})
                assert (status, "at least one row" in said["error"]) == (400, True)

    async def test_names_that_have_to_be_quoted(self):
        async with serving({"a/b: ü": double_model()}) as server:
            path = "/v1/models/a%2Fb%3A%20%C3%BC"
            assert (await predict(server, ROWS, f"{path}:predict"))[0] == 200
            status, _, body = await ask(server, path)
            assert (status, json.loads(body)["ready"]) == (200, True)

    async def test_large_bodies_are_decoded_in_a_thread_and_answered_alike(self):
        instances = [[float(number), 1, 2, 3] for number in range(4000)]
        assert len(json.dumps(instances)) > FAST_JSON_NBYTES
        async with serving() as server:
            status, answer = await predict(server, {"instances": instances})
            assert status == 200
            assert answer["predictions"] == (2 * np.array(instances)).tolist()
            status, answer = await predict(server, {"instances": [*instances, [1]]})
            assert (status, "ragged" in answer["error"]) == (400, True)

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"", "not valid JSON"),
            (b"[1]", "must be a JSON object, not list"),
            (b'{"instances":[[1,NaN]]}', "no NaN"),
            (b'{"instances":' + b"[" * 5000 + b"]" * 5000 + b"}", "not valid JSON"),
            (b'{"instances":' + b"[" * 900 + b"]" * 900 + b"}", "more than 32 deep"),
            (b'{"instances":["a"]}', "given (1,)"),
            (b'{"instances":[["a",1,2,3]]}', "must be numbers, not 'a'"),
            (b'{"instances":[[1,2,3,4],[1]]}', "ragged"),
            (b'{"instances":[{"inptu":[1,2,3,4]}]}', "unknown input 'inptu'; the model's inputs: input"),
            (b'{"instance":[[1,2,3,4]]}', "neither"),
        ],
    )
    async def test_what_is_wrong_is_said(self, body, says):
        async with serving() as server, connected(server) as raw:
            raw.send(request(PREDICT, body, method="POST"))
            status, _, answer = await raw.answer()
            assert (status, says in json.loads(answer)["error"]) == (400, True), answer
            raw.send(request(PREDICT, json.dumps(ROWS).encode()))
            assert (await raw.answer())[0] == 200

    async def test_raw_tensors_are_not_taken(self):
        async with serving() as server:
            for length in ("0", "3", "x"):
                status, answer = await predict(server, ROWS, Inference_Header_Content_Length=length)
                assert (status, "leave out Inference-Header-Content-Length" in answer["error"]) == (400, True)

    async def test_what_is_sent_to_another_path_is_told_which(self):
        async with serving() as server:
            for path, named in (
                ("/v2/models/double/infer", "/v1/models/NAME:predict"),
                ("/v2/models/double", "/v2/models/NAME/infer"),
                ("/v1/models/double", "/v1/models/NAME:predict"),
            ):
                status, answer = await predict(server, ROWS, path)
                assert status in (400, 405)
                assert named in answer["error"]

    async def test_a_huge_list_is_refused_by_its_size(self):
        async with serving() as server:
            status, answer = await predict(server, b'{"instances":[' + b"[1,2,3,4]," * 20_000 + b"[1]]}")
            assert (status, "lists and objects" in answer["error"]) == (413, True)

    async def test_methods_names_and_tokens(self):
        async with serving(tokens=("s3cret",)) as server:
            assert (await predict(server, ROWS))[0] == 401
            token = {"Authorization": "Bearer s3cret"}
            assert (await predict(server, ROWS, **token))[0] == 200
            status, headers, _ = await ask(server, PREDICT, **token)
            assert (status, headers["allow"]) == (405, "POST")
            status, headers, _ = await ask(server, "/v1/models/double", b"{}", **token)
            assert (status, headers["allow"]) == (405, "GET")
            status, answer = await predict(server, ROWS, "/v1/models/none:predict", **token)
            assert (status, "known models: 'double'" in answer["error"]) == (404, True)

    async def test_models_with_several_tensors(self):
        def work(inputs):
            return {"n": inputs["a"].sum(-1), "words": np.array([b"%g" % b for b in inputs["b"]], "S8")}

        inputs = [TensorSpec("a", "int64", ("length",)), TensorSpec("b", "float32")]
        outputs = [TensorSpec("n", "int64"), TensorSpec("words", "S8")]
        async with serving({"several": FunctionModel(work, inputs=inputs, outputs=outputs)}) as server:
            path = "/v1/models/several:predict"
            instances = [{"a": [1, 2], "b": 0.5}, {"a": [3, 4], "b": 2}]
            assert await predict(server, {"instances": instances}, path) == (
                200,
                {"predictions": [{"n": 3, "words": "0.5"}, {"n": 7, "words": "2"}]},
            )
            assert await predict(server, {"inputs": {"a": [[1], [2]], "b": [1, 2]}}, path) == (
                200,
                {"outputs": {"n": [1, 2], "words": ["1", "2"]}},
            )


class TestStatus:
    async def test_of_models_and_versions(self):
        models = {("double", "1"): double_model(), ("double", "3"): double_model(), "two": double_model()}
        async with serving(models) as server:
            status, _, body = await ask(server, "/v1/models")
            assert (status, json.loads(body)) == (200, {"models": ["double", "two"]})
            status, _, body = await ask(server, "/v1/models/double")
            found = json.loads(body)
            assert (status, found["name"], found["ready"]) == (200, "double", True)
            assert [(item["version"], item["state"]) for item in found["model_version_status"]] == [
                ("1", "AVAILABLE"),
                ("3", "AVAILABLE"),
            ]
            assert found["model_version_status"][0]["status"] == {"error_code": "OK", "error_message": ""}
            status, _, body = await ask(server, "/v1/models/double/versions/3")
            assert [item["version"] for item in json.loads(body)["model_version_status"]] == ["3"]
            for path in ("none", "double/versions/2"):
                assert (await ask(server, f"/v1/models/{path}"))[0] == 404

    async def test_of_a_model_that_cannot_be_loaded(self):
        async def opener():
            raise ModelError("graph.onnx: it has no inputs")

        async with serving() as server:
            server.repository.add("broken", opener=opener)
            with pytest.raises(ModelError):
                await server.repository.load("broken")
            status, _, body = await ask(server, "/v1/models/broken")
            (version,) = json.loads(body)["model_version_status"]
            assert (status, json.loads(body)["ready"], version["state"]) == (503, False, "END")
            assert version["status"]["error_message"] == "graph.onnx: it has no inputs"
            assert (await predict(server, ROWS, "/v1/models/broken:predict"))[0] == 503
