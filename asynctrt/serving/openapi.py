"""Describe the server as OpenAPI 3.1, from its models' inputs and outputs; serve the page that tries it."""

import json
from collections.abc import Collection, Iterable, Sequence
from math import prod
from typing import Any, Final
from urllib.parse import quote
from weakref import ref

import numpy as np

import asynctrt
from asynctrt.kserve.datatypes import TEXT, datatype_of
from asynctrt.kserve.json_codec import dump
from asynctrt.kserve.plain_json import ANSWERS, ROWS, WHOLE
from asynctrt.serving.api import Answer, Api, Headers, Page
from asynctrt.serving.dashboard import static_page
from asynctrt.serving.served import ServedModel
from asynctrt.serving.warmup import filled
from asynctrt.tensors import TensorSpec

EXAMPLE_SIZE_MAX: Final = 16
"""Elements of an input that a line of a terminal can show."""

JSON: Final = "application/json"
OCTETS: Final = "application/octet-stream"

FILES: Final = {
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/dashboard/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
}

Schema = dict[str, Any]


def docs_pages(api: Api) -> dict[str, Page]:
    """Return the pages by path: the document, which needs the server's token, and the page that shows it."""
    pages = {path: static_page(*file) for path, file in FILES.items()}
    known: object = None
    body = b""

    def respond(_: Headers) -> Answer:
        nonlocal known, body
        now = _content(api)
        if now != known:
            known, body = now, dump(document(api))
        headers = (
            ("Content-Type", JSON),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        )
        return Answer(200, headers, (body,))

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
    arrays = [filled(spec, shape) for spec, shape in zip(specs, shapes, strict=True)]
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


def _values(array: Any) -> Any:
    return np.char.decode(array).tolist() if array.dtype.kind == "S" else array.tolist()


def _whole(served: ServedModel) -> list[str]:
    """Return the names of a model's tensors without rows: several rows of plain JSON cannot have those."""
    return [spec.name for spec in (*served.engine.inputs, *served.engine.outputs) if spec.axis is None]


# ---- the document


def _content(api: Api) -> object:
    """Return what the document depends on, without keeping a model that was unloaded."""
    models = [(ref(served), api.repository.find(served.name) is served) for served in api.repository]
    return models, api.has_tokens, "/metrics" in api.pages


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
        "components": {"schemas": SCHEMAS},
    }
    if api.has_tokens:
        found["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
    return found


def _object(required: Iterable[str] = (), **properties: Schema) -> Schema:
    return _record(required, properties)


def _record(required: Iterable[str], properties: Schema, *, is_closed: bool = False) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "required": list(required)}
    return found | {"additionalProperties": False} if is_closed else found


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema, **limits: int) -> Schema:
    return {"type": "array", "items": items, **limits}


STRING: Final[Schema] = {"type": "string"}
SIZE: Final[Schema] = {"type": "integer", "minimum": 0}
TENSOR: Final = _object(
    ("name", "datatype", "shape"),
    name=STRING,
    datatype=STRING,
    shape=_list({"type": "integer", "minimum": -1}),
)
STATUS: Final = _object(
    ("version", "state", "status"),
    version=STRING,
    state=STRING,
    status=_object(("error_code", "error_message"), error_code=STRING, error_message=STRING),
)
SCHEMAS: Final[Schema] = {
    "Error": _object(("error",), error=STRING),
    "Ready": _object(("name", "ready"), name=STRING, ready={"type": "boolean"}),
    "ServerMetadata": _object(
        ("name", "version", "extensions"), name=STRING, version=STRING, extensions=_list(STRING)
    ),
    "ModelMetadata": _object(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=STRING,
        versions=_list(STRING),
        platform=STRING,
        inputs=_list(TENSOR),
        outputs=_list(TENSOR),
    ),
    "ModelStatus": _object(
        ("name", "ready", "model_version_status"),
        name=STRING,
        ready={"type": "boolean"},
        model_version_status=_list(STATUS),
    ),
    "ModelConfig": _object(("name", "max_batch_size", "input", "output")),
    "ModelStatistics": _object(("model_stats",), model_stats=_list({"type": "object"})),
    "RepositoryIndex": _list(_object(("name", "version", "state", "reason"))),
    "Scheduling": _object(
        priority=SIZE | {"description": "1 is the most urgent; 0 is the model's default."},
        timeout=SIZE | {"description": "Microseconds that it may wait in the queue; 0 is the default."},
    ),
    "InferResponse": _object(
        ("model_name", "model_version", "outputs"),
        id=STRING,
        model_name=STRING,
        model_version=STRING,
        outputs=_list(
            _object(
                ("name", "datatype", "shape"),
                name=STRING,
                datatype=STRING,
                shape=_list(SIZE),
                data={"type": "array"},
                parameters={"type": "object"},
            )
        ),
    ),
}
"""What all models have in common."""


def _operation(tag: str, summary: str, answer: Schema | None, *, media: str = JSON, **more: Any) -> Schema:
    good: Schema = {"description": "Success"}
    if answer is not None:
        good["content"] = {media: {"schema": answer}}
    error = {"description": "What is wrong, and the fix", "content": {JSON: {"schema": _ref("Error")}}}
    return {"tags": [tag], "summary": summary, **more, "responses": {"200": good, "default": error}}


def _server_paths(*, has_metrics: bool) -> Schema:
    def get(summary: str, answer: Schema | None, **more: Any) -> Schema:
        return {"get": _operation("server", summary, answer, **more)}

    unready: Schema = {"503": {"description": "Not now"}}
    health: Schema = get("Whether all models are ready", None)
    health["get"]["responses"] |= unready
    live: Schema = get("Whether the server is alive", None)
    live["get"]["responses"] |= unready
    ready = _object(ready={"type": "boolean", "description": "List only models that are ready."})
    body = {"content": {JSON: {"schema": ready}}}
    index = _operation("server", "List the models", _ref("RepositoryIndex"), requestBody=body)
    paths = {
        "/v2": get("Name, version and extensions", _ref("ServerMetadata")),
        "/v2/health/live": live,
        "/v2/health/ready": health,
        "/v2/models/stats": get("Statistics of all models", _ref("ModelStatistics")),
        "/v2/repository/index": {"post": index},
        "/v1/models": get("Names of the models", _object(("models",), models=_list(STRING))),
    }
    if has_metrics:
        paths["/metrics"] = get("Metrics for Prometheus", STRING, media="text/plain")
    return paths


def _model_paths(served: ServedModel, *, is_newest: bool) -> Schema:
    name = quote(served.name, safe="")
    tag = served.name if is_newest else f"{served.name}, version {served.version}"
    of = name if is_newest else f"{name}/versions/{served.version}"

    def get(summary: str, answer: Schema, **more: Any) -> Schema:
        return {"get": _operation(tag, summary, answer, **more)}

    status = get("Status, in the form of TensorFlow Serving and KServe V1", _ref("ModelStatus"))
    status["get"]["responses"]["503"] = {
        "description": "Not ready",
        "content": {JSON: {"schema": _ref("ModelStatus")}},
    }
    return {
        f"/v1/models/{of}:predict": {"post": _predict(served, tag)},
        f"/v1/models/{of}": status,
        f"/v2/models/{of}/infer": {"post": _infer(served, tag)},
        f"/v2/models/{of}": get("Inputs and outputs", _ref("ModelMetadata")),
        f"/v2/models/{of}/config": get("Configuration, in Triton's form", _ref("ModelConfig")),
        f"/v2/models/{of}/stats": get("Statistics", _ref("ModelStatistics")),
        f"/v2/models/{of}/ready": get("Whether it is ready", _ref("Ready")),
    }


def _predict(served: ServedModel, tag: str) -> Schema:
    """Return the operation of an inference in plain JSON."""
    engine = served.engine
    limits: Schema = {"minItems": 1, "maxItems": 1 if _whole(served) else engine.options.max_queue_rows}
    body: Schema = {
        "oneOf": [
            _form(ROWS, _rows(engine.inputs, engine.options.filled, limits)),
            _form(WHOLE, _tensors(engine.inputs, engine.options.filled)),
        ]
    }
    rows = _list(_answer([spec.dims for spec in engine.outputs], engine.outputs))
    whole = _answer([spec.shape("rows") for spec in engine.outputs], engine.outputs)
    answers = [(ANSWERS[ROWS], rows), (ANSWERS[WHOLE], whole)]
    answer: Schema = {"anyOf": [_record((name,), {name: values}) for name, values in answers]}
    described = "\n".join(
        [f"Input {spec}" for spec in engine.inputs] + [f"Output {spec}" for spec in engine.outputs]
    )
    return _operation(
        tag,
        "Run the model on plain JSON",
        answer,
        description=described,
        requestBody={"required": True, "content": {JSON: _media(body, example(served))}},
    )


def _media(schema: Schema, shown: Any) -> Schema:
    return {"schema": schema} if shown is None else {"schema": schema, "example": shown}


def _form(form: str, values: Schema) -> Schema:
    return _record((form,), {form: values, "parameters": _ref("Scheduling")})


def _rows(specs: Sequence[TensorSpec], filled: Collection[str], limits: Schema) -> Schema:
    """Return the schema of instances: objects that name inputs, or the values of the only input."""
    named = _list(_named(specs, [spec.dims for spec in specs], filled), **limits)
    if len(specs) > 1:
        return named
    return {"anyOf": [_list(_nested(specs[0], specs[0].dims), **limits), named]}


def _tensors(specs: Sequence[TensorSpec], filled: Collection[str]) -> Schema:
    """Return the schema of whole inputs."""
    named = _named(specs, [spec.shape("rows") for spec in specs], filled)
    return {"anyOf": [_nested(specs[0], specs[0].shape("rows")), named]} if len(specs) == 1 else named


def _named(
    specs: Sequence[TensorSpec], shapes: Sequence[Sequence[int | str]], filled: Collection[str]
) -> Schema:
    required = [spec.name for spec in specs if spec.name not in filled]
    values = {spec.name: _nested(spec, shape) for spec, shape in zip(specs, shapes, strict=True)}
    return _record(required, values, is_closed=True)


def _answer(shapes: Sequence[Sequence[int | str]], specs: Sequence[TensorSpec]) -> Schema:
    values = {
        spec.name: _nested(spec, shape, is_output=True) for spec, shape in zip(specs, shapes, strict=True)
    }
    return next(iter(values.values())) if len(values) == 1 else _record(values, values)


def _nested(spec: TensorSpec, shape: Sequence[int | str], *, is_output: bool = False) -> Schema:
    """Return the schema of nested lists of that shape, in which names are open sizes."""
    found = _element(spec)
    if is_output and found["type"] == "number":
        found = {"type": ["number", "null"]}
    for size in reversed(shape):
        limits = {} if isinstance(size, str) else {"minItems": size, "maxItems": size}
        found = _list(found, **limits)
    return found


def _element(spec: TensorSpec) -> Schema:
    kind = spec.dtype.kind
    if kind in TEXT:
        return {"type": "string"} if kind == "O" else {"type": "string", "maxLength": spec.dtype.itemsize}
    if kind == "b":
        return {"type": "boolean"}
    if kind in "iu":
        integers = np.iinfo(spec.dtype)
        return {"type": "integer", "minimum": int(integers.min), "maximum": int(integers.max)}
    if spec.dtype.name in ("float16", "float32"):
        largest = float(np.finfo(spec.dtype).max)
        return {"type": "number", "minimum": -largest, "maximum": largest}
    return {"type": "number"}


def _infer(served: ServedModel, tag: str) -> Schema:
    """Return the operation of an inference by KServe V2."""
    inputs = [
        _object(
            ("name", "datatype", "shape", "data"),
            name={"const": spec.name},
            datatype={"const": datatype_of(spec)},
            shape=_list(SIZE),
            data={"type": "array"},
        )
        for spec in served.engine.inputs
    ]
    wanted = _object(("name",), name={"enum": [spec.name for spec in served.engine.outputs]})
    body = _object(
        ("inputs",),
        id=STRING,
        parameters=_ref("Scheduling"),
        inputs=_list({"anyOf": inputs}),
        outputs=_list(wanted),
    )
    shown = _infer_example(served)
    operation = _operation(
        tag,
        "Run the model, by KServe V2",
        _ref("InferResponse"),
        requestBody={"required": True, "content": {JSON: _media(body, shown)}},
    )
    operation["responses"]["200"]["content"][OCTETS] = {}
    operation["requestBody"]["content"][OCTETS] = {}
    return operation


def _infer_example(served: ServedModel) -> dict[str, Any] | None:
    if example(served) is None:
        return None
    inputs = []
    for spec in served.engine.inputs:
        shape = [1 if isinstance(size, str) else size for size in spec.shape(1)]
        data = _values(filled(spec, shape).reshape(-1))
        inputs.append({"name": spec.name, "datatype": datatype_of(spec), "shape": shape, "data": data})
    return {"inputs": inputs}
