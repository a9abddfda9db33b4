"""What is sent and what should come back: random rows; files, also damaged and hostile ones; comparisons."""

import json
import os
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.errors import AsynctrtError, OptionsError, UsageError
from asynctrt.loadtest import samples as samples_module
from asynctrt.loadtest.samples import differs, make_samples, read_dims
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.templates import Template
from asynctrt.tensors import TensorSpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAN, INF = float("nan"), float("inf")
X = TensorSpec("x", np.float32, (3,))


def told(**changed):
    return LoadSettings(**{"samples": 4, **changed})


# ---- random rows


@pytest.mark.parametrize(
    ("dtype", "allowed"),
    [
        (np.float16, None),
        (np.float32, None),
        (np.float64, None),
        (BFLOAT16, None),
        (np.int8, {0, 1}),
        (np.int64, {0, 1}),
        (np.uint8, {0, 1}),
        (np.uint64, {0, 1}),
        (np.bool_, {False, True}),
        (np.complex64, {0, 1}),
        ("S1", {bytes([letter]) for letter in range(97, 123)}),
        ("S32", {bytes([letter]) for letter in range(97, 123)}),
        (object, {chr(letter) for letter in range(97, 123)}),
    ],
)
def test_random_values_of_every_type(dtype, allowed):
    """Floats from -1 to 1, other numbers 0 and 1, short texts."""
    spec = TensorSpec("x", dtype, (50, 2))
    made = make_samples(told(rows=3), [spec])
    values = np.concatenate([sample.inputs["x"] for sample in made])
    assert [sample.rows for sample in made] == [3] * 4
    assert values.shape == (12, 50, 2)
    assert values.dtype == spec.dtype
    if allowed is None:
        wide = values.astype(np.float64)
        assert np.isfinite(wide).all()
        assert -1 <= wide.min() < -0.9 < 0.9 < wide.max() <= 1
        assert abs(wide.mean()) < 5 * (1 / 3 / wide.size) ** 0.5
    else:
        assert set(values.ravel().tolist()) == allowed


def test_random_tensors_have_their_rows_where_the_model_has_them():
    specs = [
        TensorSpec("state", "float32", (2, "n"), axis=1),
        TensorSpec("scale", "float32", (), axis=None),
        TensorSpec("note", object, (), axis=None),
    ]
    inputs = make_samples(told(rows=3, dims="n=5"), specs)[0].inputs
    assert {name: array.shape for name, array in inputs.items()} == {
        "state": (2, 3, 5),
        "scale": (),
        "note": (),
    }
    assert inputs["note"].dtype == object


def test_the_same_seed_is_the_same_rows():
    def made(seed):
        return [sample.inputs["x"].tobytes() for sample in make_samples(told(seed=seed), [X])]

    assert made(3) == made(3) != made(4)
    assert len(set(made(3))) == 4


def test_rows_of_dynamic_dimensions():
    """Each kind has as many samples as another."""
    specs = [TensorSpec("ids", np.int64, ("length",)), TensorSpec("mask", np.bool_, ("length", 2, "heads"))]
    made = make_samples(told(samples=7, rows=2, dims=("length=5,heads=3", "length=9, heads=0")), specs)
    assert [sample.group for sample in made] == [*["length=5, heads=3"] * 3, *["length=9, heads=0"] * 3]
    assert [tuple(array.shape for array in sample.inputs.values()) for sample in made] == [
        *[((2, 5), (2, 5, 2, 3))] * 3,
        *[((2, 9), (2, 9, 2, 0))] * 3,
    ]


def test_more_kinds_than_samples_have_one_each():
    spec = TensorSpec("ids", np.int64, ("length",))
    dims = [f"length={length}" for length in range(1, 11)]
    assert len(make_samples(told(samples=3, dims=dims), [spec])) == 10


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, 64), (10, 64), (16, 64), (32, 32), (300, 3), (1024, 1)],
)
def test_samples_are_bounded_by_their_bytes(monkeypatch, rows, expected):
    """Large rows have fewer of them."""
    monkeypatch.setattr(samples_module, "NBYTES_MAX", 1 << 20)
    specs = [TensorSpec("x", np.float32, (128,)), TensorSpec("y", np.float32, (128,))]
    assert len(make_samples(told(samples=64, rows=rows), specs)) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"rows": 1025},
        {"rows": 10**15},
        {"dims": ("length=300000",)},
        {"dims": (f"length={10**30}",)},
        {"dims": ("length=150000", "length=150001")},
    ],
)
def test_a_request_that_takes_too_much_is_refused(monkeypatch, changed):
    monkeypatch.setattr(samples_module, "NBYTES_MAX", 1 << 20)
    length = "length" if "dims" in changed else 256
    with pytest.raises(OptionsError, match="set fewer rows, or smaller dims"):
        make_samples(told(**changed), [TensorSpec("x", np.float32, (length,))])


def test_nobody_knows_what_it_takes():
    with pytest.raises(OptionsError, match="set inputs to what should be sent"):
        make_samples(told(), [])


@pytest.mark.parametrize(
    ("dims", "says"),
    [
        ((), r"missing: \['heads', 'length'\], unknown: \[\]. Set dims heads=...,length=..."),
        (("length=3",), r"missing: \['heads'\]"),
        (("length=3,heads=1,width=2",), r"unknown: \['width'\]"),
        (("length=3,heads=1", "length=4"), r"missing: \['heads'\]"),
    ],
)
def test_dimensions_that_are_not_the_models(dims, says):
    with pytest.raises(OptionsError, match=says):
        make_samples(told(dims=dims), [TensorSpec("x", np.float32, ("length", "heads"))])


def test_a_model_without_dynamic_dimensions_takes_none():
    with pytest.raises(OptionsError, match=r"unknown: \['length'\]"):
        make_samples(told(dims="length=3"), [X])


@pytest.mark.parametrize(
    ("texts", "kinds"),
    [
        ((), [{}]),
        (("length=128",), [{"length": 128}]),
        (("length=128,heads=4",), [{"length": 128, "heads": 4}]),
        ((" length = 128 , heads = 0 ",), [{"length": 128, "heads": 0}]),
        (("a=1", "a=2", "a=2"), [{"a": 1}, {"a": 2}, {"a": 2}]),
        (("a/b:0=1",), [{"a/b:0": 1}]),  # Names are the model's own.
    ],
)
def test_dimensions(texts, kinds):
    assert read_dims(texts) == kinds


@pytest.mark.parametrize(
    "text",
    [
        "length",
        "length=",
        "=3",
        "length=-1",
        "length=1.5",
        "length=x",
        "length=3@2",
    ],
)
def test_what_is_no_dimension(text):
    with pytest.raises(OptionsError, match="is not a list of dimensions") as caught:
        read_dims([text])
    assert repr(text) in str(caught.value)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab=,@.0123-e \x00"), max_size=12))
def test_any_text_is_dimensions_or_refused(text):
    try:
        (dims,) = read_dims([text])
    except OptionsError:
        return
    assert all(name and size >= 0 for name, size in dims.items())


# ---- files of NumPy

ROWS = np.arange(30, dtype=np.float32).reshape(10, 3)


def saved(tmp_path, *, name="rows.npz", **arrays):
    path = tmp_path / name
    np.savez(path, **arrays)
    return path


def test_an_npz_has_an_array_for_each_input(tmp_path):
    path = saved(tmp_path, x=ROWS, mask=np.arange(10) % 2 == 0)
    made = make_samples(told(inputs=path, samples=64), [X, TensorSpec("mask", np.bool_)])
    assert [sample.rows for sample in made] == [1] * 10
    assert np.concatenate([sample.inputs["x"] for sample in made]).tolist() == ROWS.tolist()
    assert [sample.inputs["mask"].tolist() for sample in made[:3]] == [[True], [False], [True]]
    assert {(sample.expected, sample.group) for sample in made} == {(None, "")}


@pytest.mark.parametrize(
    ("rows", "samples", "starts"),
    [(1, 3, [0, 1, 2]), (3, 64, [0, 3, 6]), (4, 64, [0, 4]), (5, 1, [0]), (10, 64, [0])],
)
def test_requests_of_several_rows(tmp_path, rows, samples, starts):
    """One after the other; what is left over at the end is too little for a request."""
    path = saved(tmp_path, x=ROWS)
    made = make_samples(told(inputs=path, rows=rows, samples=samples), [X])
    assert [sample.inputs["x"].tolist() for sample in made] == [
        ROWS[start : start + rows].tolist() for start in starts
    ]
    assert all(sample.inputs["x"].flags.c_contiguous for sample in made)


def test_an_npy_is_the_only_input(tmp_path):
    np.save(tmp_path / "rows.npy", np.asfortranarray(ROWS))
    made = make_samples(told(inputs=tmp_path / "rows.npy"), [X])
    assert [sample.inputs["x"].tolist() for sample in made] == ROWS[:4, None].tolist()
    assert all(sample.inputs["x"].flags.c_contiguous for sample in made)
    with pytest.raises(UsageError, match=r"has one unnamed array, and the inputs are \['x', 'y'\]"):
        make_samples(told(inputs=tmp_path / "rows.npy"), [X, TensorSpec("y", np.float32)])


def test_bfloat16_comes_back_from_a_file(tmp_path):
    """NumPy writes its bytes and forgets its name."""
    values = np.array([[1.5], [-2.25]], BFLOAT16)
    path = saved(tmp_path, x=values)
    assert np.load(path)["x"].dtype != BFLOAT16
    made = make_samples(told(inputs=path), [TensorSpec("x", BFLOAT16, (1,))])
    assert made[0].inputs["x"].dtype == BFLOAT16
    assert [sample.inputs["x"].item() for sample in made] == [1.5, -2.25]


def test_what_should_come_back(tmp_path):
    """Row for row with the inputs."""
    inputs = saved(tmp_path, x=ROWS)
    answers = saved(tmp_path, name="answers.npz", sums=ROWS.sum(axis=1), rows=ROWS)
    made = make_samples(told(inputs=inputs, expect=answers, rows=2), [X])
    assert [sample.expected["sums"].tolist() for sample in made] == ROWS.sum(axis=1).reshape(5, 2)[
        :4
    ].tolist()
    for sample in made:
        assert (
            differs({"sums": sample.inputs["x"].sum(axis=1)}, {"sums": sample.expected["sums"]}, 0, 0) is None
        )
        assert sample.expected["rows"].tolist() == sample.inputs["x"].tolist()


BAD_ARRAYS = {
    "of another length": {"x": ROWS, "y": ROWS[:9]},
    "a number": {"x": np.float32(3)},
    "a number besides": {"x": ROWS, "y": np.float32(3)},
    "no rows": {"x": ROWS[:0]},
    "nothing": {},
}


@pytest.mark.parametrize("arrays", BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_arrays_that_are_no_rows(tmp_path, arrays):
    with pytest.raises(UsageError, match="the same number of rows|one request needs 1"):
        make_samples(told(inputs=saved(tmp_path, **arrays)), [X])


@pytest.mark.parametrize("arrays", [{"y": ROWS[:9]}, {"y": np.float32(3)}, {"y": ROWS, "z": ROWS[:1]}])
def test_answers_that_are_no_rows(tmp_path, arrays):
    with pytest.raises(UsageError, match="the same number of rows"):
        make_samples(
            told(inputs=saved(tmp_path, x=ROWS), expect=saved(tmp_path, name="answers.npz", **arrays)),
            [X],
        )


def test_fewer_rows_than_a_request_has(tmp_path):
    with pytest.raises(UsageError, match="has 10 rows, and one request needs 11"):
        make_samples(told(inputs=saved(tmp_path, x=ROWS), rows=11), [X])


def test_answers_are_an_npz(tmp_path):
    np.save(tmp_path / "answers.npy", ROWS)
    with pytest.raises(UsageError, match="must be an .npz, with an array for each output"):
        make_samples(told(inputs=saved(tmp_path, x=ROWS), expect=tmp_path / "answers.npy"), [X])


class Evil:
    """Whoever loads its pickle makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["npy", "npz", "a bare pickle"])
@pytest.mark.parametrize("place", ["inputs", "expect"])
def test_pickled_objects_are_refused_and_not_run(tmp_path, kind, place):
    trap = tmp_path / "trap"
    objects = np.array([Evil(trap)], object)
    path = tmp_path / f"evil.{kind if kind != 'a bare pickle' else 'npy'}"
    if kind == "npz":
        np.savez(path, x=objects)
    elif kind == "npy":
        np.save(path, objects)
    else:
        path.write_bytes(pickle.dumps(Evil(trap)))
    given_files = {"inputs": saved(tmp_path, x=ROWS), place: path}
    with pytest.raises(UsageError, match="evil.* cannot be read"):
        make_samples(told(**given_files), [X])
    assert not trap.exists()


def damaged(tmp_path, damage):
    """A good file, and what came of it."""
    path = saved(tmp_path, x=ROWS)
    raw = path.read_bytes()
    path.write_bytes(damage(raw))
    return path


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: b"",
        lambda raw: b"no archive at all",
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:-1],
        lambda raw: raw[10:],
        lambda raw: raw.replace(b"NUMPY", b"NUMPI"),
        lambda raw: raw.replace(b"'<f4'", b"'<q9'"),
        lambda raw: raw.replace(b"(10, 3)", b"(10, 9)"),
        lambda raw: raw[:90] + bytes(100) + raw[190:],
    ],
)
def test_damaged_files(tmp_path, damage):
    path = damaged(tmp_path, damage)
    with pytest.raises(UsageError, match="cannot be read|is damaged|the same number of rows") as caught:
        make_samples(told(inputs=path), [X])
    assert "rows.npz" in str(caught.value) or "'x'" in str(caught.value)


@settings(deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_still_rows(tmp_path_factory, data):
    """With nothing but an error of ours; a byte that does not matter may be any."""
    folder = tmp_path_factory.getbasetemp()
    raw = bytearray(saved(folder, name="good.npz", x=ROWS).read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    path = folder / "bad.npz"
    path.write_bytes(raw)
    try:
        made = make_samples(told(inputs=path), [X])
    except AsynctrtError:
        return
    assert len(made) == 4


@pytest.mark.parametrize("place", ["inputs", "expect"])
def test_files_that_are_not_there(tmp_path, place):
    given_files = {"inputs": saved(tmp_path, x=ROWS), place: tmp_path / "none.npz"}
    with pytest.raises(UsageError, match="none.npz.* cannot be read"):
        make_samples(told(**given_files), [X])


@pytest.mark.parametrize("name", ["photo.jpg", "rows", "rows.npz.gz"])
def test_other_files_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"?")
    with pytest.raises(UsageError, match="is neither .npz nor .npy, .csv nor .jsonl: make one"):
        make_samples(told(inputs=tmp_path / name), [X])


# ---- comparisons


def array(values, dtype=np.float32):
    return np.array(values, dtype)


@pytest.mark.parametrize(
    ("given_answer", "right", "says"),
    [
        (array([1, 2]), array([1, 2]), None),
        (array([1, 2.0005]), array([1, 2]), None),
        (array([1, 2.005]), array([1, 2]), "output 'y' is 2.00"),
        (array([1, 2.005]), array([1, 2]), r"at \(1,\), not 2.0"),
        (array([5e-6, 0]), array([0, 0]), None),  # Within atol, where rtol is of nothing.
        (array([5e-5, 0]), array([0, 0]), "is 4.99.*e-05"),
        (array([1.0], np.float64), array([1]), None),
        (array([1], np.int64), array([1.0]), None),
        (array([True]), array([1.0]), None),
        # NaN and infinity are right where they should be.
        (array([NAN, INF, -INF]), array([NAN, INF, -INF]), None),
        (array([1.0]), array([NAN]), "is 1.0 at .* not nan"),
        (array([NAN]), array([1.0]), "is nan at .* not 1.0"),
        (array([INF]), array([-INF]), "is inf"),
        (array([3e38]), array([INF]), "not inf"),
        # Whole numbers, flags and texts are exact.
        (array([7, 8], np.int32), array([7, 8], np.int64), None),
        (array([1_000_000], np.int64), array([1_000_001], np.int64), "is 1000000 at .* not 1000001"),
        (array([2**63], np.uint64), array([2**63 - 1], np.int64), "is 9223372036854775808"),
        (array([2**62 + 1], np.int64), array([2**62], np.int64), "is 4611686018427387905"),
        (array([1.5]), array([1], np.int64), "is 1.5 at .* not 1"),
        (array([NAN]), array([1], np.int64), "is nan"),
        (array([True, False]), array([True, True]), "is False|is 0.0"),
        (array([True], bool), array([False], bool), "is True at .* not False"),
        (array([b"cat"], "S3"), array([b"cat"], "S10"), None),
        (array([b"cat"], "S3"), array([b"cats"], "S10"), "is b'cat' at .* not b'cats'"),
        (array(["cat"], object), array(["cat"], "U3"), None),
        # Complex numbers in both of their parts.
        (array([1 + 1j], np.complex64), array([1 + 1j], np.complex64), None),
        (array([1 + 2j], np.complex64), array([1 + 1j], np.complex64), r"is \(1\+2j\)"),
        (array([1 + 2j], np.complex64), array([1.0]), r"is \(1\+2j\)"),
        # bfloat16 has 8 bits: to compare it takes a tolerance, and what is right may be of more.
        (array([1.5], BFLOAT16), array([1.5], BFLOAT16), None),
        (array([1.0], BFLOAT16), array([1.0005]), None),
        (array([1.0078125], BFLOAT16), array([1.0], BFLOAT16), "is 1.00781 at .* not 1"),
        (array([1.5]), array([1.5], BFLOAT16), None),
        (array([1.5], BFLOAT16), array([1.5], BFLOAT16).view("V2"), None),
        (array([2.5], BFLOAT16), array([1.5], BFLOAT16).view("V2"), "is 2.5 at .* not 1.5"),
        (array([65504.0], np.float16), array([65504.0]), None),
        # Shapes are what they are, but for one row without its axis.
        (array([1, 2]), array([[1, 2]]), None),
        (array([1, 3]), array([[1, 2]]), r"is 3.0 at \(1,\), not 2.0"),
        (array([1, 2]), array([[1, 2], [1, 2]]), r"has shape \(2,\), not \(2, 2\)"),
        (array([[1], [2]]), array([1, 2]), r"has shape \(2, 1\), not \(2,\)"),
        (array([]), array([]), None),
        (array([]), array([1]), r"has shape \(0,\), not \(1,\)"),
        (array(3), array(3), None),
        (array(3), array(4), r"is 3.0 at \(\), not 4.0"),
        (array([[1, 2], [3, 9]]), array([[1, 2], [3, 4]]), r"is 9.0 at \(1, 1\), not 4.0"),
    ],
)
def test_what_differs(given_answer, right, says):
    found = differs({"y": given_answer}, {"y": right}, rtol=1e-3, atol=1e-5)
    if says is None:
        assert found is None
    else:
        with pytest.raises(AssertionError, match=says):
            raise AssertionError(found)


def test_every_output_that_is_expected():
    """What is not expected may be anything; the first that differs is told."""
    one = array([1])
    assert differs({"y": one, "more": one}, {"y": one}, 0, 0) is None
    assert differs({"y": one}, {}, 0, 0) is None
    assert differs({"more": one}, {"y": one}, 0, 0) == "output 'y' is missing"
    assert differs({"y": one, "z": one}, {"y": one, "z": one + 1}, 0, 0).startswith("output 'z' is 1.0")


@settings(deadline=None)
@given(
    st.floats(-1e6, 1e6),
    st.floats(-1e6, 1e6),
    st.sampled_from([0.0, 1e-3, 0.1]),
    st.sampled_from([0.0, 1e-5, 1.0]),
)
def test_how_far_off_an_answer_may_be(value, right, rtol, atol):
    """Relative to the right one, and not to the answer."""
    is_near = abs(value - right) <= atol + rtol * abs(right)
    found = differs({"y": array([value], np.float64)}, {"y": array([right], np.float64)}, rtol, atol)
    assert (found is None) is is_near


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (
            '\ufeffid,name,price\r\n007,"Bär, Anna",1.50\r\n008,Bob,2\r\n',
            [{"id": "007", "name": "Bär, Anna", "price": "1.50"}, {"id": "008", "name": "Bob", "price": "2"}],
        ),
        (
            'a,b\r\n x ,"l1\r\nl2"\r\n\u2028,\x0b\r\n',
            [{"a": " x ", "b": "l1\r\nl2"}, {"a": "\u2028", "b": "\x0b"}],
        ),
    ],
)
def test_a_table_of_text_is_sent_as_it_is_written(tmp_path, content, rows):
    path = tmp_path / "users.csv"
    path.write_bytes(content.encode())
    made = make_samples(LoadSettings(inputs=path), ())
    assert [{name: array.item() for name, array in item.inputs.items()} for item in made] == rows


def test_a_table_of_numbers_for_a_model(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x\n1.5\n2\n")
    first, second = make_samples(LoadSettings(inputs=path), (TensorSpec("x", "float32", ()),))
    assert (first.inputs["x"].dtype, first.inputs["x"].tolist()) == (np.float32, [1.5])
    assert second.inputs["x"].tolist() == [2.0]
    path.write_text("x\nmany\n")
    with pytest.raises(UsageError, match="has a value that cannot become an array"):
        make_samples(LoadSettings(inputs=path), (TensorSpec("x", "float32", ()),))


def test_json_lines_keep_their_types(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": [1, 2], "name": "a"}\n\n{"name": "b", "x": [3, 4.5]}\n')
    with pytest.raises(UsageError, match="row 2 of .* does not have a value for each of"):
        make_samples(LoadSettings(inputs=path), ())
    path.write_text('{"x": [1, 2], "name": "a"}\n\n{"x": [3, 4.5], "name": "b"}\n')
    first, second = make_samples(LoadSettings(inputs=path), ())
    assert first.inputs["x"].tolist() == [[1, 2]]
    assert second.inputs["x"].tolist() == [[3, 4.5]]
    assert second.inputs["name"].tolist() == ["b"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", "", "has 0 rows"),
        ("a.csv", "x,y\n1\n", "row 1 of .* does not have a value for each"),
        ("a.csv", "x\n1,2\n", "row 1 of .* does not have a value for each"),
        ("a.csv", 'x\n1\n"2"3\n4\n', "line 3 is not CSV"),
        ("a.csv", 'x\n1\n"2\n3\n', "line 3 is not CSV"),
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "row 1 of"),
        ("a.csv", "x,x\n1,2\n", "two columns"),
        ("a.jsonl", "[" * 10**5, "line 1 is not JSON"),
    ],
)
def test_tables_that_are_refused(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises((UsageError, OptionsError), match=says):
        make_samples(LoadSettings(inputs=path), ())


@pytest.mark.tier2
def test_one_very_long_text(tmp_path):
    """NumPy would make every text as long as the longest: 200 TB here, more than a process can address."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": "' + "a" * (5 * 10**7) + '"}\n' + '{"x": "b"}\n' * 10**6)
    made = make_samples(LoadSettings(inputs=path), ())
    assert made[1].inputs["x"].tolist() == ["b"]


@pytest.mark.parametrize(
    "values",
    [
        [1, 2.5],
        [1.0, 2],
        [1, "a"],
        [True, 2],
        [1, 2**63],
        [1, None],
        ["a\0", "b"],
        [[1], [1, 2]],
        [[{"role": "user"}], [{"role": "user"}, {"role": "system"}]],
        ["line\u2028separator", "next\x85line"],
    ],
)
def test_no_value_of_json_lines_changes(tmp_path, values):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"v": value}, ensure_ascii=False) + "\n" for value in values))
    made = make_samples(LoadSettings(inputs=path), ())
    assert [repr(item.inputs["v"].tolist()) for item in made] == [repr([value]) for value in values]
    template = Template('{"first": "${v[0]}"}')
    shown = [template.fill(item.inputs).decode() for item in made]
    assert shown == [json.dumps({"first": value}, ensure_ascii=False) for value in values]


def test_json_lines_for_a_model(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"x": [1, 2]}\n{"x": [3, 4.5]}\n')
    made = make_samples(LoadSettings(inputs=path), (TensorSpec("x", "float32", (2,)),))
    assert [item.inputs["x"].tolist() for item in made] == [[[1.0, 2.0]], [[3.0, 4.5]]]
    path.write_text('{"x": [1]}\n{"x": [3, 4.5]}\n')
    with pytest.raises(UsageError, match="'x'"):
        make_samples(LoadSettings(inputs=path), (TensorSpec("x", "float32", (2,)),))
