"""The parts of an engine and their sizes: built together and closed together."""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from asynctrt._util.cancellation import current
from asynctrt.backends.base import CapableModel, Model
from asynctrt.backends.onnx_objects import OnnxObject
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.core.description import Description
from asynctrt.core.independence import alone_of, begin_on_host, is_alone, prove, structural
from asynctrt.core.inputs import InputCheck
from asynctrt.core.lengths import Found
from asynctrt.core.loading import find_device, load_model
from asynctrt.core.padded_inputs import PaddedInputCheck
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.base import Device
from asynctrt.devices.host import HostDevice
from asynctrt.errors import AsynctrtError, DeviceLostError, InputError, ModelError, OptionsError
from asynctrt.options import BATCH_NBYTES_MAX, MAX_ROWS_DEFAULT, Options
from asynctrt.runtime.calibration import Calibration, calibrate
from asynctrt.runtime.contexts import UNDO_S, ContextPool
from asynctrt.runtime.pad_sizes import STEPS_WHERE_SHAPES_ARE_FREE, Padding
from asynctrt.runtime.prepare import few_sizes, sizes_up_to
from asynctrt.runtime.shares import join_device
from asynctrt.runtime.specialised import Builder
from asynctrt.runtime.specialiser import SHAPES_MAX, Specialiser, adopt, held_nbytes, log_refusal
from asynctrt.runtime.staging import Slab, lay_out
from asynctrt.scheduling.company import MixedSizes
from asynctrt.scheduling.concurrency import Lanes
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from asynctrt.statistics import TRUSTED, Batching
from asynctrt.tensors import Dims, split_shared

logger = logging.getLogger("asynctrt")


NOT_CALIBRATED: Final = Calibration()


@dataclass(frozen=True, slots=True)
class Capacity:
    """The sizes that the options yield for a model on a device."""

    rows_max: int
    contexts: int
    arenas: int
    graphs: tuple[int, ...]
    """Batch sizes to capture."""
    graphs_named: tuple[int, ...] = ()
    """The sizes that the option names; empty for ``auto`` and ``off``."""

    @classmethod
    def of(cls, model: Model, device: Device, options: Options, shared: Arenas | None = None) -> "Capacity":
        """Return the sizes.

        :raises AsynctrtError: naming the option that the model cannot be opened with.
        """
        contexts = options.contexts or max(device.contexts_default, options.arenas or 0)
        if options.is_deterministic:
            contexts = 1
        if model.capabilities.batch_sizes and model.capabilities.occupies_device:
            contexts = min(contexts, device.concurrency)  # Two in one thread would block each other.
        asked, contexts = contexts, min(contexts, model.capabilities.contexts_max or contexts)
        arenas = min(options.arenas or contexts, contexts)
        if shared is not None:
            arenas = cls._shared(device, options, shared, asked)
        if not model.capabilities.enqueue_nbytes:
            arenas = 0
        rows_max = cls._rows_max(model, options)
        graphs = cls._graphs(model, device, options, rows_max)
        if graphs and not model.capabilities.is_capturable:
            if not is_specialisable(model) and options.graphs != "auto":
                logger.warning(
                    "graphs is %s, but batches of %r (%s) cannot be captured as CUDA graphs: they are put on "
                    "the device call by call, as with graphs='off'",
                    options.graphs,
                    model.name,
                    model.platform,
                )
            graphs = ()
        named = () if isinstance(options.graphs, str) else tuple(map(int, options.graphs))
        return cls(rows_max, contexts, arenas, graphs, named)

    @staticmethod
    def _shared(device: Device, options: Options, shared: Arenas, contexts: int) -> int:
        if shared.device is not device:
            raise OptionsError(
                f"{shared!r} belong to another device object than the engine. Open both with the same one: "
                f"device = ...; Arenas(device, 2); asynctrt.open(..., device=device, shared_arenas=arenas)"
            )
        if options.arenas not in (None, len(shared)) or contexts < len(shared):
            raise OptionsError(
                f"{len(shared)} arenas are shared, so leave the option arenas out, and have at least "
                f"{len(shared)} contexts; arenas is {options.arenas} and there are {contexts} contexts"
            )
        return len(shared)

    @staticmethod
    def _rows_max(model: Model, options: Options) -> int:
        if is_alone(model):
            return 1
        fixed = model.capabilities.rows_fixed
        fits = options.max_rows == fixed or (options.max_rows is None and fixed == 1)
        if fixed is not None and not fits:
            raise ModelError(
                f"{model.name!r} takes batches of exactly {fixed} rows. Export it with a dynamic first axis, "
                f"or open it with max_rows={fixed}: every batch is then padded to that size"
            )
        if fixed is not None:
            return fixed
        limit = model.capabilities.rows_max
        if model.capabilities.batch_sizes:
            return _largest(model, options)
        if limit is not None and (options.max_rows or 0) > limit:
            raise OptionsError(
                f"max_rows is {options.max_rows}, but {model.name!r} takes at most {limit} rows. "
                f"Open it with max_rows={limit} or less"
            )
        return options.max_rows or min(MAX_ROWS_DEFAULT, limit or MAX_ROWS_DEFAULT, options.max_queue_rows)

    @staticmethod
    def _graphs(model: Model, device: Device, options: Options, rows_max: int) -> tuple[int, ...]:
        """Return the batch sizes to capture, assuming that the model can be captured."""
        if options.graphs == "off" or (options.graphs == "auto" and not device.prefers_graphs):
            return ()
        if model.capabilities.rows_fixed is not None:
            return (model.capabilities.rows_fixed,)
        if options.is_deterministic:
            return (rows_max,)
        least = model.capabilities.rows_min
        if options.graphs == "auto":
            is_fixed = model.capabilities.is_traced or all(spec.is_fixed for spec in model.inputs)
            sizes = sizes_up_to(rows_max) if is_fixed else few_sizes((), rows_max)
            return tuple(sorted({least, *(rows for rows in sizes if rows > least)}))
        sizes = tuple(int(rows) for rows in options.graphs)
        if sizes[-1] > rows_max or sizes[0] < least:
            raise OptionsError(
                f"graphs is {sizes}, but {model.name!r} takes batches of {least} to {rows_max} rows here"
            )
        return sizes


def is_specialisable(model: Model) -> bool:
    """Return whether recurring shapes of a model get dedicated contexts."""
    return model.capabilities.is_specialisable and not is_alone(model)


def _largest(model: Model, options: Options) -> int:
    """Return the largest of the batch sizes that a model is restricted to.

    :raises OptionsError: if the options contradict it.
    """
    sizes = model.capabilities.batch_sizes
    largest = sizes[-1]
    if options.max_rows not in (None, largest):
        raise OptionsError(
            f"max_rows is {options.max_rows}, and the largest of batch_sizes {sizes} of {model.name!r} is "
            f"{largest}. Leave max_rows out, or let batch_sizes end with {options.max_rows}"
        )
    if largest > options.max_queue_rows:
        raise OptionsError(
            f"max_queue_rows ({options.max_queue_rows}) must be ≥ the largest of batch_sizes {sizes} of "
            f"{model.name!r}, or no batch could ever fill"
        )
    return largest


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. Each part is closed by its creator."""

    device: Device
    model: Model
    pool: ContextPool
    arenas: Arenas | None
    shapes: Shapes
    capacity: Capacity
    owned: tuple[Arenas | Model | Device, ...] = ()
    """The parts to close with the engine: unshared arenas, then a model and a device made for it."""
    padding: Padding | None = None
    """The dimensions and inputs to pad."""
    batching: Batching = TRUSTED
    """Whether rows of different requests share batches, and why."""
    builder: Builder | None = None
    """Builds contexts for recurring shapes, if that may pay off."""
    times: tuple[tuple[int, int], ...] = ()
    """For batches of made-up rows, the cost in units and the time in ns of each."""
    calibration: Calibration = NOT_CALIBRATED
    """How many batches compute side by side."""

    @property
    def is_pipelined(self) -> bool:
        """Whether batches wait for one another on the device, each copied in while others compute."""
        return self.device.is_pipelined and self.model.capabilities.occupies_device

    @property
    def lanes_max(self) -> int:
        """How many batches can compute side by side."""
        capacity = self.capacity
        # Batches in one arena compute one after the other, and so do batches in one context.
        return (capacity.arenas or capacity.contexts) if self.is_pipelined else 1

    @property
    def lanes_by_rows(self) -> dict[int, int]:
        """How many batches compute side by side, by the largest number of rows for which this holds; empty on
        devices without lanes."""
        return self.calibration.lanes.by_rows(self.capacity.rows_max) if self.is_pipelined else {}

    def described(self) -> Description:
        """Return the facts about an engine with these parts."""
        device, model, capacity = self.device, self.model, self.capacity
        return Description(
            model.name,
            model.platform,
            device.name,
            model.inputs,
            model.outputs,
            capacity.rows_max,
            capacity.contexts,
            capacity.arenas or capacity.contexts,
            device.unified,
            self.batching,
        )

    def calibrated(self, options: Options) -> "EngineParts":
        """Return these parts with the number of lanes from the options, or else with as many as pay off.
        Blocks.

        If engines divide the device, the times of batches that run alone are measured either way, because
        batches are charged by them. So is the cost of changing the batch size, if it may be high.
        """
        found = Calibration()
        is_divided = options.weight is not None and self.is_pipelined
        changes = not self.pool.captured.sizes and self.model.capabilities.changes_slowly
        if getattr(self.device, "holds_batches", False):
            found = self.calibration
        elif options.lanes is None or is_divided or changes:
            lanes_max = self.lanes_max if options.lanes is None else 1
            found = calibrate(self, lanes_max, for_times=is_divided, for_changes=changes)
        if options.lanes is not None:
            lanes = Lanes.fixed(min(options.lanes, self.lanes_max), self.capacity.rows_max)
            found = found._replace(lanes=lanes)
        if self.builder is not None:
            self.builder.in_turn = self.is_pipelined and found.lanes.are_one
        return dataclasses.replace(self, calibration=found)

    def padded_as(self, found: Found) -> "EngineParts":
        """Return these parts with the padding found to change no answer, if there is one."""
        if found.padding is not None:
            self.pool.padding = found.padding
            for sizes in found.padding.chosen.values():
                sizes.steps = STEPS_WHERE_SHAPES_ARE_FREE if self.device.is_parallel else 1
        return dataclasses.replace(self, padding=found.padding or self.padding, times=found.times)

    def create_scheduler(self, options: Options) -> Scheduler:
        """Create the scheduler of an engine with these parts."""
        device, model, capacity = self.device, self.model, self.capacity
        its = model.capabilities
        concurrency = device.concurrency if its.occupies_device else capacity.contexts
        concurrency += self.lanes_max - 1
        company = None
        if self.padding is not None:
            company = MixedSizes(
                self.padding.units_of, self.padding.holds, self.times, self.shapes.padded_rows
            )
        return Scheduler(
            policy=Policy(
                rows_max=capacity.rows_max,
                delay_ns_max=int(options.max_delay * 1e9),
                # Without a context a batch cannot run, so more concurrency would not keep the device busier.
                concurrency=min(concurrency, capacity.contexts),
                is_parallel=device.is_parallel and its.occupies_device and its.rows_fixed is None,
                captured=self.pool.captured,
                is_alone=options.is_deterministic,
                is_pipelined=self.is_pipelined,
                lanes=self.calibration.lanes,
                lanes_max=self.lanes_max,
                may_enqueue_slowly=its.enqueue_may_block and not self.pool.always_replays,
                answers_in_time=options.timeout_until == "answer",
                change_ns=self.calibration.change_ns,
            ),
            shapes=self.shapes,
            queue_rows_max=options.max_queue_rows,
            priorities=options.priorities,
            contexts=capacity.contexts,
            arenas=capacity.arenas,
            in_flight_max=capacity.contexts,
            arena_users=None if self.arenas is None else self.arenas.users,
            times_all=device.timing_is_free,
            company=company,
        )

    def divide_device(
        self,
        scheduler: Scheduler,
        options: Options,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], object],
    ) -> None:
        """Limit a scheduler to its share of the device, if the engine has a weight.

        :param wake: makes the driver ask the scheduler again soon.
        """
        if options.weight is None:
            return
        # Batches in a shared arena never overlap, and some streams do not count the time a batch waits.
        is_exact = self.pool.contexts[0].stream.ran_ns is not None
        overlaps = not is_exact and (self.arenas is None or self.arenas in self.owned)
        share = join_device(loop, self.device, options.weight, overlaps=overlaps, wake=wake)
        scheduler.divide(share)

    def create_check(
        self, options: Options, check_key: Callable[[BatchKey], object], *, rows_first: bool = False
    ) -> InputCheck:
        """Create the check of an engine's inputs.

        :param check_key: an additional check of a shape, used if the model refuses some shapes.
        :param rows_first: whether arrays arrive with rows first, whatever axis of an input counts rows.
        """
        create = InputCheck if self.padding is None else partial(PaddedInputCheck, padding=self.padding)
        return create(
            self.model.inputs,
            check_key=check_key if self.shapes.has_profiles else None,
            import_array=self.device.import_array,
            ignores_extra=options.ignore_extra,
            rows_first=rows_first,
            dims_are_hints=self.model.capabilities.dims_are_hints,
        )

    def create_specialiser(
        self,
        loop: asyncio.AbstractEventLoop,
        uses: Callable[[Slab], bool],
        run_anew: Callable[[Hashable, Mapping[int, int]], object],
    ) -> Specialiser | None:
        """Create the specialiser, which gives recurring shapes dedicated contexts; ``None`` if the model
        gains nothing by it."""
        if self.builder is None:
            return None
        model = self.model
        sizes_of = partial(sizes_of_shape, self.capacity, self.shapes)
        return Specialiser(
            loop,
            repr(model.name),
            self.pool,
            self.shapes,
            self.builder,
            sizes_of=sizes_of,
            uses=uses,
            run_anew=run_anew,
        )

    def close(self, timeout_s: float) -> int:
        """Release what the engine owns; return how many contexts had to be abandoned. Blocks.

        Call it again to release abandoned contexts once they have ended. Contexts that a thread still builds
        count as one.
        """
        abandoned = self.pool.close(timeout_s)
        if not abandoned and self.builder is not None and not self.builder.close(timeout_s):
            abandoned = 1
        if abandoned:
            # A running batch still uses the weights and the memory, so keep them too.
            return abandoned
        for part in self.owned:
            part.close()
        return 0


def sizes_of_shape(capacity: Capacity, shapes: Shapes, shape: Hashable) -> tuple[int, ...]:
    """Return the batch sizes to build for a shape, rising."""
    return few_sizes(capacity.graphs_named, shapes.limit(shape))


class ModelProfiles:
    """The profiles of a model, looked up by the shape of a batch's key."""

    def __init__(self, model: CapableModel) -> None:
        self._model = model

    def row_ranges(self, shape: Hashable) -> tuple[tuple[int, int], ...]:
        """Return the smallest and the largest batch of each profile that takes rows of this shape."""
        return self._model.rows_of(self._dims_of(shape))

    def profile_of(self, shape: Hashable, rows: int) -> int:
        """Return the profile for a batch of ``rows``."""
        return self._model.profile_of(self._dims_of(shape), rows)

    def _dims_of(self, shape: Hashable) -> tuple[Dims, ...]:
        assert isinstance(shape, tuple)
        symbols = dict(shape)
        resolved = (spec.resolve(symbols) for spec in self._model.inputs)
        return tuple(dims for dims in resolved if dims is not None)


def row_nbytes_of(model: Model) -> Callable[[Hashable], int] | None:
    """Return a function from the dynamic dimensions of a row to its bytes, inputs and outputs together.

    Return ``None`` for a model whose rows all have one shape: the memory of a batch is then known, and
    allocated or refused when the model is opened. Outputs whose shape depends on the data count as 0 bytes.
    """
    if all(spec.is_fixed for spec in model.inputs):
        return None

    def row_nbytes(shape: Hashable) -> int:
        assert isinstance(shape, tuple)
        layout = lay_out(model.inputs, model.outputs, dict(shape), rows_max=1)
        # Also count outputs that the model allocates itself: they take memory too.
        return layout.input_row_nbytes + layout.output_row_nbytes

    return row_nbytes


def build_on(
    model: str | os.PathLike[str] | OnnxObject | Model,
    device: str | Device,
    options: Options,
    shared: Arenas | None,
) -> EngineParts:
    """Load a model and create the parts of its engine. Blocks; a failure releases everything.

    :raises AsynctrtError: if the model or the device refuses.
    """
    found = find_device(device)
    loaded: Model | None = None
    try:
        loaded = _load(model, found, options)
        parts = _made_as_proven(loaded, found, options, shared)
        try:
            parts = parts.calibrated(options)
            if isinstance(options.onnx, OnnxOptions) and options.onnx.shapes:
                _specialise(parts, options, options.onnx.shapes)
        except BaseException:
            parts.close(UNDO_S)
            raise
    except BaseException as error:
        if loaded is not None and loaded is not model:
            loaded.close()
        if found is not device:
            found.close()
        if loaded is None or isinstance(error, AsynctrtError) or not isinstance(error, Exception):
            raise
        raise ModelError(
            f"{loaded.name!r} could not be set up on {found.name!r}: {type(error).__name__}: {error}"
        ) from error
    owned: list[Model | Device] = [] if loaded is model else [loaded]
    if found is not device:
        owned.append(found)
    return dataclasses.replace(parts, owned=(*parts.owned, *owned))


def _load(model: str | os.PathLike[str] | OnnxObject | Model, device: Device, options: Options) -> Model:
    tensorrt = options.tensorrt
    assert tensorrt is None or isinstance(tensorrt, TensorRTOptions), "it was converted by its check"
    onnx = options.onnx
    assert onnx is None or isinstance(onnx, OnnxOptions), "it was converted by its check"
    if options.runtime != "tensorrt" and (tensorrt is None or tensorrt.build is None):
        return load_model(model, device, tensorrt, options.runtime, onnx)
    # Imported only when needed: few engines build their plans.
    from asynctrt.plans.cache import load_for  # noqa: PLC0415

    return load_for(model, device, options)


def _made_as_proven(given: Model, device: Device, options: Options, shared: Arenas | None) -> EngineParts:
    """Create the parts of an engine. Requests share batches only if rows are proven to be independent."""

    def make(model: Model) -> EngineParts:
        made = _make(model, device, options, shared)
        return made if model is given else dataclasses.replace(made, owned=(*made.owned, model))

    def make_and_prove(batching: Batching) -> EngineParts:
        model = given if batching.is_on else alone_of(given, batching.reason)
        try_on_host = partial(_make_on_host, options)
        with ThreadPoolExecutor(1, "asynctrt-probe") as threads:
            on_host = begin_on_host(model, device, options, batching, try_on_host, threads)
            parts = make(model)
        try:
            proven, lengths = prove(parts, options, batching, make, on_host)
            return dataclasses.replace(parts.padded_as(lengths), batching=proven)
        except BaseException:
            parts.close(UNDO_S)
            raise

    batching = structural(given, options)
    parts = make_and_prove(batching)
    if batching.is_on and not parts.batching.is_on:
        parts.close(UNDO_S)
        parts = make_and_prove(parts.batching)
    if not parts.batching.is_on and options.batching != "off":
        logger.warning("%r: each request runs alone, since %s", given.name, parts.batching.reason)
    return parts


def _specialise(parts: EngineParts, options: Options, named: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Create dedicated contexts for the shapes that the options name.

    :raises OptionsError: for a shape that the model does not take.
    """
    name, model, builder = repr(parts.model.name), parts.model, parts.builder
    check = parts.create_check(options, lambda _: None)
    keys = []
    for dims in named:
        try:
            keys.append(check.key_of_dims(cast("Mapping[str, Dims]", dims)))
        except InputError as error:
            specs = {spec.name: spec.dims for spec in model.inputs}
            raise OptionsError(
                f"shapes names {dict(cast('Mapping[str, Dims]', dims))}, and rows of {name} are {specs}"
            ) from error
    if builder is None:
        logger.warning(
            "shapes names shapes that come often, but shapes of %s gain nothing by it: only ONNX models on "
            "a GPU do, if their dimensions vary and pad does not name all sizes",
            name,
        )
        return
    for shape in dict.fromkeys(key.shape for key in keys):
        sizes = sizes_of_shape(parts.capacity, parts.shapes, shape)
        try:
            made = builder.build(
                shape,
                sizes,
                one_by_one=False,
                cancellation=current(),
                held_nbytes=held_nbytes(parts.pool),
            )
        except DeviceLostError:
            raise
        except AsynctrtError as error:
            if current().is_cancelled:
                raise
            log_refusal(name, shape, error, str(error), is_over=False)
        else:
            adopt(name, parts.pool, parts.shapes, made)


def _make_on_host(options: Options, model: Model) -> EngineParts:
    """Create the parts for trying a model on the host. Closing them closes the model as well."""
    device = HostDevice()
    plain = Options(
        max_rows=options.max_rows, pad=options.pad, pad_with=options.pad_with, contexts=1, graphs="off"
    )
    try:
        parts = _make(model, device, plain, None)
    except BaseException:
        model.close()
        device.close()
        raise
    return dataclasses.replace(parts, owned=(*parts.owned, model, device))


def _shapes_to_capture(
    model: Model, padding: Padding | None, capacity: Capacity, shapes: Shapes
) -> tuple[Hashable, ...]:
    """Return all shapes to run before the first request, if there are few and a batch of each holds
    ``rows_max`` rows."""
    if padding is None or not (capacity.graphs or model.capabilities.batch_sizes):
        return ()
    known = padding.shapes
    if len(known) > SHAPES_MAX:
        return ()
    try:
        is_right = all(shapes.rows_held(shape) == capacity.rows_max for shape in known)
    except InputError:
        return ()  # No profile takes one of these shapes. The request that has it gets the error.
    return known if is_right else ()


def _make(model: Model, device: Device, options: Options, shared: Arenas | None) -> EngineParts:
    """Create the parts of a model's engine on a device."""
    capacity = Capacity.of(model, device, options, shared)
    if options.weight is not None and not model.capabilities.occupies_device:
        raise OptionsError(
            f"weight divides the time of {device.name!r}, and {model.name!r} takes none: it awaits what is "
            "computed elsewhere. Leave it out"
        )
    padding = Padding.of(model.name, split_shared(model.inputs)[0], model.outputs, options)
    arenas: Arenas | None = None
    try:
        if capacity.arenas:
            arenas = shared or Arenas(device, capacity.arenas)
        shapes = Shapes(
            rows_max=capacity.rows_max,
            rows_fixed=model.capabilities.rows_fixed,
            profiles=ModelProfiles(cast("CapableModel", model)) if model.capabilities.has_profiles else None,
            fills_batches=options.is_deterministic,
            nbytes_max=BATCH_NBYTES_MAX,
            row_nbytes=row_nbytes_of(model),
        )
        if options.is_deterministic and model.platform == "tensorrt_plan":
            logger.warning(
                "%r is deterministic but for layers that TensorRT leaves random: IFillLayer, and "
                "IScatterLayer with indices that occur twice. A plan does not show whether it has any",
                model.name,
            )
        pool = ContextPool(
            device,
            model,
            contexts=capacity.contexts,
            arenas=arenas,
            rows_max=capacity.rows_max,
            graphs=capacity.graphs,
            profile_of=shapes.profile,
            rows_held=shapes.rows_held,
            prepares=not options.is_deterministic,  # Deterministic engines have only one batch size.
            padding=padding,
            shapes=_shapes_to_capture(model, padding, capacity, shapes),
        )
        is_free = model.capabilities.rows_fixed is None and not (is_alone(model) or options.is_deterministic)
        if is_free and model.capabilities.changes_slowly and not pool.prepared:
            # Few sizes, so that no more of them are planned anew than need be.
            pool.prepared = tuple(sorted({*pool.captured.sizes, *few_sizes((), capacity.rows_max)}))
        shapes.restrict(pool.prepared)
        builder = _builder(model, device, options, capacity, pool)
        if builder is not None:
            shapes.may_specialise = True
        if pool.may_grow and builder is None and capacity.graphs and options.graphs != "auto":
            logger.warning(
                "graphs is %s, but rows of %r vary in shape: its batches are put on the device call by call. "
                "Graphs are captured if pad gives the sizes of each dimension that varies, for at most %d "
                "shapes, and max_rows rows of each take at most %d MiB",
                options.graphs,
                model.name,
                SHAPES_MAX,
                BATCH_NBYTES_MAX >> 20,
            )
    except BaseException:
        if arenas is not None and arenas is not shared:
            arenas.close()
        raise
    own = () if arenas is None or arenas is shared else (arenas,)
    return EngineParts(
        device, model, pool, arenas, shapes, capacity, owned=own, padding=padding, builder=builder
    )


def _builder(
    model: Model, device: Device, options: Options, capacity: Capacity, pool: ContextPool
) -> Builder | None:
    """Return the builder of contexts for recurring shapes; ``None`` if all shapes are known, or gain
    nothing."""
    if not (pool.may_grow and is_specialisable(model)) or options.is_deterministic:
        return None
    captures = options.graphs != "off" and (device.prefers_graphs or options.graphs != "auto")
    return Builder(device, cast("CapableModel", model), capacity.contexts, captures=captures)
