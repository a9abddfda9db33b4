"""What the server has over HTTP, as OpenAPI 3.1 says such things; schemathesis tries all of it.

The routes are those of KServe V2. A status that is not listed here is one that must not come back.
"""

from asynctrt.kserve.datatypes import DATATYPES

JSON = "application/json"
OCTETS = "application/octet-stream"

NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
STRING = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def record(required=(), *, more=True, **properties):
    """An object with these properties; what is not there may be left out."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": more,
    }


def listed(items, **limits):
    """An array."""
    return {"type": "array", "items": items, **limits}


def exact(**properties):
    """An object with these properties and no others."""
    return record(list(properties), more=False, **properties)


def ref(name):
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


DATATYPE = {"type": "string", "enum": [*DATATYPES.values(), "BYTES"]}
DURATION = exact(count=COUNT, ns=COUNT)
DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
VALUE = {"type": ["number", "boolean", "string", "null"]}
TENSOR = exact(name=STRING, datatype=DATATYPE, shape=listed({"type": "integer", "minimum": -1}))

SCHEMAS = {
    "Error": exact(error=STRING),
    "ServerMetadata": exact(name=STRING, version=STRING, extensions=listed(STRING)),
    "ModelMetadata": exact(
        name=STRING,
        versions=listed({"type": "string", "pattern": "^[0-9]+$"}, minItems=1),
        platform=STRING,
        inputs=listed(TENSOR),
        outputs=listed(TENSOR),
    ),
    "ModelConfig": record(
        ["name", "platform", "max_batch_size", "input", "output"],
        name=STRING,
        platform=STRING,
        max_batch_size={"type": "integer", "minimum": 0},
        input=listed(record(["name", "data_type", "dims"], name=STRING, dims=listed({"type": "integer"}))),
        output=listed(record(["name", "data_type", "dims"], name=STRING, dims=listed({"type": "integer"}))),
    ),
    "ModelStatistics": exact(
        model_stats=listed(
            record(
                ["name", "version", "inference_stats", "batch_stats", "memory_usage"],
                name=STRING,
                version={"type": "string", "pattern": "^[0-9]+$"},
                inference_count=COUNT,
                execution_count=COUNT,
                inference_stats=exact(
                    **dict.fromkeys((*DURATIONS, "cache_hit", "cache_miss"), DURATION),
                ),
                batch_stats=listed(record(["batch_size"], batch_size=COUNT)),
            )
        )
    ),
    "RepositoryIndex": listed(
        exact(
            name=STRING,
            version=STRING,
            state={"type": "string", "enum": ["READY", "UNAVAILABLE"]},
            reason=STRING,
        )
    ),
    "Data": {"type": "array", "items": {"anyOf": [VALUE, listed({"anyOf": [VALUE, listed(VALUE)]})]}},
    "InferRequest": record(
        ["inputs"],
        id=STRING,
        parameters=record(priority=COUNT, timeout=COUNT, binary_data_output={"type": "boolean"}),
        inputs=listed(ref("InferInput"), minItems=1),
        outputs=listed(
            record(
                ["name"],
                name={"anyOf": [{"enum": ["out0", "out10"]}, STRING]},
                parameters=record(binary_data={"type": "boolean"}),
            )
        ),
    ),
    "PlainRequest": record(
        instances=listed({"anyOf": [listed(VALUE), record(input=ref("Data"))]}),
        inputs={"anyOf": [ref("Data"), record(input=ref("Data"), in9=ref("Data"))]},
        signature_name={"enum": ["serving_default", ""]},
        parameters=record(priority=COUNT, timeout=COUNT),
    ),
    "PlainResponse": record(predictions=listed({}), more=False, outputs={}),
    "PlainModels": exact(models=listed(STRING)),
    "ModelStatus": exact(
        name=STRING,
        ready={"type": "boolean"},
        model_version_status=listed(
            exact(
                version={"type": "string", "pattern": "^[0-9]+$"},
                state={"type": "string", "enum": ["AVAILABLE", "LOADING", "UNLOADING", "END"]},
                status=exact(error_code=STRING, error_message=STRING),
            )
        ),
    ),
    "InferInput": record(
        ["name", "shape", "datatype", "data"],
        name={"anyOf": [{"enum": ["input", "in0", "in9", "in10", "in13"]}, STRING]},
        shape=NUMBERS,
        datatype=DATATYPE,
        data=ref("Data"),
        parameters=record(binary_data_size=COUNT),
    ),
    "InferResponse": record(
        ["model_name", "model_version", "outputs"],
        more=False,
        id=STRING,
        model_name=STRING,
        model_version=STRING,
        outputs=listed(
            exact(name=STRING, datatype=DATATYPE, shape=NUMBERS, data=listed(VALUE)),
            minItems=1,
        ),
    ),
}

EXAMPLE = {
    "id": "1",
    "inputs": [{"name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1.5, 2, 3, 4]}],
}

PLAIN_EXAMPLE = {"instances": [[1.5, 2, 3, 4]]}

HEAD_LENGTH = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 0, "maximum": 100_000},
}
MODEL = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"anyOf": [{"enum": ["double", "all"]}, {"type": "string", "minLength": 1}]},
}
SPARE = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": {"anyOf": [{"enum": ["spare"]}, {"type": "string", "minLength": 1, "pattern": "^[^/]+$"}]},
}
VERSION = {
    "name": "version",
    "in": "path",
    "required": True,
    "schema": {"anyOf": [{"enum": ["1"]}, {"type": "string", "minLength": 1}]},
}


def answers(schema=None, *errors, media=JSON):
    """Responses: one that is good, and errors."""
    content = {media: {"schema": ref(schema) if isinstance(schema, str) else schema}} if schema else None
    good = {"description": "It is so."} | ({"content": content} if content else {})
    error = {"description": "Why not.", "content": {JSON: {"schema": ref("Error")}}}
    return {"200": good} | {str(status): error for status in errors}


def infer():
    """The operation of an inference."""
    responses = answers("InferResponse", 400, 404, 413, 501, 503)
    responses["200"]["content"][OCTETS] = {"schema": {"type": "string", "format": "binary"}}
    body = {
        "required": True,
        "content": {
            JSON: {"schema": ref("InferRequest"), "example": EXAMPLE},
            OCTETS: {"schema": {"type": "string", "format": "binary"}},
        },
    }
    return {"post": {"requestBody": body, "parameters": [HEAD_LENGTH], "responses": responses}}


def predict(*parameters):
    """The path of an inference in plain JSON."""
    content = {JSON: {"schema": ref("PlainRequest"), "example": PLAIN_EXAMPLE}}
    responses = answers("PlainResponse", 400, 404, 413, 501, 503)
    return {
        "post": {"requestBody": {"required": True, "content": content}, "responses": responses},
        "parameters": list(parameters),
    }


def status(*parameters):
    """The path of a model's status."""
    path = got("ModelStatus", 404, 501)
    path["get"]["responses"]["503"] = path["get"]["responses"]["200"]
    return path | {"parameters": list(parameters)}


def got(schema=None, *errors, media=JSON):
    """A path that is got."""
    return {"get": {"responses": answers(schema, *errors, media=media)}}


def posted(schema=None, *errors, body=None):
    """A path that is posted to."""
    operation = {"responses": answers(schema, *errors)}
    if body is not None:
        operation["requestBody"] = {"required": False, "content": {JSON: {"schema": body}}}
    return {"post": operation}


def of_model(prefix, *parameters):
    """The paths below a model, or below a version of one."""
    # What a path means with other names in it is another path's matter: a name may hold slashes.
    paths = {
        "": got("ModelMetadata", 404, 503),
        "/ready": got(None, 400),
        "/config": got("ModelConfig", 404, 503),
        "/stats": got("ModelStatistics", 404, 503),
        "/infer": infer(),
    }
    return {prefix + path: item | {"parameters": list(parameters)} for path, item in paths.items()}


DESCRIPTION = {
    "openapi": "3.1.0",
    "info": {"title": "asynctrt", "version": "2"},
    "paths": {
        "/v2": got("ServerMetadata"),
        "/v2/health/live": got(),
        "/v2/health/ready": got(None, 503),
        "/v2/models/stats": got("ModelStatistics"),
        "/metrics": got(STRING, media="text/plain"),
        **of_model("/v2/models/{model}", MODEL),
        **of_model("/v2/models/{model}/versions/{version}", MODEL, VERSION),
        "/v1/models": got("PlainModels"),
        "/v1/models/{model}": status(MODEL),
        "/v1/models/{model}/versions/{version}": status(MODEL, VERSION),
        "/v1/models/{model}:predict": predict(MODEL),
        "/v1/models/{model}/versions/{version}:predict": predict(MODEL, VERSION),
        "/v2/repository/index": posted("RepositoryIndex", 400, body=record(ready={"type": "boolean"})),
        "/v2/repository/models/{model}/load": posted(None, 404) | {"parameters": [SPARE]},
        "/v2/repository/models/{model}/unload": posted(None, 404) | {"parameters": [SPARE]},
    },
    "components": {"schemas": SCHEMAS},
}
