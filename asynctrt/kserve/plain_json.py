"""Read and write plain JSON: the values of tensors, without their datatypes and shapes.

Clients of TensorFlow Serving and KServe V1 send it. ``{"instances": [...]}`` is a list of rows, answered with
``{"predictions": [...]}``; ``{"inputs": ...}`` holds whole tensors, answered with ``{"outputs": ...}``. If a
model has one input, its values may stand alone; several are an object that names them. Answers do the same
with outputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from asynctrt.errors import InputError, RequestError, UnsupportedError
from asynctrt.kserve.datatypes import DIMS_MAX, brief, to_json
from asynctrt.tensors import Array, TensorSpec

ROWS: Final = "instances"
WHOLE: Final = "inputs"
ANSWERS: Final = {ROWS: "predictions", WHOLE: "outputs"}
"""The name of the outputs in the answer to each form of request."""

SIGNATURE: Final = "serving_default"
"""The only signature that a model has: TensorFlow Serving's clients may name it."""

ROWS_EXAMPLE: Final = '{"instances": [row, ...]}'


def read_form(content: Mapping[str, Any]) -> str:
    """Return the form of a request: ``instances`` or ``inputs``."""
    signature = content.get("signature_name")
    if signature not in (None, "", SIGNATURE):
        raise UnsupportedError(
            f"models have only the signature {SIGNATURE!r}, not {brief(signature)}: leave out signature_name"
        )
    given = [form for form in ANSWERS if form in content]
    if len(given) == 1:
        return given[0]
    if given:
        raise RequestError('the request has both "instances" and "inputs": send one of them')
    raise RequestError(
        f'the request has neither "instances" nor "inputs", but {brief(list(content))}: send rows as '
        f'{ROWS_EXAMPLE}, or whole tensors as {{"inputs": {{name: values, ...}}}}'
    )


def read_values(form: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return the value of each input in a request by name; for ``instances``, a list with a value a row."""
    if form == WHOLE:
        return _whole(given, names)
    if not isinstance(given, list) or not given:
        raise RequestError(f'"instances" must be a list of at least one row, not {brief(given)}')
    if not isinstance(given[0], dict):
        if len(names) != 1:
            raise RequestError(_naming("each instance", given[0], names))
        return {names[0]: given}
    first = given[0].keys()
    for number, instance in enumerate(given):
        if not isinstance(instance, dict) or instance.keys() != first:
            raise RequestError(
                f"instance {number} must be an object with the same inputs as instance 0, "
                f"{brief(list(first))}, not {brief(instance)}"
            )
    return {name: [instance[name] for instance in given] for name in first}


def _whole(given: Any, names: Sequence[str]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    if isinstance(given, list) and given and isinstance(given[0], dict):
        raise RequestError(
            '"inputs" is a list of objects, as in KServe V2, which is at /v2/models/NAME/infer. Here it is '
            'an object, {"inputs": {name: values, ...}}'
        )
    if len(names) != 1:
        raise RequestError(_naming('"inputs"', given, names))
    return {names[0]: given}


def _naming(what: str, given: Any, names: Sequence[str]) -> str:
    return (
        f"the model has {len(names)} inputs, so {what} must be an object that names them "
        f"({', '.join(names)}), not {brief(given)}"
    )


def nested_shape(name: str, data: Any) -> list[int]:
    """Return the shape of nested lists, as their first elements have it; ``[]`` for a single value."""
    shape: list[int] = []
    while isinstance(data, list):
        if len(shape) == DIMS_MAX:
            raise InputError(f"input {name!r} nests lists more than {DIMS_MAX} deep")
        shape.append(len(data))
        data = data[0] if data else None
    return shape


def check_rows(rows: int, specs: Sequence[TensorSpec]) -> None:
    """Check that a request in rows can say what it means."""
    whole = [spec.name for spec in specs if spec.axis is None]
    if rows > 1 and whole:
        raise RequestError(
            f"{whole[0]!r} has no rows, so {rows} instances cannot have one each: send one instance, or "
            'whole tensors as "inputs"'
        )


def plain_values(answer: str, specs: Sequence[TensorSpec], arrays: Sequence[Array], rows: int) -> Any:
    """Return outputs as JSON can hold them: one alone, several by name.

    :param answer: ``predictions``, which has a value for each row, or ``outputs``.
    :param rows: the rows of the request.
    """
    if answer != ANSWERS[ROWS]:
        whole = {spec.name: to_json(array, is_nested=True) for spec, array in zip(specs, arrays, strict=True)}
        return whole if len(whole) > 1 else next(iter(whole.values()))
    columns = []
    for spec, array in zip(specs, arrays, strict=True):
        values = to_json(spec.rows_first(array), is_nested=True)
        if len(values) != rows:
            raise RequestError(
                f"output {spec.name!r} has {len(values)} rows for {rows} instances, so they do not match: "
                'send whole tensors as "inputs"'
            )
        columns.append(values)
    if len(columns) == 1:
        return columns[0]
    names = [spec.name for spec in specs]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
