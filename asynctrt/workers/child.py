"""A worker: a process with an engine, which reads rows from shared memory and writes answers there.

:mod:`asynctrt.workers.process` starts it. It exits when the front's end of its socket closes, whatever its
own event loop does.
"""

import asyncio
import faulthandler
import json
import logging
import os
import pickle
import re
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn

import uvloop

from asynctrt import errors
from asynctrt._util import clock
from asynctrt._util.loops import in_thread
from asynctrt._util.process import calm_gc, enter_worker, shorten_switch_interval
from asynctrt.core.inputs import Checked
from asynctrt.core.loading import limit_gpu_memory
from asynctrt.core.local import LocalEngine
from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    ExecutionError,
    InternalError,
    ModelError,
    bounded,
    describe,
)
from asynctrt.opening import open_local
from asynctrt.runtime.shared import SharedRows
from asynctrt.scheduling.batch import Batch
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, State
from asynctrt.statistics import Statistics
from asynctrt.tensors import InferResult
from asynctrt.workers.blocks import Blocks, Where
from asynctrt.workers.layout import LAUNCHED, SYMBOLS, BlockArrays, GroupLayout, Layouts, Placed
from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.messages import (
    MESSAGE_NBYTES_MAX,
    Attach,
    Attached,
    Close,
    Detach,
    EngineCounts,
    Failed,
    Kind,
    Lost,
    Ready,
    Record,
    Start,
    receive,
    send,
)
from asynctrt.workers.original import check_unchanged, digests_of, files_of, marks_of, versions
from asynctrt.workers.process import UNHEARD, first_message
from asynctrt.workers.ring import Receiver, Sender, ring_nbytes

BEAT_S: Final = 0.1
"""How often the worker shows that its event loop runs, and sends the engine's statistics."""

UUID: Final = re.compile(r"cuda:((?:MIG|GPU)-[\w/-]+)")
"""A GPU, or a part of one, as ``nvidia-smi -L`` names it."""

TEXT_MAX: Final = 10_000
"""The maximum length, in characters, of an error or a log record sent over the socket."""

KNOWN: Final = {
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, AsynctrtError)
}
"""The error classes that the front also has."""

IN_LARGE: Final = 1
"""The last word of an answer that lies in a separate block."""

# Looking up a member of an enumeration takes longer than comparing it.
SUBMIT: Final = Kind.SUBMIT
ANSWER: Final = Kind.ANSWER

logger = logging.getLogger("asynctrt")


class Work:
    """A front's rows that are being computed, from one block.

    It takes the place of the future of the engine's request, so that the answer is written to the block while
    the batch is answered, without a separate callback.

    :param desk: the worker's side of the front.
    :param where: the position of the rows.
    """

    __slots__ = (
        "_desk",
        "arrays",
        "id",
        "is_over",
        "layout",
        "requests",
        "shared",
        "task",
        "where",
        "word",
    )

    arrays: BlockArrays
    """The rows, and the arrays for their outputs."""

    def __init__(self, desk: "FrontSession", id_: int, where: Where, layout: GroupLayout) -> None:
        self._desk = desk
        self.id = id_
        self.where = where
        self.layout = layout
        self.word = where.block // 8 + LAUNCHED
        """The index of the word in the front's memory that shows its progress."""
        self.is_over = False
        """Whether it was computed, has failed or was cancelled. Its answer may not have been sent yet."""
        self.task: asyncio.Task[InferResult] | None = None
        """The task that joins the parts, if there are more rows than a batch holds. Its result is theirs."""
        self.requests: Sequence[Request] = ()
        """The engine's requests: one, or one for each part."""
        self.shared: SharedRows | None = None
        """The payload of large rows, which batches may use in place."""

    def on_launch(self) -> None:
        """Mark the block as launched."""
        self._desk.words[self.word] = 1

    def on_answer(self) -> None:
        """Mark the block as answered: the answer is in it, or in the front's larger block for it."""
        self._desk.words[self.word] = self.layout.stamp(self.id)

    def cancel(self) -> None:
        """End it without an answer; rows in flight are still computed."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()
        elif self.requests:
            self._desk.intake.cancel(self.requests[0])

    # The methods of a request's future that a driver calls.

    def done(self) -> bool:
        """Return whether it is over."""
        return self.is_over

    def set_result(self, result: InferResult) -> None:
        """Answer with the result."""
        self.is_over = True
        self._desk.answer(self, result)

    def set_exception(self, error: BaseException) -> None:
        """Answer with an error."""
        self.is_over = True
        self._desk.fail_soon(self, error)

    @property
    def is_read(self) -> bool:
        """Whether a batch may still read the block, although no caller waits for its answer.

        A thread may be gathering even small rows. If the block were freed, other rows could be written there,
        and the batch could fail on them or end the process.
        """
        if self.shared is not None and self.shared.batches:
            return True
        return any(request.state is State.MASKED for request in self.requests)


class FrontSession:
    """The worker's side of a front: rows in, answers out."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: LocalEngine,
        message: Attach,
        fds: list[int],
        lose: Callable[[DeviceLostError], NoReturn],
    ) -> None:
        try:
            heap, rings, own, front = fds
            self._memory = SharedMemory(heap, message.heap_nbytes)
            ring_memory = SharedMemory(rings, message.rings_nbytes)
        except (OSError, ValueError):
            for fd in fds:
                os.close(fd)
            raise
        self._eventfds = [own, front]
        self.words = self._memory.words
        self._loop = loop
        self.intake = engine.intake
        self._lose = lose
        self._memory.close()
        ring_memory.close()
        self._receiver = Receiver(ring_memory, 0, message.capacity, own)
        second = ring_nbytes(message.capacity)
        self._sender = Sender(ring_memory, second, message.capacity, front)
        self._layouts = Layouts(engine.inputs, engine.outputs, places_outputs=engine.batching.is_on)
        self._runs_in_place = engine.has_plain_rows
        self._check = self.intake.check.validate
        self._checks_once = self.intake.check.looks_at_shapes_alone
        self._works: dict[int, Work] = {}
        self._large: dict[int, bytes | tuple[Work, InferResult, Placed]] = {}
        # Finished works whose blocks a batch may still read, each with its error, or `None` if its caller
        # left.
        self._leaving: list[tuple[Work, Exception | None]] = []
        self._blocks = Blocks(loop, self._memory, self.intake, self._let_go_soon)
        self._publishes = False
        self._is_closed = False
        self.number = message.number
        loop.add_reader(own, self._woken)
        self._look()

    def beat(self, now_ns: int) -> None:
        """Show the front that the event loop runs."""
        self._receiver.beat(now_ns)
        self._let_go()

    def close(self) -> None:
        """Cancel the front's work and release everything of the front's."""
        self._is_closed = True
        self._loop.remove_reader(self._receiver.eventfd)
        for work in list(self._works.values()):
            if not work.is_over:
                work.cancel()
        # These refer to this object: the front's memory would stay mapped until the next garbage collection.
        self._works.clear()
        self._large.clear()
        self._leaving.clear()
        self._blocks.close()
        self._layouts.forget_arrays()
        for number in self._eventfds:
            os.close(number)

    def _woken(self) -> None:
        self._receiver.wake()
        self._look()

    def _look(self) -> None:
        """Handle the entries in the ring; then sleep, or let the loop run before looking again."""
        if self._is_closed:
            return
        for kind, _, number, id_, time_ns, block, rows, pages, _, _ in self._receiver.take():
            try:
                if kind == SUBMIT:
                    self._submit(id_, Where(block, rows, pages), number, time_ns)
                elif kind == Kind.CANCEL:
                    self._cancel(id_)
                else:
                    self._fetch(id_, block)
            except Exception as error:
                self._broken(id_, error)
        if not self._receiver.sleep():
            self._loop.call_soon(self._look)

    def _submit(self, id_: int, where: Where, priority: int, deadline_ns: int) -> None:
        block, rows, _ = where
        sizes: tuple[int, ...] = ()
        if self._layouts.symbols:
            first = block // 8 + SYMBOLS
            sizes = tuple(self.words[first : first + self._layouts.symbols])
        layout = self._layouts.of_sizes(sizes)
        work = self._works[id_] = Work(self, id_, where, layout)
        timeout_ns = None
        if deadline_ns != NO_DEADLINE_NS:
            timeout_ns = max(deadline_ns - clock.now_ns(), 0)
        arrays = work.arrays = layout.arrays(self._memory, block, rows)
        try:
            checked = arrays.checked
            if checked is None:
                checked = self._check(arrays.inputs)
                if self._checks_once:
                    arrays.checked = checked
            request = self.intake.submit(work, checked, timeout_ns, priority)
            if request is None:
                self._submit_split(work, checked, timeout_ns, priority)
                return
        except AsynctrtError as error:
            work.is_over = True
            self._failed(work, error)
            return
        work.requests = (request,)
        if layout.is_large and self._runs_in_place:
            request.payload = work.shared = self._blocks.rows(request.payload, layout, where)

    def _submit_split(self, work: Work, checked: Checked, timeout_ns: int | None, priority: int) -> None:
        """Submit a group with more rows than a batch holds."""
        split = self.intake.submit_split(checked, timeout_ns, priority)
        work.on_launch()  # When each part is launched cannot be seen from here.
        work.task, work.requests = split.begin(self._loop), split.requests
        work.task.add_done_callback(partial(self._done, work))

    def _cancel(self, id_: int) -> None:
        work = self._works.get(id_)
        if work is None:
            return  # Its answer has already been sent.
        if not work.is_over:
            work.cancel()
            if work.task is None:
                self._leave(work, None)
        elif self._large.pop(id_, None) is not None:
            self._gone(work)

    def _gone(self, work: Work) -> None:
        """Notify the front that the worker no longer uses the block."""
        del self._works[work.id]
        self._put(Kind.GONE, 0, 0, work.id, 0, 0, 0, 0, 0, 0)

    def _leave(self, work: Work, error: Exception | None) -> None:
        """End a finished work with its error, if any, as soon as no batch reads its block."""
        if work.is_read:
            self._leaving.append((work, error))
        elif error is None:
            self._gone(work)
        else:
            self._failed(work, error)

    def _let_go_soon(self) -> None:
        """Schedule :meth:`_let_go` for after the code that is ending a batch."""
        if self._leaving:
            self._loop.call_soon(self._let_go)

    def _let_go(self) -> None:
        """Release the blocks of finished works whose batches have ended."""
        if not self._leaving or self._is_closed:
            return
        leaving, self._leaving = self._leaving, []
        for work, error in leaving:
            self._leave(work, error)

    def _done(self, work: Work, task: "asyncio.Future[InferResult]") -> None:
        """End a split work with the result, error or cancellation of its task."""
        error = None if task.cancelled() else task.exception()
        if task is not work.task:
            return  # `_broken` has already answered it.
        work.is_over = True
        if error is not None or task.cancelled():
            self._end(work, error)
        else:
            self.answer(work, task.result())

    def fail_soon(self, work: Work, error: BaseException) -> None:
        """Answer with an error, after the code that is ending the batch."""
        self._loop.call_soon(self._end, work, error)

    def answer(self, work: Work, result: InferResult) -> None:
        """Answer computed rows. Never raises, because the answers of others follow."""
        if self._is_closed:
            return
        try:
            self._answer_with(work, result)
        except Exception as error:
            self._broken(work.id, error)

    def _broken(self, id_: int, error: Exception) -> None:
        """Answer with an internal error: a bug of ours must not leave callers waiting."""
        why = InternalError(f"the worker could not take or answer a request: {describe(error)}")
        why.__cause__ = error
        logger.error("%s", why, exc_info=error)
        work = self._works.get(id_)
        if work is not None:
            self._large.pop(id_, None)
            if not work.is_over:
                work.cancel()
                work.task = None
            self._leave(work, why)

    def _end(self, work: Work, error: BaseException | None) -> None:
        """End a work that was not computed; without an error, it was cancelled."""
        if self._is_closed:
            return
        try:
            if isinstance(error, DeviceLostError):
                self._lose(error)
            elif error is None or isinstance(error, Exception):
                self._leave(work, error)
            else:
                self._failed(work, error)
        except Exception as broken:
            self._broken(work.id, broken)

    def _answer_with(self, work: Work, result: InferResult) -> None:
        if not work.layout.has_outputs:
            placed = Placed(result)
            self._large[work.id] = work, result, placed
            self._answer(Kind.LARGE, work, result, placed.nbytes)
        else:
            for name, array in work.arrays.outputs.items():
                array[...] = result[name]
            self._answer(ANSWER, work, result, 0)

    def _answer(self, kind: Kind, work: Work, result: InferResult, nbytes: int) -> None:
        batches = result._batches
        batch = batches[0]
        number, rows, launched_ns = 1, batch.rows, batch.launched_ns
        copy_in_ns, compute_ns, copy_out_ns = batch.copy_in_ns, batch.compute_ns, batch.copy_out_ns
        if len(batches) > 1:  # Rare: only for more rows than a batch holds.
            number, rows = min(len(batches), 0xFFFF), result.batch_rows
            launched_ns = min(batch.launched_ns for batch in batches)
            timing = result.timing
            copy_in_ns, compute_ns, copy_out_ns = timing.copy_in_ns, timing.compute_ns, timing.copy_out_ns
        times_ns = launched_ns, copy_in_ns, compute_ns, copy_out_ns
        if kind is ANSWER:
            work.on_answer()
        self._put(kind, number, rows, work.id, *times_ns, nbytes, IN_LARGE if nbytes else 0)
        if kind is ANSWER:
            del self._works[work.id]

    def _failed(self, work: Work, error: BaseException) -> None:
        """Answer with an error: its class, message and cause."""
        cause = "" if error.__cause__ is None else "".join(traceback.format_exception(error.__cause__))
        text = json.dumps(
            {
                "kind": _nearest(error).__name__,
                "text": bounded(str(error)),
                "predicted_s": getattr(error, "predicted_s", 0.0),
                "notes": [bounded(str(note)) for note in getattr(error, "__notes__", [])],
                "cause": bounded(cause, TEXT_MAX),
            }
        ).encode()
        offset, room = work.layout.room_for_text(work.where.rows)
        if len(text) <= room:
            start = work.where.block + offset
            self._memory.buffer[start : start + len(text)] = text
            work.on_answer()
            del self._works[work.id]
            self._put(Kind.ERROR, 0, 0, work.id, 0, 0, 0, 0, len(text), 0)
        else:
            self._large[work.id] = text
            self._put(Kind.LARGE, 0, 0, work.id, 0, 0, 0, 0, len(text), 0)

    def _fetch(self, id_: int, block: int) -> None:
        """Write an answer that was too large for its own block into the one allocated by the front."""
        kept = self._large.pop(id_)
        if isinstance(kept, bytes):
            self._memory.buffer[block : block + len(kept)] = kept
            self._works.pop(id_).on_answer()
            self._put(Kind.ERROR, 0, 0, id_, 0, 0, 0, 0, len(kept), IN_LARGE)
            return
        work, result, placed = kept
        placed.write(self._memory, block)
        self._answer(ANSWER, work, result, placed.nbytes)

    def _put(self, *fields: Any) -> None:
        self._sender.put(*fields)
        if not self._publishes:
            # Publish all answers of a batch at once, so that the front wakes only once.
            self._publishes = True
            self._loop.call_soon(self.publish)

    def publish(self) -> None:
        """Publish the answers written so far to the front."""
        if self._is_closed:
            return
        self._let_go()  # Works in the same batches may be free now.
        self._publishes = False
        self._sender.publish()


class Worker:
    """The process's engine, and the fronts that are attached to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: LocalEngine, end: socket.socket) -> None:
        self._loop = loop
        self._engine = engine
        self._end = end
        self._attached: list[FrontSession] = []
        self._told: Statistics | None = None
        self.closing: asyncio.Event = asyncio.Event()
        engine.intake.on_launch(_launched)
        self._beat()

    def hear(self, message: Any, fds: list[int]) -> None:
        """Handle a message from a front."""
        if isinstance(message, Attach):
            why = self._attach(message, fds)
            with suppress(OSError):  # The front is gone; `_listen` notices that next.
                send(self._end, Attached(message.number, why))
        elif isinstance(message, Detach):
            for attached in [one for one in self._attached if one.number == message.number]:
                self._attached.remove(attached)
                attached.close()
        elif isinstance(message, Close):
            self.closing.set()

    def _attach(self, message: Attach, fds: list[int]) -> str:
        """Serve a front; return the reason if that is impossible, else an empty string."""
        try:
            self._attached.append(FrontSession(self._loop, self._engine, message, fds, self.lose))
        except ValueError:
            return "has no descriptors left for the memory of its front (ulimit -n)"
        except OSError as error:
            return (
                f"cannot have the {message.heap_nbytes} bytes of address space for the memory that it shares "
                f"with its front: {error.strerror}. Raise the limit (ulimit -v)"
            )
        return ""

    def tell(self) -> None:
        """Send the engine's statistics, if they have changed and the front reads its socket."""
        statistics = self._engine.statistics()
        if statistics != self._told:
            try:
                send(self._end, EngineCounts(statistics), flags=socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._told = statistics

    def lose(self, error: DeviceLostError) -> NoReturn:
        """Exit at once: nothing on the device can be trusted, and the front starts another worker."""
        for attached in self._attached:
            attached.publish()
        with suppress(OSError):
            send(self._end, Lost(describe(error)[:TEXT_MAX]), flags=socket.MSG_DONTWAIT)
        os._exit(os.EX_SOFTWARE)

    def _beat(self) -> None:
        now_ns = clock.now_ns()
        for attached in self._attached:
            attached.beat(now_ns)
        self.tell()
        self._loop.call_later(BEAT_S, self._beat)


class ToFront(logging.Handler):
    """A handler that sends log records to the front, where the application's logging is."""

    def __init__(self, end: socket.socket, level: int) -> None:
        super().__init__(level)
        self._end = end

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, with its traceback as text; drop it if the front does not read."""
        text = f"worker {os.getpid()}: {self.format(record)}"[:TEXT_MAX]
        try:
            send(self._end, Record(record.name, record.levelno, text), flags=socket.MSG_DONTWAIT)
        except OSError:
            return


def _launched(batch: Batch) -> None:
    """Mark the blocks of a batch as launched: if this process dies, the batch may be the cause."""
    for request in batch.requests:
        mark = getattr(request.future, "on_launch", None)
        if mark is not None:
            mark()


def _listen(
    end: socket.socket, loop: asyncio.AbstractEventLoop, hear: Callable[[Any, list[int]], None]
) -> None:
    """Hand messages to the loop; exit when the front ends, even if the loop hangs. Runs in a thread."""
    events = select.poll()
    events.register(end, select.POLLIN)
    with suppress(OSError):
        # A process that the front has forked also holds the other end, and may outlive the front.
        events.register(os.pidfd_open(os.getppid()), select.POLLIN)
    while True:
        if end.fileno() not in dict(events.poll()):
            os._exit(0)
        message, fds = receive(end)
        if message is None:
            os._exit(0)
        loop.call_soon_threadsafe(hear, message, fds)


async def _run(end: socket.socket, start: Start) -> None:
    loop = asyncio.get_running_loop()
    heard: list[tuple[Any, list[int]]] = []
    worker: Worker | None = None

    def hear(message: Any, fds: list[int]) -> None:
        if worker is None:
            heard.append((message, fds))
        else:
            worker.hear(message, fds)

    threading.Thread(target=_listen, args=(end, loop, hear), name="asynctrt-front", daemon=True).start()
    try:
        device = _visible(start.device)
        if start.gpu_memory_nbytes is not None:
            limit_gpu_memory(start.gpu_memory_nbytes)
        files = await in_thread(partial(files_of, start.model))
        before = marks_of(files)
        # Read the files while the engine opens, because both take long for large files.
        reading = loop.create_task(in_thread(partial(digests_of, files)))
        engine = await open_local(start.model, device, start.options, rows_first=True)
        digests = await reading
        check_unchanged(files, before)
        texts = [spec.name for spec in (*engine.inputs, *engine.outputs) if spec.dtype.hasobject]
        if texts:
            await engine.aclose()
            raise ModelError(
                f"{engine.name!r} has strings or Python values ({', '.join(texts)}), which do not lie in "
                "memory that processes share. Open it without isolation='process'"
            )
    except Exception as error:
        send(end, Failed(_sendable(error)))
        # A normal interpreter exit would wait for any threads that the model has started.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # The reader of the output may be gone.
                stream.flush()
        os._exit(1)
    async with engine:
        worker = Worker(loop, engine, end)
        calm_gc()
        description = replace(engine.description, files=digests, versions=versions())
        send(end, Ready(description, engine.statistics()))
        for message, fds in heard:
            worker.hear(message, fds)
        await worker.closing.wait()
    worker.tell()


def _visible(device: str) -> str:
    """Return the device's name in this process. A GPU named by its UUID becomes the only visible one.

    This must happen before CUDA is loaded. The parts of a divided GPU (MIG) have no other name, because CUDA
    shows a process only one part.
    """
    found = UUID.fullmatch(device)
    if found is None:
        return device
    os.environ["CUDA_VISIBLE_DEVICES"] = found[1]
    return "cuda:0"


def _sendable(error: Exception) -> Exception:
    """Return the error if the front can unpickle it; else one of our errors with its message.

    To unpickle a foreign class, the front would import its module, which may load CUDA.
    """
    is_known = type(error) is _nearest(error) or type(error).__module__ == "builtins"
    try:
        text = pickle.dumps(error)
        pickle.loads(text)  # noqa: S301  (its own)
        if is_known and len(text) < MESSAGE_NBYTES_MAX // 2:
            return error
    except Exception:
        is_known = False
    words = str(error) if is_known else describe(error)
    return _nearest(error)(words)


def _nearest(error: BaseException) -> type[AsynctrtError]:
    """Return the error's class if the front knows it, else the nearest base that the front knows."""
    return next((kind for kind in type(error).__mro__ if kind in KNOWN), ExecutionError)


def main() -> None:
    """Run a worker."""
    # Ctrl-C reaches every process of a terminal, and a service's SIGTERM all of its processes. The front
    # needs this worker to finish accepted requests, and then closes it.
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)
    faulthandler.enable()
    enter_worker()
    end, start, _ = first_message()
    logging.getLogger("asynctrt").addHandler(ToFront(end, start.level))
    logging.getLogger("asynctrt").setLevel(start.level)
    logging.getLogger("asynctrt").propagate = False
    shorten_switch_interval()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        task = loop.create_task(_run(end, start))
        while not task.done():
            # If a model raises one of these on the loop, the loop stops. Only that batch fails: continue.
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_until_complete(task)
        task.result()
