"""Batches with rows that lie on the device already, or whose outputs stay there.

Each array is copied on its own, on the batch's stream and after the event of whoever writes it, straight to
or from the memory on the device: nothing of it passes through the host.
"""

from collections.abc import Sequence

from asynctrt.devices.arrays import DeviceArray
from asynctrt.devices.base import Buffer, Device, Stream
from asynctrt.errors import InputError
from asynctrt.runtime.bay import Placement, Slab
from asynctrt.scheduling.request import Request


def place(
    requests: Sequence[Request], slab: Slab, *, device: Device, stream: Stream, has_outputs: bool
) -> Placement:
    """The copies of one batch. Rows that are on the host are written into the slab at once.

    :raises InputError: if an output is to stay whose shape depends on the data.
    :raises DeviceMemoryError: when there is no room for the outputs.
    """
    memory = slab.memory.twin or slab.memory.staging
    placed = Placement([], [], [], None)
    for index, spot in enumerate(slab.layout.inputs):
        start = 0
        for request in requests:
            array, stop = request.payload[index], start + request.rows
            offset, nbytes = spot.offset + start * spot.row_nbytes, request.rows * spot.row_nbytes
            if isinstance(array, DeviceArray):
                placed.copies_in.append((memory.address + offset, array.address, nbytes))
                if array.ready is not None:
                    placed.after.append(array.ready)
            else:
                slab.inputs[index][start:stop] = array
                if slab.memory.twin is not None:
                    source = slab.memory.staging.address + offset
                    placed.copies_in.append((memory.address + offset, source, nbytes))
            start = stop
    if has_outputs:
        placed.outputs = [{} for _ in requests]
        _place_outputs(requests, slab, memory, placed, device, stream)
    return placed


def _place_outputs(
    requests: Sequence[Request],
    slab: Slab,
    memory: Buffer,
    placed: Placement,
    device: Device,
    stream: Stream,
) -> None:
    assert placed.outputs is not None
    for spot in slab.layout.outputs:
        if spot is None:
            raise InputError(
                "outputs='device' needs outputs whose shapes follow from the inputs, and one of this model "
                "depends on the data. Ask for outputs='host'"
            )
        start = 0
        for request, outputs in zip(requests, placed.outputs, strict=True):
            nbytes = request.rows * spot.row_nbytes
            buffer = device.allocate_output(nbytes, stream=stream)
            source = memory.address + spot.offset + start * spot.row_nbytes
            placed.copies_out.append((buffer.address, source, nbytes))
            shape = (request.rows, *spot.dims)
            outputs[spot.name] = DeviceArray(device, buffer.address, spot.dtype, shape, owner=buffer)
            start += request.rows
