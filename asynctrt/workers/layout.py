"""The layout of a group's arrays in its block of shared memory. Front and worker compute it independently."""

import hashlib
import json
import struct
from collections.abc import Hashable, Mapping, Sequence
from typing import Final

import numpy as np

from asynctrt.core.inputs import Checked
from asynctrt.scheduling.key import SHAPES_MAX
from asynctrt.tensors import Array, Dims, TensorSpec, varying_dims
from asynctrt.workers.memory import ALIGNMENT, SharedMemory, align

LAUNCHED: Final = 0
"""The first word of a block. The worker sets it to 1 when the batch with these rows is launched, and to
:meth:`GroupLayout.stamp` once it has written an answer. Without the stamp, the block contains no answer."""
ANSWERED: Final = 1 << 63
"""A bit that is set in every stamp, and in no other value of that word."""
SYMBOLS: Final = 1
"""The first of the words with the sizes of the varying dimensions, in the order of :func:`varying_dims`."""

LARGE_ROW_NBYTES_MIN: Final = 64 << 10
"""From this size on, copying a row takes longer than using it in place."""

LARGE_ALIGNMENT: Final = 256
"""The alignment of arrays of large rows, as devices require it: models may be bound to them."""

ARRAYS_KEPT: Final = 512
"""The maximum number of blocks whose arrays are kept, by offset and number of rows. The heap
reuses the same blocks again and again, and making the arrays takes longer than copying small rows."""

LENGTH: Final = struct.Struct("<Q")


class BlockArrays:
    """The arrays of a group in its block. The mappings are shared: do not change them."""

    __slots__ = ("checked", "inputs", "layout", "memory", "outputs")

    def __init__(
        self, layout: "GroupLayout", memory: SharedMemory, inputs: dict[str, Array], outputs: dict[str, Array]
    ) -> None:
        self.layout = layout
        self.memory = memory
        self.inputs = inputs
        self.outputs = outputs
        self.checked: Checked | None = None
        """The result of a worker's input check, if that checks only the shapes."""


KnownArrays = dict[tuple[int, int], BlockArrays]
"""Arrays by block and number of rows."""


class GroupLayout:
    """The arrays of rows of one shape.

    :param symbols: the sizes of the dimensions that vary.
    :param arrays: the kept arrays, shared by all layouts of a front or a worker.
    :param places_outputs: whether outputs have the shapes in their specs, so that a block can have room for
        them.
    """

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        symbols: Mapping[str, int],
        arrays: KnownArrays,
        *,
        places_outputs: bool = True,
    ) -> None:
        self._known = arrays
        self.symbols = tuple(symbols[name] for name in varying_dims(inputs))
        self._inputs = [(spec.name, spec.dtype, _dims(spec, symbols)) for spec in inputs]
        known = [(spec.name, spec.dtype, spec.resolve(symbols)) for spec in outputs]
        self._outputs = [(name, dtype, dims) for name, dtype, dims in known if dims is not None]
        self.has_outputs = places_outputs and len(self._outputs) == len(known)
        """Whether the inputs' shapes determine the outputs' shapes, so that the block has room for them."""
        if not self.has_outputs:
            self._outputs.clear()
        self._row_nbytes = [
            dtype.itemsize * int(np.prod(dims, dtype=np.int64))
            for _, dtype, dims in self._inputs + self._outputs
        ]
        self.row_nbytes = sum(self._row_nbytes)
        """Bytes of one row over all inputs and outputs."""
        self.is_large = sum(self._row_nbytes[: len(self._inputs)]) >= LARGE_ROW_NBYTES_MIN
        """Whether batches may run on the rows in place."""
        text = repr((self._inputs, self._outputs, self.has_outputs)).encode()
        self._mark = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) | ANSWERED
        # By number of rows: the offset of each array, and the end of the block.
        self._offsets: dict[int, tuple[tuple[int, ...], int]] = {}

    def nbytes(self, rows: int) -> int:
        """Return the bytes of a block of ``rows`` rows."""
        return self._at(rows)[1]

    def stamp(self, number: int) -> int:
        """Return the stamp of a block with the answer to the group of this number in this layout."""
        return self._mark ^ number

    def room_for_text(self, rows: int) -> tuple[int, int]:
        """Return the (offset, bytes) of the outputs in the block, where an error may be written instead."""
        offsets, end = self._at(rows)
        first = offsets[len(self._inputs)] if self._outputs else end
        return first, end - first

    def arrays(self, memory: SharedMemory, block: int, rows: int) -> BlockArrays:
        """Return the inputs and outputs in a block, each ``(rows, *dims)``."""
        known = self._known.get((block, rows))
        if known is None or known.layout is not self or known.memory is not memory:
            if len(self._known) >= ARRAYS_KEPT:
                self._known.clear()
            known = self._known[block, rows] = self._over(memory, block, rows, self._at(rows)[0])
        return known

    def _over(self, memory: SharedMemory, block: int, rows: int, offsets: Sequence[int]) -> BlockArrays:
        """Make the arrays over the memory."""
        specs = [*self._inputs, *self._outputs]
        made = [
            (name, np.ndarray((rows, *dims), dtype, memory.buffer, block + offset))
            for (name, dtype, dims), offset in zip(specs, offsets, strict=True)
        ]
        count = len(self._inputs)
        return BlockArrays(self, memory, dict(made[:count]), dict(made[count:]))

    def input_offsets(self, rows: int) -> tuple[int, ...]:
        """Return the offset in the block of each input."""
        return self._at(rows)[0][: len(self._inputs)]

    def _at(self, rows: int) -> tuple[tuple[int, ...], int]:
        known = self._offsets.get(rows)
        if known is None:
            # Models may be bound to large rows in place.
            to = LARGE_ALIGNMENT if self.is_large else ALIGNMENT
            offsets, end = [], align(8 * (SYMBOLS + len(self.symbols)), to)
            for nbytes in self._row_nbytes:
                offsets.append(end)
                end = align(end + rows * nbytes, to)
            known = self._offsets[rows] = tuple(offsets), end
        return known


def _dims(spec: TensorSpec, symbols: Mapping[str, int]) -> Dims:
    dims = spec.resolve(symbols)
    assert dims is not None, spec
    return dims


class Layouts:
    """The layouts of the known shapes, by the sizes of the dimensions that vary."""

    def __init__(
        self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], *, places_outputs: bool = True
    ) -> None:
        self._specs = tuple(inputs), tuple(outputs)
        self._places_outputs = places_outputs
        self._names = varying_dims(inputs)
        self.symbols = len(self._names)
        """The number of dimensions that vary."""
        self._known: dict[Hashable, GroupLayout] = {}
        self._arrays: KnownArrays = {}

    def of_sizes(self, sizes: tuple[int, ...]) -> GroupLayout:
        """Return the layout for these sizes of the dimensions that vary."""
        known = self._known.get(sizes)
        if known is None:
            if len(self._known) >= SHAPES_MAX:
                self._known.clear()
            symbols = dict(zip(self._names, sizes, strict=True))
            known = self._known[sizes] = GroupLayout(
                *self._specs, symbols, self._arrays, places_outputs=self._places_outputs
            )
        return known

    def forget_arrays(self) -> None:
        """Drop all arrays over the memory."""
        self._arrays.clear()


class Placed:
    """Outputs whose shapes depend on the data, laid out in a block: their shapes as text, then their values.

    :param outputs: arrays by name.
    """

    def __init__(self, outputs: Mapping[str, Array]) -> None:
        self._arrays = list(outputs.values())
        shapes = [(name, array.dtype.str, array.shape) for name, array in outputs.items()]
        text = json.dumps(shapes).encode()
        self._head = LENGTH.pack(len(text)) + text
        self._offsets = []
        end = align(len(self._head))
        for array in self._arrays:
            self._offsets.append(end)
            end = align(end + array.nbytes)
        self.nbytes = end

    def write(self, memory: SharedMemory, block: int) -> None:
        """Write the outputs into a block of at least :attr:`nbytes`."""
        memory.buffer[block : block + len(self._head)] = self._head
        for array, offset in zip(self._arrays, self._offsets, strict=True):
            np.copyto(np.ndarray(array.shape, array.dtype, memory.buffer, block + offset), array)

    @staticmethod
    def read(memory: SharedMemory, block: int, nbytes: int, specs: Sequence[TensorSpec]) -> dict[str, Array]:
        """Return the outputs in a block of ``nbytes``, by name.

        :raises ValueError: if they do not match the specs or exceed the block.
        """
        (length,) = LENGTH.unpack_from(memory.buffer, block)
        first = block + LENGTH.size
        shapes = json.loads(memory.buffer[first : first + length])
        end = align(LENGTH.size + length)
        found = {}
        for spec, (name, dtype, shape) in zip(specs, shapes, strict=True):
            if (name, dtype) != (spec.name, spec.dtype.str):
                raise ValueError(f"the worker has written {name!r}, {dtype}, and not {spec}")
            found[name] = np.ndarray(shape, spec.dtype, memory.buffer, block + end)
            end = align(end + found[name].nbytes)
        if end > nbytes:
            raise ValueError(f"the worker has written {end} bytes into a block of {nbytes}")
        return found
