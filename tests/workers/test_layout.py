"""Where arrays lie in a block: both sides work it out alike, and nothing overlaps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctrt.tensors import TensorSpec
from asynctrt.workers.layout import ARRAYS_KEPT, Layouts, Placed
from asynctrt.workers.memory import SharedMemory

INPUTS = (TensorSpec("a", "float32", ("n", 3)), TensorSpec("b", "int8", ("m", "n")))
OUTPUTS = (TensorSpec("c", "bool", ("m",)), TensorSpec("d", "float64", ()))


@pytest.fixture(scope="module")
def memory():
    made = SharedMemory.create(1 << 20)
    yield made
    made.close()


@given(rows=st.integers(1, 40), n=st.integers(0, 9), m=st.integers(0, 9), block=st.integers(0, 64))
def test_arrays_have_their_shapes_and_nothing_overlaps(memory, rows, n, m, block):
    layout = Layouts(INPUTS, OUTPUTS).of_sizes((n, m))
    block *= 64
    arrays = {**layout.arrays(memory, block, rows).inputs, **layout.arrays(memory, block, rows).outputs}
    shapes = {name: array.shape for name, array in arrays.items()}
    assert shapes == {"a": (rows, n, 3), "b": (rows, m, n), "c": (rows, m), "d": (rows,)}
    begin = np.frombuffer(memory.buffer, np.uint8).__array_interface__["data"][0]
    spans = sorted(
        (array.__array_interface__["data"][0] - begin, array.nbytes)
        for array in arrays.values()
        if array.size
    )
    end = block + 8 * 3  # The words of the head: launched, n, m.
    for start, nbytes in spans:
        assert start >= end
        end = start + nbytes
    assert end <= block + layout.nbytes(rows)
    assert layout.symbols == (n, m)


def test_outputs_whose_shapes_depend_on_the_data_have_no_place():
    specs = (TensorSpec("found", "int64", ("count", 2)),)
    layout = Layouts(INPUTS, specs).of_sizes((2, 3))
    assert not layout.has_outputs
    assert layout.room_for_text(5)[1] == 0


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=4))
def test_outputs_of_any_shape_are_read_as_they_were_written(memory, counts):
    random = np.random.default_rng(1)
    outputs = {f"o{number}": random.random((count, 3)) for number, count in enumerate(counts)}
    specs = [TensorSpec(name, "float64", ("count", 3)) for name in outputs]
    placed = Placed(outputs)
    placed.write(memory, 4096)
    found = Placed.read(memory, 4096, placed.nbytes, specs)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in outputs.items()
    }
    assert placed.nbytes >= sum(array.nbytes for array in outputs.values())


class TestKeptArrays:
    """Arrays are made once for a block of so many rows, and only for the same one."""

    def test_those_of_the_same_block_are_the_same(self, memory):
        layout = Layouts(INPUTS, OUTPUTS).of_sizes((2, 3))
        assert layout.arrays(memory, 4096, 5).inputs["a"] is layout.arrays(memory, 4096, 5).inputs["a"]
        assert layout.arrays(memory, 4096, 5).outputs["d"] is layout.arrays(memory, 4096, 5).outputs["d"]

    @pytest.mark.parametrize(("block", "rows"), [(8192, 5), (4096, 6)])
    def test_others_are_not(self, memory, block, rows):
        layout = Layouts(INPUTS, OUTPUTS).of_sizes((2, 3))
        first = layout.arrays(memory, 4096, 5).inputs["a"]
        other = layout.arrays(memory, block, rows).inputs["a"]
        first[:], other[:] = 1, 2
        assert other.shape == (rows, 2, 3)
        assert np.all(other == 2)
        assert np.all(first == 1) == (block != 4096)

    def test_a_block_may_have_rows_of_another_shape_next(self, memory):
        known = Layouts(INPUTS, OUTPUTS)
        for sizes in ((2, 3), (3, 2), (2, 3)):
            assert known.of_sizes(sizes).arrays(memory, 4096, 5).inputs["a"].shape == (5, sizes[0], 3)
            assert known.of_sizes(sizes).arrays(memory, 4096, 5).outputs["c"].shape == (5, sizes[1])

    def test_those_of_another_memory_are_not_taken_for_them(self, memory):
        layout = Layouts(INPUTS, OUTPUTS).of_sizes((2, 3))
        layout.arrays(memory, 4096, 5).inputs["a"][:] = 1
        second = SharedMemory.create(1 << 16)
        layout.arrays(second, 4096, 5).inputs["a"][:] = 2
        assert np.all(layout.arrays(memory, 4096, 5).inputs["a"] == 1)
        second.close()

    def test_they_are_bounded_over_all_shapes_and_may_be_forgotten(self, memory):
        known = Layouts(INPUTS, OUTPUTS)
        for number in range(2 * ARRAYS_KEPT + 1):
            known.of_sizes((number % 3, 1)).arrays(memory, 64 * number, 1).inputs
            assert len(known._arrays) <= ARRAYS_KEPT
        assert known._arrays
        known.forget_arrays()
        assert not known._arrays
