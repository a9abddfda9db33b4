"""Describe the server and its models as OpenAPI 3.1; serve the page that tries it."""

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, Final
from urllib.parse import quote

import numpy as np

import asynctrt
from asynctrt.kserve.datatypes import datatype_of
from asynctrt.kserve.plain_json import ROWS, WHOLE
from asynctrt.serving.api import Answer, Api, Headers, Page, json_answer
from asynctrt.serving.dashboard import FRESH, static_page
from asynctrt.serving.served import ServedModel
from asynctrt.tensors import TensorSpec

EXAMPLE_SIZE_MAX: Final = 16
"""Elements of an input that a line of a terminal can show."""

JSON: Final = "application/json"

FILES: Final = {
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/dashboard/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
}

Schema = dict[str, Any]


def docs_pages(api: Api) -> dict[str, Page]:
    """Return the pages by path: the document, which needs the server's token, and the page that shows it."""
    pages = {path: static_page(*file) for path, file in FILES.items()}

    def respond(_: Headers) -> Answer:
        return json_answer(document(api), headers=FRESH)

    return pages | {"/openapi.json": Page(respond)}


# ---- how to ask a model


def predict_path(served: ServedModel) -> str:
    """Return the path of a model for plain JSON."""
    return f"/v1/models/{quote(served.name, safe='')}/versions/{served.version}:predict"


def example(served: ServedModel) -> dict[str, Any] | None:
    """Return a request in plain JSON of zeros; ``None`` if its inputs are too many to show.

    Open dimensions have the size 1. Byte strings are text.
    """
    specs = served.engine.inputs
    shapes = [[1 if isinstance(size, str) else size for size in spec.shape(1)] for spec in specs]
    if sum(prod(shape) for shape in shapes) > EXAMPLE_SIZE_MAX:
        return None
    arrays = [_zeros(spec, shape) for spec, shape in zip(specs, shapes, strict=True)]
    if _whole(served):
        return {WHOLE: {spec.name: _values(array) for spec, array in zip(specs, arrays, strict=True)}}
    row = {spec.name: _values(spec.rows_first(array))[0] for spec, array in zip(specs, arrays, strict=True)}
    return {ROWS: [row if len(row) > 1 else next(iter(row.values()))]}


def ask_of(served: ServedModel) -> dict[str, str]:
    """Return the path and the body of a request for the dashboard, which shows them for curl.

    The body is empty if the inputs are too many to show; then the path describes them.
    """
    shown = example(served)
    if shown is None:
        return {"path": f"/v2/models/{quote(served.name, safe='')}/versions/{served.version}", "body": ""}
    return {"path": predict_path(served), "body": json.dumps(shown)}


def _zeros(spec: TensorSpec, shape: Sequence[int]) -> Any:
    """Return zeros of a tensor's dtype. Strings are empty."""
    return np.full(shape, "", object) if spec.dtype.kind == "O" else np.zeros(shape, spec.dtype)


def _values(array: Any) -> Any:
    return np.char.decode(array).tolist() if array.dtype.kind == "S" else array.tolist()


def _whole(served: ServedModel) -> list[str]:
    """Return the names of a model's tensors without rows: several rows of plain JSON cannot have those."""
    return [spec.name for spec in (*served.engine.inputs, *served.engine.outputs) if spec.axis is None]


# ---- the document


def document(api: Api) -> Schema:
    """Return the OpenAPI document of a server with the models that it has now."""
    paths = _server_paths(has_metrics="/metrics" in api.pages)
    for served in api.repository:
        paths |= _model_paths(served, is_newest=api.repository.find(served.name) is served)
    found: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "asynctrt",
            "version": asynctrt.__version__,
            "description": "Models by KServe V2, and in the plain JSON of TensorFlow Serving and KServe V1.",
        },
        "paths": paths,
    }
    if api.has_tokens:
        found["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        found["security"] = [{"token": []}]
    return found


def _record(required: Iterable[str], properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


STRING: Final[Schema] = {"type": "string"}
SIZE: Final[Schema] = {"type": "integer", "minimum": 0}
SCHEDULING: Final = _record(
    (),
    {
        "priority": SIZE | {"description": "1 is the most urgent; 0 is the model's default."},
        "timeout": SIZE | {"description": "Microseconds that it may wait in the queue; 0 is the default."},
    },
)
TENSOR: Final = _record(
    ("name", "datatype", "shape", "data"),
    {"name": STRING, "datatype": STRING, "shape": _list(SIZE), "data": {"type": "array"}},
)
PREDICT_BODY: Final = _record((), {ROWS: _list({}), WHOLE: {}, "parameters": SCHEDULING}) | {
    "oneOf": [{"required": [ROWS]}, {"required": [WHOLE]}]
}
"""A request in plain JSON, which is the same for every model."""
INFER_BODY: Final = _record(
    ("inputs",),
    {
        "id": STRING,
        "parameters": SCHEDULING,
        "inputs": _list(TENSOR),
        "outputs": _list(_record(("name",), {"name": STRING})),
    },
)
"""A request by KServe V2, which is the same for every model."""
SERVER: Final = {
    "/v2": "Name, version and extensions",
    "/v2/health/live": "Whether the server is alive",
    "/v2/health/ready": "Whether all models are ready",
    "/v2/models/stats": "Statistics of all models",
    "/v1/models": "Names of the models",
    "/metrics": "Metrics for Prometheus",
}
OF_MODELS: Final = {
    "/v1/models/{}": "Status, in the form of TensorFlow Serving and KServe V1",
    "/v2/models/{}": "Inputs and outputs",
    "/v2/models/{}/config": "Configuration, in Triton's form",
    "/v2/models/{}/stats": "Statistics",
    "/v2/models/{}/ready": "Whether it is ready",
}
"""The paths that are asked with GET."""


def _operation(tag: str, summary: str, **more: Any) -> Schema:
    error = _record(("error",), {"error": STRING})
    answers = {
        "200": {"description": "Success"},
        "default": {"description": "What is wrong, and the fix", "content": {JSON: {"schema": error}}},
    }
    return {"tags": [tag], "summary": summary, **more, "responses": answers}


def _body(schema: Schema, shown: Any) -> Schema:
    return {"required": True, "content": {JSON: {"schema": schema} | ({"example": shown} if shown else {})}}


def _server_paths(*, has_metrics: bool) -> Schema:
    found = {path: {"get": _operation("server", summary)} for path, summary in SERVER.items()}
    if not has_metrics:
        del found["/metrics"]
    ready = _record((), {"ready": {"type": "boolean", "description": "List only models that are ready."}})
    index = _operation("server", "List the models", requestBody={"content": {JSON: {"schema": ready}}})
    return found | {"/v2/repository/index": {"post": index}}


def _model_paths(served: ServedModel, *, is_newest: bool) -> Schema:
    name = quote(served.name, safe="")
    tag = served.name if is_newest else f"{served.name}, version {served.version}"
    of = name if is_newest else f"{name}/versions/{served.version}"
    return {
        f"/v1/models/{of}:predict": {"post": _predict(served, tag)},
        f"/v2/models/{of}/infer": {"post": _infer(served, tag)},
        **{path.format(of): {"get": _operation(tag, summary)} for path, summary in OF_MODELS.items()},
    }


def _predict(served: ServedModel, tag: str) -> Schema:
    """Return the operation of an inference in plain JSON."""
    body = _body(PREDICT_BODY, example(served))
    return _operation(tag, "Run the model on plain JSON", description=_described(served), requestBody=body)


def _described(served: ServedModel) -> str:
    """Return lines that name the model's inputs and outputs."""
    inputs = [f"Input {spec}" for spec in served.engine.inputs]
    return "\n".join(inputs + [f"Output {spec}" for spec in served.engine.outputs])


def _infer(served: ServedModel, tag: str) -> Schema:
    """Return the operation of an inference by KServe V2."""
    requested = _body(INFER_BODY, _infer_example(served))
    requested["content"]["application/octet-stream"] = {}
    summary = "Run the model, by KServe V2"
    return _operation(tag, summary, description=_described(served), requestBody=requested)


def _infer_example(served: ServedModel) -> dict[str, Any] | None:
    if example(served) is None:
        return None
    inputs = []
    for spec in served.engine.inputs:
        shape = [1 if isinstance(size, str) else size for size in spec.shape(1)]
        data = _values(_zeros(spec, shape).reshape(-1))
        inputs.append({"name": spec.name, "datatype": datatype_of(spec), "shape": shape, "data": data})
    return {"inputs": inputs}
