"""A batch under way: what was decided, what it runs on, where its rows come from, and what became of it."""

from collections.abc import Mapping

from asynctrt.devices.base import Event
from asynctrt.errors import DeviceLostError
from asynctrt.runtime.contexts import BatchEvents, PooledContext
from asynctrt.runtime.jobs import Job
from asynctrt.runtime.staging import RowSource
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.batch_times import BatchTimes
from asynctrt.tensors import Array, BatchRecord


class InFlight:
    """One running batch. Until it has ended, its context and its slab are its own.

    :param source: where its rows come from.
    """

    error: BaseException | None = None
    """What went wrong while the batch was put on its stream."""
    job: Job | None = None
    """What a thread does for it, or did last."""
    put_ns: int | None = None
    """When the first of it was put on its stream, which may take long: the device computes meanwhile."""

    def __init__(self, batch: Batch, context: PooledContext, source: RowSource) -> None:
        self.batch = batch
        self.context = context
        self.source = source
        self.record = BatchRecord(batch.rows, batch.launched_ns)
        self.events: BatchEvents = context.timed if batch.is_timed else context.untimed
        self.end: Event = self.events.copied_out if source.has_copies_out else self.events.computed
        """Done when the batch is: what the reaper waits for."""
        self.ran_before_ns = context.stream.ran_ns
        source.launched()

    @property
    def is_out_of_hand(self) -> bool:
        """Whether a thread or the device may use what it has, now or later."""
        return self.put_ns is not None or self.job is not None

    def hold(self, job: Job) -> None:
        """Note what a thread is going to do for it."""
        self.job = self.context.job = job

    def wait(self, what: str, timeout_s: float) -> None:
        """Block until the batch is done, and raise its error if it failed.

        :param what: the subject of the error message.
        :raises DeviceLostError: if it does not end in time.
        """
        if not self.end.synchronize(timeout_s):
            raise DeviceLostError(f"{what} did not end within {timeout_s:g} s")
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> BaseException | None:
        """Return what went wrong, once the batch is done, and keep it no longer.

        Its traceback has the model's frames, and thereby what they were given.
        """
        error = self.error
        if error is not None:
            if isinstance(error, Exception):  # The loop has yet to raise any other.
                self.error = None
            return error
        events, source = self.events, self.source
        error = events.computed.error
        if error is None and source.has_copies_out:
            error = events.copied_out.error
        if error is None and source.has_copies_in and events.copied_in is not None:
            error = events.copied_in.error
        if error is not None:
            events.computed.error = events.copied_out.error = None
            if events.copied_in is not None:
                events.copied_in.error = None
        return error

    def ran_ns(self, ended_ns: int) -> int:
        """Return how long it ran on the device, as far as is known, once it has ended."""
        ran_ns = self.context.stream.ran_ns
        if ran_ns is not None and self.ran_before_ns is not None:
            return ran_ns - self.ran_before_ns
        if self.record.compute_ns or self.put_ns is None:
            return self.record.compute_ns
        return ended_ns - self.put_ns  # With what it waited for, as one that has failed is not timed.

    def note_times(self, times: BatchTimes) -> tuple[int, int] | None:
        """Add what the device measured to the batch's record, once the batch is done; what is usual if it was
        not timed.

        :returns: the measured times of copying in and out, in ns; ``None`` if there were none.
        """
        events, record, source, batch = self.events, self.record, self.source, self.batch
        before = events.begun
        if before is None:
            usual_ns = times.usual_ns(batch.key, batch.rows_run)
            copy_in_ns, record.compute_ns, record.copy_out_ns = usual_ns
            record.copy_in_ns += copy_in_ns
            return None
        copy_in_ns = copy_out_ns = 0
        if source.has_copies_in and events.copied_in is not None:
            copy_in_ns = events.copied_in.elapsed_ns(before)
            record.copy_in_ns += copy_in_ns
            before = events.copied_in
        if (self.context.arena is not None or batch.lane is not None) and events.started is not None:
            record.arena_wait_ns = events.started.elapsed_ns(before)
            before = events.started
        record.compute_ns = events.computed.elapsed_ns(before)
        if source.has_copies_out:
            record.copy_out_ns = copy_out_ns = events.copied_out.elapsed_ns(events.computed)
        return (copy_in_ns, copy_out_ns) if copy_in_ns or copy_out_ns else None

    def outputs(self) -> tuple[Mapping[str, Array], int]:
        """Return the outputs that its callers want by name, and their bytes. The next batch overwrites them.

        :raises ExecutionError: for an output whose shape turns out to have no batch axis.
        """
        batch, slab, wanted = self.batch, self.source.slab, self.source.wanted
        layout = slab.layout
        found = slab.outputs if layout.has_rows_first else slab.output_views(batch.rows_run)
        if wanted is None and len(found) == len(layout.outputs):
            return found, layout.output_row_nbytes * batch.rows
        spans = [
            span
            for span in layout.outputs
            if span is not None and span.name in found and (wanted is None or span.name in wanted)
        ]
        found = {span.name: found[span.name] for span in spans}
        nbytes = sum([span.row_nbytes for span in spans]) * batch.rows
        rows, specs = batch.rows_run, self.context.output_specs
        if len(found) < len(specs if wanted is None else wanted):
            for name, given in self.context.binding(self.source).unbound_outputs(rows).items():
                if wanted is None or name in wanted:
                    array = found[name] = specs[name].rows_of(given, rows)
                    nbytes += array.nbytes
        return {name: found[name] for name in specs if name in found}, nbytes
