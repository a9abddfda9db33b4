"""Check that any bytes given to the binary decoder become the call that they encode, or a caller's error.

The functions `check_*` are the properties. tests/serving/test_fuzz.py tries them with Hypothesis, the rest of
this module with atheris, which looks for inputs that reach new lines. README.md has the commands.
"""

import argparse
import contextlib
import json
import math
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import orjson


def _instrumented():
    """Have atheris measure the coverage of what is imported in this context, in a process that fuzzes."""
    if __name__ != "__main__" or "--worker" not in sys.argv:
        return contextlib.nullcontext()
    import atheris

    return atheris.instrument_imports(include=["asynctrt.kserve"])


with _instrumented():
    from asynctrt.errors import CallerError, UnsupportedError
    from asynctrt.kserve.datatypes import datatype_of, read_bytes
    from asynctrt.kserve.json_codec import JsonCodec, dump
    from asynctrt.tensors import TensorSpec

DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", ml_dtypes.bfloat16, "S8"),
]
DIMS = [(), (2,), ("length",), ("length", 2)]
INPUTS = tuple(
    TensorSpec(f"in{number}", np.dtype(dtype), DIMS[number % len(DIMS)])
    for number, dtype in enumerate(DTYPES)
)
OUTPUTS = tuple(TensorSpec(spec.name.replace("in", "out"), spec.dtype, spec.dims) for spec in INPUTS)
BY_NAME = {spec.name: spec for spec in INPUTS}

RAW_INPUTS = tuple(
    TensorSpec("input", np.dtype(dtype), dims)
    for dtype, dims in [
        *(("float32", (4,)), ("float32", ("n",)), ("float64", (2, "n")), ("int64", ())),
        *(("S8", ()), ("S8", ("n",)), ("uint8", ("n", "m")), ("int16", (0,)), ("bool", (1, "n", 3))),
    ]
)

MESSAGE_CHARS_MAX = 1000
"""An error must not quote a large request at length."""

LEADING_ID = re.compile(rb'\{"id":"[^"\\]*"')


def make_codec():
    """Return a codec for a model with an input of each datatype, with fixed and with open dimensions."""
    return JsonCodec("all", "1", INPUTS, OUTPUTS)


def wire_of(array):
    """Return the raw bytes of a tensor."""
    if array.dtype.kind != "S":
        return array.tobytes()
    return b"".join(struct.pack("<I", len(item)) + item for item in array.ravel().tolist())


def good_message(request_id="good"):
    """Return a valid message for `make_codec()`, and the length of its header."""
    tensors = wire_of(np.array([b"ab", b"", b"\0b", b""], "S8")) + struct.pack("<2q", 1, -1)
    inputs = [
        {"name": "in13", "datatype": "BYTES", "shape": [2, 2], "parameters": {"binary_data_size": 20}},
        {"name": "in8", "datatype": "INT64", "shape": [2], "parameters": {"binary_data_size": 16}},
    ]
    head = json.dumps({"id": request_id, "inputs": inputs}, separators=(",", ":")).encode()
    return head + tensors, len(head)


# ---- the properties


def check_message(body, head_nbytes):
    """Check what a message is decoded to, and that it does not depend on what was decoded before."""
    used = make_codec()
    first = _outcome(used, body, head_nbytes)
    relatives = list(_relatives(body, head_nbytes)) if first[0] == "call" else []
    for message in (*relatives, (body, head_nbytes)):
        assert _outcome(used, *good_message())[0] == "call"
        assert _outcome(used, *message) == _outcome(make_codec(), *message), message
    assert _outcome(used, *good_message("other")) == _outcome(make_codec(), *good_message("other"))
    return first[0]


def check_raw(spec, body):
    """Check that a body without a header is decoded to a row of the model's only input."""
    codec = JsonCodec("raw", "1", [spec], OUTPUTS[:2])
    try:
        call = codec.decode_raw(body)
    except CallerError as error:
        check_error(error)
        return
    (array,) = call.inputs.values()
    assert array.shape[0] == 1
    assert spec.dims == tuple(
        [dim if isinstance(dim, str) else size for dim, size in zip(spec.dims, array.shape[1:], strict=True)]
    )
    assert (array.ravel().tolist() == [body]) if spec.dtype.kind == "S" else (array.tobytes() == body)


def check_bytes(raw, count):
    """Check that a BYTES tensor has exactly `count` elements, and no bytes beyond them."""
    try:
        array = read_bytes(INPUTS[-1], memoryview(raw), count)
    except CallerError as error:
        check_error(error)
        return
    assert array.shape == (count,)
    assert wire_of(array) == raw


def check_error(error):
    """Check that an error of the caller's has a 4xx status and a short message."""
    assert 400 <= error.http_status < 500 or isinstance(error, UnsupportedError)
    assert len(str(error)) < MESSAGE_CHARS_MAX, str(error)[:200]
    dump({"error": str(error)})


def check_call(call, head, tensors):
    """Compare a decoded call with its message, which is parsed once more without the codec."""
    content = orjson.loads(head)
    parameters = content.get("parameters") or {}
    assert call.id == content.get("id", "")
    assert list(call.inputs) == [item["name"] for item in content["inputs"]]
    for item in content["inputs"]:
        spec, array = BY_NAME[item["name"]], call.inputs[item["name"]]
        assert array.dtype == spec.dtype
        assert item["datatype"] == datatype_of(spec)
        assert list(array.shape) == item["shape"]
        nbytes = (item.get("parameters") or {}).get("binary_data_size")
        if nbytes is None:
            assert _are_same(array, item["data"]), (array, item["data"])
        else:
            assert wire_of(array) == tensors[:nbytes]
            tensors = tensors[nbytes:]
    assert not tensors
    default = parameters.get("binary_data_output", False)
    wanted = content.get("outputs") or [{"name": spec.name} for spec in OUTPUTS]
    assert [(spec.name, binary) for spec, binary in call.layout.outputs] == [
        (item["name"], (item.get("parameters") or {}).get("binary_data", default)) for item in wanted
    ]
    assert call.layout.priority == parameters.get("priority", 0)
    assert (call.layout.timeout or 0) == parameters.get("timeout", 0) / 1e6


def _outcome(codec, body, head_nbytes):
    """Return the decoded call or the error of a message, in a form that can be compared."""
    try:
        call = codec.decode(body, head_nbytes)
    except CallerError as error:
        check_error(error)
        return "error", type(error).__name__, str(error)
    check_call(call, body[:head_nbytes], body[head_nbytes:])
    arrays = [(name, array.shape, array.tobytes()) for name, array in call.inputs.items()]
    layout = call.layout
    return "call", call.id, arrays, layout.outputs, layout.priority, layout.timeout


def _relatives(body, head_nbytes):
    """Yield messages that a cache of headers, which leaves out their ids, may confuse with this one."""
    head, tensors = body[:head_nbytes], body[head_nbytes:]
    found = LEADING_ID.match(head)
    rests = [head[found.end() :]] if found else [b"," + head[1:], b"}" + head[1:]]
    for rest in rests:
        for start in (b"", b'{"id":"other"', b'{"id":""', b'{"id":"\\u0061"', b'{"id":7', b"{"):
            yield start + rest + tensors, len(start) + len(rest)


def _are_same(array, data):
    """Return whether an array has the values that stood in JSON, as precisely as its dtype can hold them."""
    values = data
    while any(isinstance(item, list) for item in values):
        values = [part for item in values for part in (item if isinstance(item, list) else [item])]
    given = array.ravel().tolist()
    if len(given) != len(values):
        return False
    if array.dtype.kind == "S":
        return given == [value.encode() for value in values]
    if array.dtype.kind in "biu":
        return given == values
    limits = ml_dtypes.finfo(array.dtype)
    near, tiny = float(limits.eps), float(limits.smallest_subnormal)
    return all(
        math.isclose(one, other, rel_tol=near, abs_tol=tiny) for one, other in zip(given, values, strict=True)
    )


# ---- the fuzzer


class Reader:
    """Turns the fuzzer's bytes into choices; beyond their end every choice is 0."""

    def __init__(self, data):
        self._data = data
        self._position = 0

    def take(self, count):
        """Return the next `count` bytes, or fewer at the end."""
        start, self._position = self._position, min(self._position + count, len(self._data))
        return self._data[start : self._position]

    def number(self, count=1):
        """Return the next `count` bytes as a number."""
        return int.from_bytes(self.take(count), "little")

    def pick(self, choices):
        """Return one of the choices."""
        return choices[self.number() % len(choices)]

    def rest(self):
        """Return all remaining bytes."""
        return self.take(len(self._data))


SIZES = (
    0,
    1,
    2,
    3,
    4,
    8,
    16,
    255,
    -1,
    2**31,
    2**40,
    2**62,
    2**63,
    2**64 - 1,
    2**64,
    1.0,
    None,
    "4",
    [],
    True,
)


def built_message(reader):
    """Return a message that is nearly valid: the fuzzer chooses tensors, shapes and sizes."""
    inputs = []
    for _ in range(reader.number() % 4):
        spec = INPUTS[reader.number() % len(INPUTS)]
        item = {"name": spec.name, "datatype": datatype_of(reader.pick((spec, spec, spec, *INPUTS[:3])))}
        item["shape"] = [reader.pick(SIZES) for _ in range(reader.number() % 4)]
        size = reader.pick(("right", "right", "data", "any", "both"))
        whole = [size for size in item["shape"] if type(size) is int]
        if size == "data":
            item["data"] = [reader.pick(SIZES) for _ in range(reader.number() % 8)]
        else:
            right = math.prod(whole) * spec.dtype.itemsize
            item["parameters"] = {"binary_data_size": reader.pick(SIZES) if size == "any" else right}
        if size == "both":
            item["data"] = []
        inputs.append(item)
    content = {"id": reader.pick(("", "a", "é", 7)), "inputs": inputs}
    if reader.number() % 4 == 0:
        content["parameters"] = {reader.pick(("priority", "timeout", "x")): reader.pick(SIZES)}
    head = orjson.dumps({key: value for key, value in content.items() if value != ""}, default=repr)
    return head + reader.rest(), len(head)


def test_one_input(data):
    """Give one input to the decoder; its first byte chooses the entry point. The fuzzer calls this."""
    reader = Reader(data)
    kind = reader.number() % 5
    if kind == 0:  # As on a websocket: the length comes first, and may be wrong.
        nbytes = reader.number(4)
        check_message(reader.rest(), nbytes)
    elif kind == 1:  # A length that is always right: the header ends at a NUL byte.
        head, _, tensors = reader.rest().partition(b"\0")
        check_message(head + tensors, len(head))
    elif kind == 2:
        check_raw(reader.pick(RAW_INPUTS), reader.rest())
    elif kind == 3:
        count = reader.number(2) % 300
        check_bytes(reader.rest(), count)
    else:
        try:
            message = built_message(reader)
        except TypeError:  # A number that JSON cannot hold.
            return
        check_message(*message)


def seeds():
    """Yield valid inputs for the fuzzer to start from."""
    for request_id in ("good", ""):
        body, nbytes = good_message(request_id)
        yield b"\0" + struct.pack("<I", nbytes) + body
        yield b"\1" + body[:nbytes] + b"\0" + body[nbytes:]
    for spec in INPUTS:
        array = np.ones((1, *[2 if isinstance(dim, str) else dim for dim in spec.dims])).astype(spec.dtype)
        described = {"name": spec.name, "datatype": datatype_of(spec), "shape": list(array.shape)}
        values = array.tolist() if array.dtype.kind != "S" else np.full(array.shape, "b").tolist()
        raw = wire_of(array)
        outputs = [{"name": "out1", "parameters": {"binary_data": True}}, {"name": "out2"}]
        parameters = {"priority": 1, "timeout": 1000, "binary_data_output": True}
        whole = {"inputs": [described | {"data": values}], "outputs": outputs, "parameters": parameters}
        yield b"\1" + json.dumps(whole).encode() + b"\0"
        sized = {"inputs": [described | {"parameters": {"binary_data_size": len(raw)}}], "id": "x"}
        yield b"\1" + json.dumps(sized).encode() + b"\0" + raw
    for number, spec in enumerate(RAW_INPUTS):
        yield bytes([2, number]) + (b"abc" if spec.dtype.kind == "S" else bytes(4 * spec.dtype.itemsize))
    yield b"\3\3\0" + wire_of(np.array([b"a", b"", b"\0b"], "S8"))
    for number in range(len(INPUTS)):
        yield bytes([4, 1, number, 0, 2, 1, 2, 0]) + bytes(64)


WORDS = [
    *("id", "inputs", "outputs", "parameters", "name", "datatype", "shape", "data", "binary_data_size"),
    *("binary_data", "binary_data_output", "priority", "timeout", "classification", "shared_memory_region"),
    *(datatype_of(spec) for spec in INPUTS),
    *(spec.name for spec in INPUTS + OUTPUTS),
]
NUMBERS = ["-1", "0", "18446744073709551615", "9223372036854775807", "1e308", "1099511627776", "true", "null"]


def fuzz(runs, folder, seed):
    """Run the fuzzer in its own process, print what it found, and return its exit status."""
    corpus, found = folder / "corpus", folder / "found"
    corpus.mkdir()
    found.mkdir()
    for number, raw in enumerate(seeds()):
        test_one_input(raw)
        (corpus / f"seed{number}").write_bytes(raw)
    dictionary = folder / "words"
    dictionary.write_text(
        "".join(f'"\\"{word}\\""\n' for word in WORDS) + "".join(f'"{n}"\n' for n in NUMBERS)
    )
    flags = [f"-runs={runs}", f"-seed={seed}", f"-dict={dictionary}", f"-artifact_prefix={found}/"]
    flags += ["-max_len=4096", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]
    command = [sys.executable, "-m", "tests.fuzz.decoder", "--worker", *flags, str(corpus)]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, errors="replace")
    lines = []
    for line in worker.stderr:
        lines.append(line)
        if re.match(r"#\d+\s+(INITED|pulse|NEW|DONE)", line):
            print(line, end="", flush=True)
    status = worker.wait()
    reached = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", "".join(lines))
    executed = re.findall(r"number_of_executed_units: (\d+)", "".join(lines))
    print(
        f"{executed[-1] if executed else 0} runs with seed {seed}; (edges, features, inputs): {reached[-1:]}"
    )
    for path in sorted(found.iterdir()):
        kept = Path(tempfile.gettempdir()) / f"decoder-{path.name}"
        kept.write_bytes(path.read_bytes())
        print("".join(line for line in lines if not line.startswith("#"))[-4000:])
        print(f"a finding: {path.read_bytes()!r}\nreplay it: python -m tests.fuzz.decoder --replay {kept}")
    if status and not list(found.iterdir()):
        print("".join(lines)[-4000:])
    return status


def work(flags):
    """Fuzz in this process; does not return."""
    import atheris

    atheris.Setup([sys.argv[0], *flags], test_one_input)
    atheris.Fuzz()


def main():
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay", type=Path, help="a file with a failing input")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        test_one_input(arguments.replay.read_bytes())
        print("no property is violated")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(arguments.runs, Path(folder), arguments.seed)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(sys.argv[sys.argv.index("--worker") + 1 :])
    sys.exit(main())
