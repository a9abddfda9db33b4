"""The double's ``IExecutionContext``: where it is strict.

What the real library refuses is refused as it does: ``False``, and a report to the error recorder or the
logger. What it leaves undefined, and what it would only complain of when it is too late to see who did it,
raises :class:`ViolationError` at the call.
"""

import dataclasses
import itertools
from typing import Any, Final

from asynctrt.devices.base import ALIGNMENT, aligned
from asynctrt.errors import DeviceError
from asynctrt.testing.tensorrt.monitor import Job
from asynctrt.testing.tensorrt.names import Dims, ErrorCodeTRT, IOutputAllocator
from asynctrt.testing.tensorrt.spec import COMPUTED
from asynctrt.testing.tensorrt.state import ContextState, exclusive

ENQUEUE: Final = "IExecutionContext::enqueueV3"


class IExecutionContext(ContextState):
    """Runs batches of one engine: one at a time, from one thread at a time."""

    @exclusive
    def execute_async_v3(self, stream_handle: int) -> bool:
        """Put one batch on a stream. False, and an error, where the real library or the device refuses.

        :raises ViolationError: for what would be undefined: see the package's documentation.
        """
        handle = int(stream_handle)
        self._check_stream(handle)
        if self._core.monitor.take("enqueue"):
            self._report(
                ErrorCodeTRT.FAILED_EXECUTION, ENQUEUE, "Internal Error", "the enqueue failed on demand"
            )
            return False
        if self._report_loss(ENQUEUE) or not self._can_run(handle):
            return False
        self._check_order(handle, "executes")
        self._job = self._job or self._prepared()
        job = self._with_outputs(self._job, handle)
        if job is None:
            return False
        trt = self._core.trt
        number = trt.number()
        text = f"batch {number} of {self.name}"
        job = dataclasses.replace(job, number=number, generation=self._generation, text=text)
        executor = self._core.executor
        try:
            ticket = executor.enqueue(job, handle, self._aux_streams(handle))
            self._tickets.add(ticket)
            if self._consumed_event:
                executor.record(self._consumed_event, handle)
            if self._spec.data_dependent:
                self._notify(executor.longest(job, ticket))
        except DeviceError as error:
            lost = self._core.monitor.lost
            text = lost or str(error)
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, ENQUEUE, "Cuda Runtime", text)
            return False
        return True

    def _can_run(self, handle: int) -> bool:
        """What the real library would refuse, for reasons that lie in the engine."""
        unsupported = [io for io in self._spec.inputs if io.on_host or io.dtype not in COMPUTED]
        if unsupported:
            self._report(
                ErrorCodeTRT.UNSUPPORTED_STATE,
                ENQUEUE,
                "Internal Error",
                f"the double cannot compute {unsupported[0]}",
            )
            return False
        can_be_captured = self._spec.capturable and not self._spec.data_dependent
        if not can_be_captured and self._core.executor.is_capturing(handle):
            text = "operation not permitted when stream is capturing"
            self._report(ErrorCodeTRT.UNSPECIFIED_ERROR, ENQUEUE, "Cuda Runtime", text)
            return False
        return True

    def _prepared(self) -> Job:
        """The next batch, all but its numbers. Only done anew after something has changed.

        :raises ViolationError: for shapes, addresses or enqueue memory that are missing or wrong.
        """
        missing = self._unspecified()
        if missing:
            raise self._violation(f"executes without the shapes of {', '.join(missing)}")
        if self._refused:
            raise self._violation(f"executes although {self._refused}: it would run with other shapes")
        for io in (*self._spec.inputs, *self._spec.outputs):
            if not self._addresses.get(io.name) and io.name not in self._allocators:
                raise self._violation(f"executes without an address of {io.name!r}")
        needed = self._arena_needed()
        address, size = self._arena
        if not address:
            raise self._violation("executes without enqueue memory: set_device_memory was not called")
        if size < needed:
            raise self._violation(f"executes with {size} bytes of enqueue memory, and needs {needed}")
        used = self._spec.enqueue_nbytes(self._shapes)
        self._check_memory((address, used))
        weights = self._engine._weights
        assert weights is not None
        return Job(
            number=0,
            context=self._number,
            generation=0,
            text="",
            spec=self._spec,
            shapes=tuple(self._shapes[io.name] for io in self._spec.inputs),
            inputs=tuple(self._addresses[io.name] for io in self._spec.inputs),
            outputs=tuple(self._addresses.get(io.name, 0) for io in self._spec.outputs),
            arena=address,
            arena_nbytes=used,
            arena_size=size,
            weights=weights.address,
        )

    def _check_memory(self, arena: tuple[int, int]) -> None:
        """Everything has to be the device's; outputs and enqueue memory have to be apart from the rest."""
        spans = [(*arena, "the enqueue memory", False)]
        spans.extend(
            (self._addresses[io.name], self._nbytes_of(io), repr(io.name), io.name in self._engine._inputs)
            for io in (*self._spec.inputs, *self._spec.outputs)
            if self._addresses.get(io.name)
        )
        for start, nbytes, one, _ in spans:
            problem = self._core.executor.memory_problem(start, nbytes)
            if problem is not None:
                raise self._violation(f"{one}: {problem}")
        spans.sort()
        for (start, nbytes, one, is_input), (next_start, _, other, is_other) in itertools.pairwise(spans):
            if next_start < start + nbytes and not (is_input and is_other):
                raise self._violation(f"{one} and {other} overlap in memory")

    def _with_outputs(self, job: Job, handle: int) -> Job | None:
        """Ask the output allocators for memory; ``None``, and an error, if one refuses."""
        if not self._allocators and not self._spec.data_dependent:
            return job
        outputs = list(job.outputs)
        for index, io in enumerate(self._spec.outputs):
            allocator = self._living_allocator(io.name)
            if allocator is None:
                if self._spec.data_dependent and index == len(outputs) - 1:
                    raise self._violation(
                        f"executes without an output allocator for {io.name!r}, whose shape depends on data"
                    )
                continue
            nbytes = self._nbytes_of(io)
            given = self._ask(allocator, io.name, outputs[index], aligned(nbytes), handle)
            if not given:
                text = f"Requested size was {nbytes} bytes for {io.name}."
                self._report(ErrorCodeTRT.FAILED_ALLOCATION, ENQUEUE, "OutOfMemory", text)
                return None
            if given % ALIGNMENT:
                raise self._violation(
                    f"the output allocator gave {given:#x}, which is not aligned to {ALIGNMENT}"
                )
            outputs[index] = given
            if -1 not in self._shape_of(io):
                self._tell(allocator, io.name, self._shape_of(io))
        return dataclasses.replace(job, outputs=tuple(outputs))

    def _living_allocator(self, name: str) -> IOutputAllocator | None:
        held = self._allocators.get(name)
        if held is None:
            return None
        allocator = held()
        if allocator is None:
            raise self._violation(f"the output allocator of {name!r} was destroyed while it was set")
        return allocator

    def _ask(self, allocator: Any, name: str, memory: int, nbytes: int, handle: int) -> int:
        """As the real library: the asynchronous method first, then the older one."""
        if hasattr(allocator, "reallocate_output_async"):
            return int(allocator.reallocate_output_async(name, memory, nbytes, ALIGNMENT, handle) or 0)
        return int(allocator.reallocate_output(name, memory, nbytes, ALIGNMENT) or 0)

    def _tell(self, allocator: Any, name: str, shape: tuple[int, ...]) -> None:
        allocator.notify_shape(name, Dims(shape))

    def _notify(self, longest: int) -> None:
        io = self._spec.outputs[-1]
        allocator = self._living_allocator(io.name)
        assert allocator is not None
        self._tell(allocator, io.name, (self._shape_of(io)[0], longest))

    def _aux_streams(self, handle: int) -> tuple[int, ...]:
        """Those that were given. In place of the others the double takes the main one."""
        given = (self._aux or ())[: self._spec.aux_streams]
        if handle in given:
            raise self._violation(f"stream {handle} is its main and an auxiliary stream at once")
        return given
