"""Plain JSON, as clients of TensorFlow Serving and KServe V1 send it: what it means, and what is refused."""

import ml_dtypes
import numpy as np
import orjson
import pytest

from asynctrt.errors import CallerError, InputError, RequestError, TooLargeError, UnsupportedError
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.tensors import BatchRecord, InferResult, TensorSpec

ROW = TensorSpec("x", "float32", (2,))
SCALAR = TensorSpec("x", "float32")
TWO = [TensorSpec("ids", "int64", ("length",)), TensorSpec("scale", "float32")]
WORDS = TensorSpec("words", object, ())
STATE = TensorSpec("state", "float32", (2, 3), axis=1)
SHARED = TensorSpec("table", "float32", (2,), axis=None)
OUT = TensorSpec("y", "float32", (2,))


def codec(*inputs, outputs=(OUT,), **limits):
    return JsonCodec("model", "1", inputs, outputs, **limits)


def decoded(made, **content):
    return made.decode_plain(orjson.dumps(content))


def values(request):
    return {name: array.tolist() for name, array in request.inputs.items()}


def answered(made, content, **arrays):
    request = made.decode_plain(orjson.dumps(content))
    result = InferResult({name: np.asarray(array) for name, array in arrays.items()}, (BatchRecord(1, 0),), 0)
    head, tensors = made.encode(request, result)
    assert not tensors
    return orjson.loads(head)


class TestRequests:
    def test_rows_of_one_input_with_and_without_its_name(self):
        made = codec(ROW)
        for instances in ([[1, 2], [3, 4.5]], [{"x": [1, 2]}, {"x": [3, 4.5]}]):
            request = decoded(made, instances=instances)
            assert values(request) == {"x": [[1, 2], [3, 4.5]]}
            assert (request.layout.rows, request.inputs["x"].dtype) == (2, np.float32)

    def test_rows_of_several_inputs(self):
        rows = [{"ids": [1, 2], "scale": 1}, {"scale": 2, "ids": [3, 4]}]
        request = decoded(codec(*TWO), instances=rows)
        assert values(request) == {"ids": [[1, 2], [3, 4]], "scale": [1, 2]}

    def test_whole_tensors(self):
        assert values(decoded(codec(ROW), inputs=[[1, 2]])) == {"x": [[1, 2]]}
        assert values(decoded(codec(ROW), inputs={"x": [[1, 2]]})) == {"x": [[1, 2]]}
        assert values(decoded(codec(*TWO), inputs={"ids": [[1], [2]], "scale": [3, 4]})) == {
            "ids": [[1], [2]],
            "scale": [3, 4],
        }

    def test_rows_that_are_single_values_and_strings(self):
        assert values(decoded(codec(SCALAR), instances=[1, 2.5])) == {"x": [1, 2.5]}
        assert values(decoded(codec(WORDS), instances=["a", "é"])) == {"words": ["a", "é"]}

    def test_rows_on_another_axis_are_rows_all_the_same(self):
        rows = np.arange(24.0).reshape(4, 2, 3)
        request = decoded(codec(STATE), instances=rows.tolist())
        assert request.inputs["state"].shape == (2, 4, 3)
        np.testing.assert_array_equal(request.inputs["state"], rows.transpose(1, 0, 2))
        whole = decoded(codec(STATE), inputs=rows.transpose(1, 0, 2).tolist())
        np.testing.assert_array_equal(whole.inputs["state"], request.inputs["state"])

    def test_tensors_without_rows(self):
        made = codec(ROW, SHARED)
        assert values(decoded(made, inputs={"x": [[1, 2], [3, 4]], "table": [5, 6]}))["table"] == [5, 6]
        assert values(decoded(made, instances=[{"x": [1, 2], "table": [5, 6]}]))["table"] == [5, 6]
        with pytest.raises(RequestError, match=r"'table' has no rows, .* send one instance, or whole"):
            decoded(made, instances=[{"x": [1, 2], "table": [5, 6]}] * 2)

    def test_priority_timeout_and_signature(self):
        more = {"parameters": {"priority": 1, "timeout": 2_000_000}, "signature_name": "serving_default"}
        layout = decoded(codec(ROW), instances=[[1, 2]], **more).layout
        assert (layout.priority, layout.timeout) == (1, 2.0)

    def test_values_of_every_dtype(self):
        for dtype in ("bool", "int8", "uint64", "float16", "float64", ml_dtypes.bfloat16, "S4"):
            spec = TensorSpec("x", dtype)
            given = ["ab", ""] if spec.dtype.kind == "S" else [True, False] if dtype == "bool" else [1, 0]
            (array,) = decoded(codec(spec), instances=given).inputs.values()
            assert (array.dtype, array.shape) == (spec.dtype, (2,))


REFUSED = [
    (ROW, {}, RequestError, r'neither "instances" nor "inputs", but \[\]: send rows as \{"instances"'),
    (ROW, {"instance": [[1, 2]]}, RequestError, r"but \['instance'\]: send rows as"),
    (ROW, {"instances": [[1, 2]], "inputs": [[1, 2]]}, RequestError, "both .* send one of them"),
    (ROW, {"instances": []}, RequestError, "a list of at least one row, not"),
    (ROW, {"instances": {"x": [1, 2]}}, RequestError, "a list of at least one row, not"),
    (ROW, {"instances": None}, RequestError, "a list of at least one row, not None"),
    (ROW, {"instances": [[1, 2], {"x": [1, 2]}]}, InputError, "lists given are ragged"),
    (ROW, {"instances": [{"x": [1, 2]}, [1, 2]]}, RequestError, "instance 1 must be an object with the same"),
    (ROW, {"instances": [{"x": [1, 2]}, {"z": [1, 2]}]}, RequestError, r"instance 1 .* \['x'\], not"),
    (ROW, {"instances": [{"z": [1, 2]}]}, InputError, "unknown input 'z'; the model's inputs: x"),
    (ROW, {"inputs": {"z": [1, 2]}}, InputError, "unknown input 'z'; the model's inputs: x"),
    (ROW, {"instances": [[1, 2], [3]]}, InputError, r"takes shape \(rows, 2\); the lists given are ragged"),
    (ROW, {"instances": [[1, 2], 3]}, InputError, "the lists given are ragged"),
    (ROW, {"instances": [[1, 2, 3]]}, InputError, r"takes shape \(rows, 2\), given \(1, 3\)"),
    (ROW, {"instances": [1, 2]}, InputError, r"takes shape \(rows, 2\), given \(2,\)"),
    (ROW, {"inputs": 7}, InputError, r"takes shape \(rows, 2\), given \(\)"),
    (ROW, {"instances": [[[1], [2]]]}, InputError, r"takes shape \(rows, 2\), given \(1, 2, 1\)"),
    (ROW, {"instances": [["1", "2"]]}, InputError, "is float32, so its values must be numbers, not '1'"),
    (ROW, {"instances": [[1, None]]}, InputError, "must be numbers, not None"),
    (ROW, {"instances": [[1, {"b64": "AA=="}]]}, InputError, "must be numbers, not {'b64': 'AA=='}"),
    (ROW, {"instances": [[1, 1e39]]}, InputError, "outside that range"),
    (ROW, {"inputs": [{"name": "x", "data": [1, 2]}]}, RequestError, "as in KServe V2, which is at"),
    (ROW, {"instances": [[1, 2]], "signature_name": "z"}, UnsupportedError, "leave out signature_name"),
    (ROW, {"instances": [[1, 2]], "parameters": 1}, RequestError, "parameters of the request must be"),
    (ROW, {"instances": [[1, 2]], "parameters": {"timeout": 0.5}}, RequestError, "whole microseconds"),
    (TensorSpec("x", "int32"), {"instances": [1.5]}, InputError, "cannot be converted without changing"),
    (TensorSpec("x", "int32"), {"instances": [2**31]}, InputError, "outside that range"),
    (TensorSpec("x", "bool"), {"instances": [1]}, InputError, "is bool"),
    (TensorSpec("x", "bool"), {"instances": ["true"]}, InputError, "must be booleans, not 'true'"),
    (WORDS, {"instances": ["a", 1]}, InputError, "values must be strings, not 1"),
    (TensorSpec("x", "S2"), {"instances": ["abc"]}, InputError, "the model takes at most 2"),
]


class TestRefusals:
    @pytest.mark.parametrize(("spec", "content", "kind", "says"), REFUSED)
    def test_what_is_wrong_is_said_with_the_fix(self, spec, content, kind, says):
        with pytest.raises(kind, match=says) as caught:
            decoded(codec(spec), **content)
        assert len(str(caught.value)) < 500

    def test_values_alone_for_several_inputs(self):
        for content in ({"inputs": [[1]]}, {"instances": [[1]]}):
            with pytest.raises(RequestError, match=r"2 inputs, so .* must be an object .* \(ids, scale\)"):
                decoded(codec(*TWO), **content)

    def test_lists_without_end(self):
        for depth in (33, 1000):
            raw = b'{"instances":' + b"[" * depth + b"1" + b"]" * depth + b"}"
            with pytest.raises(InputError, match="nests lists more than 32 deep"):
                codec(ROW).decode_plain(raw)

    @pytest.mark.parametrize("word", [b"NaN", b"Infinity"])
    def test_no_numbers_of_json(self, word):
        with pytest.raises(RequestError, match="no NaN and no Infinity"):
            codec(ROW).decode_plain(b'{"instances":[[1,' + word + b"]]}")

    def test_more_than_is_accepted(self):
        with pytest.raises(TooLargeError, match="max_json"):
            decoded(codec(ROW, json_max=100), instances=[[1, 2]] * 50)
        with pytest.raises(CallerError, match="queue"):
            decoded(codec(ROW, rows_max=3), instances=[[1, 2]] * 4)
        with pytest.raises(TooLargeError, match="at most 8 are"):
            decoded(codec(ROW, answer_max=8), instances=[[1, 2]] * 2)
        wide = TensorSpec("y", "float32", (100,))
        with pytest.raises(TooLargeError, match="about 1600 bytes of JSON; at most 200"):
            decoded(codec(ROW, outputs=[wide], json_max=200), instances=[[1, 2]])


class TestAnswers:
    def test_rows_and_whole_tensors_of_one_output(self):
        made = codec(ROW)
        array = np.array([[1, 2], [3, np.nan]], np.float32)
        answer = [[1, 2], [3, None]]
        assert answered(made, {"instances": [[1, 2], [3, 4]]}, y=array) == {"predictions": answer}
        assert answered(made, {"inputs": [[1, 2], [3, 4]]}, y=array) == {"outputs": answer}

    def test_rows_and_whole_tensors_of_several_outputs(self):
        outputs = [OUT, TensorSpec("n", "int64"), TensorSpec("word", object)]
        made = codec(SCALAR, outputs=outputs)
        arrays = {
            "y": np.ones((2, 2), np.float32),
            "n": np.array([7, 8]),
            "word": np.array(["a", b"b"], object),
        }
        assert answered(made, {"instances": [1, 2]}, **arrays) == {
            "predictions": [{"y": [1, 1], "n": 7, "word": "a"}, {"y": [1, 1], "n": 8, "word": "b"}]
        }
        assert answered(made, {"inputs": [1, 2]}, **arrays) == {
            "outputs": {"y": [[1, 1], [1, 1]], "n": [7, 8], "word": ["a", "b"]}
        }

    def test_rows_on_another_axis(self):
        made = codec(STATE, outputs=[STATE])
        rows = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
        array = rows.transpose(1, 0, 2)
        assert answered(made, {"instances": rows.tolist()}, state=array) == {"predictions": rows.tolist()}
        assert answered(made, {"inputs": array.tolist()}, state=array) == {"outputs": array.tolist()}

    def test_an_output_without_rows_and_a_single_value(self):
        made = codec(SCALAR, outputs=[TensorSpec("y", "float32", axis=None)])
        assert answered(made, {"inputs": [1, 2]}, y=np.float32(3)) == {"outputs": 3}
        assert answered(made, {"instances": [1]}, y=np.float32(3)) == {"predictions": [3]}

    @pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", ml_dtypes.bfloat16])
    @pytest.mark.parametrize("shape", [(1,), (1, 0), (1, 2, 3)])
    def test_outputs_of_every_dtype_and_shape(self, dtype, shape):
        array = np.ones(shape, dtype)
        made = codec(SCALAR, outputs=[TensorSpec("y", dtype, shape[1:])])
        assert answered(made, {"instances": [1]}, y=array) == {"predictions": array.tolist()}
        assert answered(made, {"inputs": [1]}, y=array) == {"outputs": array.tolist()}

    def test_an_output_that_has_other_rows_is_not_told_apart(self):
        outputs = [OUT, TensorSpec("boxes", "float32", (2,))]
        made = codec(SCALAR, outputs=outputs)
        arrays = {"y": np.ones((1, 2), np.float32), "boxes": np.ones((3, 2), np.float32)}
        with pytest.raises(RequestError, match="'boxes' has 3 rows for 1 instances, .* whole tensors"):
            answered(made, {"instances": [1]}, **arrays)
        assert len(answered(made, {"inputs": [1]}, **arrays)["outputs"]["boxes"]) == 3

    def test_what_json_cannot_hold(self):
        infinite = np.full((1, 2), np.inf, np.float32)
        with pytest.raises(RequestError, match="infinities, .* binary_data, .* of KServe V2"):
            answered(codec(ROW), {"instances": [[1, 2]]}, y=infinite)
        spec = TensorSpec("y", "S2")
        with pytest.raises(RequestError, match="not UTF-8"):
            answered(codec(ROW, outputs=[spec]), {"instances": [[1, 2]]}, y=np.array([b"\xff"], "S2"))

    def test_an_object_for_each_of_many_rows_is_written_off_the_loop(self):
        made = codec(SCALAR, outputs=[OUT, TensorSpec("n", "int64")])
        result = InferResult({"y": np.ones((1, 2)), "n": np.ones(1)}, (BatchRecord(1, 0),), 0)
        few, many = (decoded(made, instances=[1] * count) for count in (100, 3000))
        assert not made.is_slow_answer(few.layout, result)
        assert made.is_slow_answer(many.layout, result)
