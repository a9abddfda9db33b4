"""Sessions for each stream, as on a GPU, on the host device: the CPU provider on a slab's memory."""

import ctypes
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np

from asynctrt.backends.onnxruntime import ort
from asynctrt.backends.onnxruntime_streams import StreamedOnnxModel, StreamSession
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError, DeviceUnavailableError, ModelError


class HostSessions(StreamedOnnxModel):
    """A model whose sessions work on streams of the host device.

    :param is_direct: whether whoever enqueues a batch runs it, as what raises on a GPU raises there.
    """

    def __init__(self, path, options=None, *, is_direct=False, **kw):
        super().__init__(path, options or kw)
        self.is_direct = is_direct
        self.made = []

    @property
    def alive(self):
        """How many sessions ONNX Runtime has not ended."""
        return sum(made() is not None for made in self.made)

    def check_device(self, device):
        if device.name != "host":
            raise DeviceUnavailableError(
                f"{self!r} runs on the host, not on {device.name!r}: open it with device='host'"
            )

    def load_session(self, device, stream, sizes):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        session = ort.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        self.made.append(weakref.ref(session._sess))
        made = HostSession(session, stream, memory="cpu", ordinal=0, name=self.name)
        made.is_direct = self.is_direct
        return made


class HostSession(StreamSession):
    """A session of the CPU provider's."""

    def put(self, binding, stream, batch):
        if self.is_direct:
            self.run(binding, None)
        else:
            stream.launch(partial(self.run, binding, None), label=batch)


class CapturableSessions(HostSessions):
    """Sessions that can be captured, and tell what each of them ran."""

    capabilities = replace(HostSessions.capabilities, is_capturable=True)

    def __init__(self, path, **kw):
        super().__init__(path, **kw)
        self.sessions = []

    def load_session(self, device, stream, sizes):
        session = super().load_session(device, stream, sizes)
        session.runs, session.sizes = [], dict(sizes)
        put = session.put

        def noted(binding, stream, batch):
            session.runs.append("graph" if stream.is_capturing else "run")
            put(binding, stream, batch)

        session.put = noted
        self.sessions.append(session)
        return session


class SpecialisedSessions(CapturableSessions):
    """Sessions that are worth telling the sizes of shapes that recur, as kind as the real ones and no more.

    A session that was told a size refuses every other. Until then the model cannot be captured.

    :param ways: what becomes of sessions that are told sizes, one after the other: ``good``, ``refused``
        (they do not load), ``full`` (there is no memory), ``wrong`` (their answers differ), ``waits`` (they
        cannot be captured).
    :param held: waited for before each session that is told sizes is loaded.
    :param batch_s: how long each batch takes, besides.
    :param change_s: how long a session plans for a batch of another size or shape than the one before,
        besides. Sessions plan one after the other, as with cuDNN: who plans beside others waits for them.
    """

    capabilities = replace(CapturableSessions.capabilities, is_specialisable=True, changes_slowly=True)

    def __init__(self, path, *, ways=("good",), held=None, change_s=0.0, batch_s=0.0, **kw):
        super().__init__(path, **kw)
        self.capabilities = replace(self.capabilities, is_capturable=False)
        self.ways, self.held, self.change_s = cycle(ways), held, change_s
        self.batch_s = batch_s
        self.told = 0
        """How many sessions were to be told sizes."""
        self.changes = 0
        """How often sessions that were told nothing changed their size."""
        self._planning = threading.Lock()

    def load_session(self, device, stream, sizes):
        way = self._next_way() if sizes else "good"
        session = super().load_session(device, stream, sizes)
        run, put = session.run, session.put
        session.planned = None

        def planned(binding, stream, batch):
            if session.planned != batch:
                self.changes += not sizes
                with self._planning:
                    time.sleep(self.change_s)
            time.sleep(self.batch_s)
            session.planned = batch
            put(binding, stream, batch)

        def wrong(binding, options):
            run(binding, options)
            for value in binding.get_outputs():
                kind = ctypes.c_float * int(np.prod(value.shape()))
                np.ctypeslib.as_array(kind.from_address(value.data_ptr()))[...] = 1e9

        session.put = planned
        if way == "wrong":
            session.run = wrong
        if way == "waits":
            session.left_on_cpu = frozenset(spec.name for spec in self.outputs)
        return session

    def _next_way(self):
        self.told += 1
        if self.held is not None:
            self.held()
        way = next(self.ways)
        if way == "refused":
            raise ModelError("it is not loaded")
        if way == "full":
            raise DeviceMemoryError("there is no room")
        return way


class CopyingSessions(HostSessions):
    """Sessions whose inputs are copied when they are bound, as ONNX Runtime's are that the CPU reads."""

    def load_session(self, device, stream, sizes):
        session = super().load_session(device, stream, sizes)
        session.read_on_cpu = frozenset(spec.name for spec in self.inputs)
        make = session.io_binding
        session.io_binding = lambda: CopyingBinding(make())
        return session


class CopyingBinding:
    """An I/O binding that copies inputs when they are bound."""

    def __init__(self, inner):
        self._inner, self._iobinding, self._copies = inner, inner._iobinding, {}

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def bind_input(self, name, device, ordinal, dtype, shape, address):
        kind = np.ctypeslib.as_ctypes_type(dtype) * int(np.prod(shape))
        copy = self._copies[name] = np.array(kind.from_address(address))
        self._inner.bind_input(name, device, ordinal, dtype, shape, copy.ctypes.data)


class MovingSessions(HostSessions):
    """Sessions that put outputs into memory of their own, as ONNX Runtime does with those it has on the CPU.

    :param ways: how it does so in one run after the other: ``moved``, ``kept`` or ``cut`` (a row is missing).
    """

    def __init__(self, path, *, ways=("moved",), **kw):
        super().__init__(path, is_direct=True, **kw)
        self.ways = cycle(ways)

    def load_session(self, device, stream, sizes):
        session = super().load_session(device, stream, sizes)
        session.left_on_cpu = frozenset(spec.name for spec in self.outputs)
        make = session.io_binding
        session.io_binding = lambda: MovingBinding(make(), self.ways)
        return session


class MovingBinding:
    """An I/O binding whose outputs lie elsewhere than where they are bound, after a run."""

    def __init__(self, inner, ways):
        self._inner, self._iobinding, self._ways = inner, inner._iobinding, ways

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def get_outputs(self):
        way = next(self._ways)
        values = self._inner.get_outputs()
        self._values = values if way == "kept" else [MovedValue(value, way) for value in values]
        return self._values


class MovedValue:
    """An output in memory of its own; where it was bound there is nothing but ``nan``."""

    def __init__(self, value, way):
        shape = value.shape()
        bound = np.ctypeslib.as_array((ctypes.c_float * int(np.prod(shape))).from_address(value.data_ptr()))
        self._array = np.array(bound).reshape(shape)
        bound[...] = np.nan
        if way == "cut":
            self._array = self._array[:-1]

    def shape(self):
        return list(self._array.shape)

    def data_ptr(self):
        return self._array.ctypes.data


def in_place(**kw):
    """A device that computes at once, in memory of its own, as far as anyone can tell from outside."""
    return HostDevice(in_place="always", unified=False, **kw)
