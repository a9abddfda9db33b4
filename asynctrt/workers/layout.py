"""Where the arrays of a request lie in its block of shared memory: front and worker work it out alike."""

import json
import struct
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np

from asynctrt.tensors import Array, Dims, TensorSpec
from asynctrt.workers.memory import SharedMemory, align

LAUNCHED: Final = 0
"""Word at the beginning of a block: set by the worker when the batch with these rows is launched."""
SYMBOLS: Final = 1
"""Words from here on: the sizes of the dimensions that vary, in the order of :func:`symbols_of`."""

LENGTH: Final = struct.Struct("<Q")


def symbols_of(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    """Return the names of the dimensions that vary, in the order in which they first appear."""
    names = [dim for spec in specs for dim in spec.dims if isinstance(dim, str)]
    return tuple(dict.fromkeys(names))


class Layout:
    """The arrays of rows of one shape.

    :param symbols: the sizes of the dimensions that vary.
    """

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], symbols: Mapping[str, int]
    ) -> None:
        self.symbols = tuple(symbols[name] for name in symbols_of(inputs))
        self._first = align(8 * (SYMBOLS + len(self.symbols)))
        self._inputs = [(spec.name, spec.dtype, _dims(spec, symbols)) for spec in inputs]
        known = [(spec.name, spec.dtype, spec.resolve(symbols)) for spec in outputs]
        self._outputs = [(name, dtype, dims) for name, dtype, dims in known if dims is not None]
        self.has_outputs = len(self._outputs) == len(known)
        """Whether the shapes of the outputs follow from those of the inputs, so that there is room for them
        in the block."""
        if not self.has_outputs:
            self._outputs.clear()
        self._row_nbytes = [
            dtype.itemsize * int(np.prod(dims, dtype=np.int64))
            for _, dtype, dims in self._inputs + self._outputs
        ]
        # By number of rows: where each array begins, and where the block ends.
        self._offsets: dict[int, tuple[tuple[int, ...], int]] = {}

    def nbytes(self, rows: int) -> int:
        """Return the bytes of a block of so many rows."""
        return self._at(rows)[1]

    def room_for_text(self, rows: int) -> tuple[int, int]:
        """Return where the outputs lie in the block, as (offset, bytes), for an error instead of them."""
        offsets, end = self._at(rows)
        start = offsets[len(self._inputs)] if self._outputs else end
        return start, end - start

    def inputs(self, memory: SharedMemory, block: int, rows: int) -> dict[str, Array]:
        """Return the inputs that lie in a block, by name, each ``(rows, *dims)``."""
        offsets = self._at(rows)[0]
        return {
            name: np.ndarray((rows, *dims), dtype, memory.buffer, block + offset)
            for (name, dtype, dims), offset in zip(self._inputs, offsets, strict=False)
        }

    def outputs(self, memory: SharedMemory, block: int, rows: int) -> dict[str, Array]:
        """Return the outputs, likewise."""
        offsets = self._at(rows)[0][len(self._inputs) :]
        return {
            name: np.ndarray((rows, *dims), dtype, memory.buffer, block + offset)
            for (name, dtype, dims), offset in zip(self._outputs, offsets, strict=True)
        }

    def _at(self, rows: int) -> tuple[tuple[int, ...], int]:
        known = self._offsets.get(rows)
        if known is None:
            offsets, end = [], self._first
            for nbytes in self._row_nbytes:
                offsets.append(end)
                end = align(end + rows * nbytes)
            known = self._offsets[rows] = tuple(offsets), end
        return known


def _dims(spec: TensorSpec, symbols: Mapping[str, int]) -> Dims:
    dims = spec.resolve(symbols)
    assert dims is not None, spec
    return dims


class Layouts:
    """The layouts of the shapes that were seen, by the shape of a batch's key."""

    KEPT = 4096

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        self._specs = tuple(inputs), tuple(outputs)
        self._names = symbols_of(inputs)
        self._known: dict[Hashable, Layout] = {}

    def of_sizes(self, sizes: tuple[int, ...]) -> Layout:
        """Return the layout for these sizes of the dimensions that vary."""
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= self.KEPT:
                self._known.clear()
            symbols = dict(zip(self._names, sizes, strict=True))
            known = self._known[sizes] = Layout(*self._specs, symbols)
        return known

    @property
    def symbols(self) -> int:
        """How many dimensions vary."""
        return len(self._names)


class Placed:
    """Outputs whose shapes depend on the data, laid out in a block: their shapes as text, then their values.

    :param outputs: arrays by name.
    """

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        self._arrays = list(outputs.values())
        text = json.dumps([(name, array.shape) for name, array in outputs.items()]).encode()
        self._head = LENGTH.pack(len(text)) + text
        self._offsets = []
        end = align(len(self._head))
        for array in self._arrays:
            self._offsets.append(end)
            end = align(end + array.nbytes)
        self.nbytes = end

    def write(self, memory: SharedMemory, block: int) -> None:
        """Write them into a block of at least :attr:`nbytes`."""
        memory.buffer[block : block + len(self._head)] = self._head
        for array, offset in zip(self._arrays, self._offsets, strict=True):
            np.copyto(np.ndarray(array.shape, array.dtype, memory.buffer, block + offset), array)

    @staticmethod
    def read(memory: SharedMemory, block: int, specs: Sequence[TensorSpec]) -> dict[str, Array]:
        """Return the outputs that lie in a block, by name."""
        (length,) = LENGTH.unpack_from(memory.buffer, block)
        first = block + LENGTH.size
        shapes = json.loads(memory.buffer[first : first + length])
        end = align(LENGTH.size + length)
        found = {}
        for spec, (name, shape) in zip(specs, shapes, strict=True):
            found[name] = np.ndarray(shape, spec.dtype, memory.buffer, block + end)
            end = align(end + found[name].nbytes)
        return found
