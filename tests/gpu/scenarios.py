"""What the real TensorRT and the double are both put through.

A step that may end the process, or that leaves undefined what follows, is the last of its scenario, which has
a process of its own then.
"""

import gc

from tests.doubles.support import make_logger, wait
from tests.gpu.sides import same

SCENARIOS = {}
RISKY = set()
"""Those that may end the process, or leave it in another state than they found it."""

OF_A_TENSOR = (
    "get_tensor_mode",
    "get_tensor_dtype",
    "get_tensor_shape",
    "get_tensor_location",
    "is_shape_inference_io",
    "get_tensor_vectorized_dim",
)
"""What an engine tells about one tensor."""

OF_AN_ENGINE = (
    *("num_optimization_profiles", "num_aux_streams", "refittable"),
    *("engine_capability", "hardware_compatibility_level"),
)


def scenario(function):
    """Note a scenario by its function's name."""
    SCENARIOS[function.__name__] = function
    return function


def risky(function):
    """Note a scenario that has a process of its own, after the others."""
    RISKY.add(function.__name__)
    return scenario(function)


def opened(side, *plan):
    side.open(*plan)
    return side.context(), side.stream()


# Engines


def describe(side, plan):
    engine = side.attempt("deserialise", lambda: side.open(plan))
    inputs, outputs = side.tensors()
    side.note("tensors", [sorted(inputs), sorted(outputs)])
    for name in (*inputs, *outputs):
        for call in OF_A_TENSOR:
            side.attempt(f"{call} of {name}", lambda call=call, name=name: getattr(engine, call)(name))
    for profile in range(engine.num_optimization_profiles):
        side.attempt(f"profile {profile}", lambda at=profile: engine.get_tensor_profile_shape(inputs[0], at))
    for name in OF_AN_ENGINE:
        side.attempt(name, lambda name=name: getattr(engine, name))
    side.attempt("has enqueue memory", lambda: engine.device_memory_size > 0)


@scenario
def engine_of_one_profile(side):
    describe(side, "mlp")


@scenario
def engine_of_two_profiles(side):
    describe(side, "encoder2")


@risky
def sizes_of_memory(side):
    engine = side.open("encoder2")
    side.attempt("device_memory_size_v2", lambda: engine.device_memory_size_v2)
    side.attempt("of profile 0", lambda: engine.get_device_memory_size_for_profile_v2(0))
    side.attempt("of profile 9", lambda: engine.get_device_memory_size_for_profile_v2(9))
    side.attempt("of a profile, without a size", lambda: engine.get_device_memory_size_for_profile(0) > 0)


@scenario
def stat_of_weights(side):
    engine, stats = side.open(), getattr(side.trt, "EngineStat", None)
    side.attempt("all weights", lambda: engine.get_engine_stat(stats.TOTAL_WEIGHTS_SIZE) > 0)
    side.attempt("stripped weights", lambda: engine.get_engine_stat(stats.STRIPPED_WEIGHTS_SIZE))


@scenario
def aliased_input(side):
    engine = side.open()
    side.attempt("of an output", lambda: engine.get_aliased_input_tensor("y"))


@scenario
def names_that_an_engine_lacks(side):
    engine = side.open()
    for call in OF_A_TENSOR:
        side.attempt(call, lambda call=call: getattr(engine, call)("nobody"))
    side.attempt("shape in a profile", lambda: engine.get_tensor_profile_shape("nobody", 0))


@scenario
def profile_shape_of_an_output(side):
    engine = side.open()
    side.attempt("of an output", lambda: engine.get_tensor_profile_shape("y", 0))


@scenario
def profile_shape_of_no_profile(side):
    engine = side.open()
    side.attempt("in profile 9", lambda: engine.get_tensor_profile_shape("x", 9))


@scenario
def tensor_name_out_of_range(side):
    engine = side.open()
    side.attempt("tensor 9", lambda: engine.get_tensor_name(9))


# Plans


def refused(side, content, runtime=None):
    runtime = runtime or side.start()
    side.attempt("deserialise", lambda: runtime.deserialize_cuda_engine(content))


@scenario
def plan_that_is_empty(side):
    refused(side, b"")


@scenario
def plan_that_is_something_else(side):
    refused(side, bytes(range(256)) * 16)


@scenario
def plan_that_is_truncated(side):
    plan = side.plan("mlp")
    refused(side, plan[: len(plan) // 2])


@scenario
def plan_of_its_header(side):
    refused(side, side.plan("mlp")[:64])


@scenario
def plan_of_a_later_version(side):
    plan = bytearray(side.plan("mlp"))
    plan[24:28] = bytes((99, 1, 0, 0))
    refused(side, bytes(plan))


@scenario
def plan_that_is_no_bytes(side):
    refused(side, "a string")


@scenario
def plan_without_its_lean_runtime(side):
    side.start()
    refused(side, side.plan("mlp"), side.root)


@scenario
def lean_runtime_that_is_not_there(side):
    side.start()
    side.attempt("load", lambda: side.root.load_runtime("/nowhere/libnvinfer_lean.so.8"))


@scenario
def lean_runtime_that_is_no_library(side):
    side.start()
    path = side.folder / "text.so"
    path.write_text("no library")
    side.attempt("load", lambda: side.root.load_runtime(str(path)))


# Runtimes, loggers, recorders


@scenario
def settings_of_a_runtime(side):
    runtime = side.start()
    side.attempt("host code", lambda: side.root.engine_host_code_allowed)
    side.attempt("allocator", lambda: runtime.gpu_allocator)
    side.attempt("no allocator", lambda: setattr(runtime, "gpu_allocator", None))
    side.attempt("recorder", lambda: runtime.error_recorder is side.recorder)
    side.attempt("logger", lambda: side.root.logger is side.logger)


@scenario
def interfaces_that_were_not_initialised(side):
    class Logger(side.trt.ILogger):
        def __init__(self):
            pass

    side.attempt("logger", lambda: side.trt.Runtime(Logger()))
    runtime = side.start()
    side.attempt("something else", lambda: setattr(runtime, "gpu_allocator", object()))


@risky
def recorder_is_inherited(side):
    engine = side.open()
    side.attempt("by the engine", lambda: engine.error_recorder is side.recorder)
    context = side.context()
    side.attempt("by a context", lambda: context.error_recorder is side.recorder)
    side.attempt("an error", lambda: context.set_input_shape("nobody", (1, 64)))
    side.attempt("taken off", lambda: setattr(context, "error_recorder", None))
    side.attempt("none", lambda: context.error_recorder)
    side.attempt("an error without it", lambda: context.set_input_shape("nobody", (1, 64)))
    side.attempt("one of the engine", lambda: engine.get_tensor_mode("nobody"))


@scenario
def errors_without_a_recorder(side):
    engine = side.open(recorder=False)
    side.attempt("recorder", lambda: engine.error_recorder)
    side.attempt("an error", lambda: engine.get_tensor_mode("nobody"))


@scenario
def second_logger(side):
    side.start()
    other = make_logger(side.trt)
    runtime = side.trt.Runtime(other)
    side.attempt("runtime", lambda: runtime)
    side.note("warned", [any("differs" in text for _, text in one.said) for one in (side.logger, other)])


# Life cycle


@scenario
def engine_outlives_its_runtime(side):
    side.open()
    if side.runtime is not side.root:
        side.kept.append(side.root)
    side.root = side.runtime = None
    gc.collect()
    side.attempt("run", lambda: sorted(side.run(side.context(), 4, 64)))


@scenario
def context_outlives_its_engine(side):
    side.open()
    context, before = side.context(), None
    before = side.run(context, 4, 64)
    engine, side.engine = side.engine, None
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    del engine
    gc.collect()
    side.attempt("name", lambda: context.engine.get_tensor_name(0) in names)
    side.engine = context.engine
    side.attempt("the same answers", lambda: same(before, side.run(context, 4, 64)))


@risky
def lean_runtime_outlives_what_loaded_it(side):
    side.start()
    side.root = None
    gc.collect()
    side.attempt("deserialise", lambda: side.runtime.deserialize_cuda_engine(side.plan("mlp")))


@scenario
def memory_is_given_back(side):
    side.open("encoder2")
    side.note("an engine holds some", bool(side.allocator.held))
    before = set(side.allocator.held)
    context = side.engine.create_execution_context()
    side.note("a context holds some", set(side.allocator.held) > before)
    del context
    gc.collect()
    side.note("without a context", set(side.allocator.held) == before)
    side.engine = None
    gc.collect()
    side.note("without an engine", len(side.allocator.held))
    side.note("methods", sorted(set(side.allocator.calls)))


# Shapes


@scenario
def shapes(side):
    side.open()
    context = side.context()
    side.attempt("at first", lambda: context.get_tensor_shape("x"))
    side.attempt("of the output", lambda: context.get_tensor_shape("y"))
    side.attempt("missing", context.infer_shapes)
    side.attempt("all are there", lambda: context.all_binding_shapes_specified)
    side.attempt("set", lambda: context.set_input_shape("x", (4, 64)))
    side.attempt("then", lambda: context.get_tensor_shape("y"))
    side.attempt("missing then", context.infer_shapes)
    side.attempt("all are there then", lambda: context.all_binding_shapes_specified)
    for given in ((65, 64), (0, 64), (-1, 64), (4, 63), (4,), (4, 64, 1), ()):
        side.attempt(f"set {given}", lambda given=given: context.set_input_shape("x", given))
        side.attempt(f"after {given}", lambda: context.get_tensor_shape("x"))
    side.attempt("of an output", lambda: context.set_input_shape("y", (4, 16)))
    side.attempt("of nobody", lambda: context.set_input_shape("nobody", (4, 16)))
    side.attempt("nine dimensions", lambda: context.set_input_shape("x", (1,) * 9))
    side.attempt("shape of nobody", lambda: context.get_tensor_shape("nobody"))


@scenario
def enqueue_after_a_shape_that_was_refused(side):
    context, stream = opened(side)
    side.give(context, 4, 64)
    side.attempt("refused", lambda: context.set_input_shape("x", (65, 64)))
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))


@scenario
def enqueue_without_shapes(side):
    context, stream = opened(side)
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))


@scenario
def enqueue_without_addresses(side):
    context, stream = opened(side)
    context.set_input_shape("x", (4, 64))
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))


@scenario
def enqueue_without_an_output(side):
    context, stream = opened(side)
    side.give(context, 4, 64)
    context.set_tensor_address("y", 0)
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))


# Running


@scenario
def answers(side):
    side.open()
    context = side.context()
    first = side.attempt("run", lambda: side.run(context, 4, 64)) and side.run(context, 4, 64)
    side.note("again", same(first, side.run(context, 4, 64)))
    side.note("in another context", same(first, side.run(side.context(), 4, 64)))
    own = side.engine.create_execution_context()
    side.note("with memory of its own", same(first, side.run(own, 4, 64)))
    side.note("another batch", same(first, side.run(context, 4, 64, seed=1)))
    side.note("after other shapes", sorted(side.run(context, 64, 64)) == sorted(first))
    side.note("and back", same(first, side.run(context, 4, 64)))


@scenario
def two_contexts_at_once(side):
    side.open("encoder2")
    contexts = [side.context() for _ in range(2)]
    expected = [side.run(contexts[0], 16, 16, seed=seed) for seed in range(2)]
    streams = [side.stream() for _ in contexts]
    arrays = [side.give(context, 16, 16, seed=seed) for seed, context in enumerate(contexts)]
    for number, (context, stream) in enumerate(zip(contexts, streams, strict=True)):
        side.attempt(f"enqueue {number}", lambda one=context, on=stream: one.execute_async_v3(on.handle))
    for stream in streams:
        side.finish(stream)
    side.note("answers", [same(a, b) for a, b in zip(expected, arrays, strict=True)])


@scenario
def sixteen_contexts(side):
    side.open()
    contexts = [side.context() for _ in range(16)]
    first = side.run(contexts[0], 4, 64)
    side.note("answers", all(same(first, side.run(one, 4, 64)) for one in contexts))
    side.note("profiles", [one.active_optimization_profile for one in contexts])


@scenario
def settings_of_a_context(side):
    side.open()
    context = side.context()
    side.attempt("temporary allocator", lambda: context.temporary_allocator)
    side.attempt("set it", lambda: setattr(context, "temporary_allocator", side.allocator))
    side.attempt("then", lambda: context.temporary_allocator is side.allocator)
    side.attempt("run", lambda: sorted(side.run(context, 4, 64)))
    side.attempt("no auxiliary streams", lambda: context.set_aux_streams([]))


@scenario
def addresses(side):
    side.open()
    context = side.context()
    side.attempt("at first", lambda: context.get_tensor_address("x"))
    side.attempt("of nobody", lambda: context.set_tensor_address("nobody", 256))
    side.attempt("of nobody, read", lambda: context.get_tensor_address("nobody"))
    side.attempt("unset", lambda: context.set_tensor_address("x", 0))
    buffer = side.keep(side.device.allocate(1 << 16))
    side.attempt("set", lambda: context.set_tensor_address("x", buffer.address))
    side.attempt("then", lambda: context.get_tensor_address("x") == buffer.address)


@scenario
def address_that_is_not_aligned(side):
    side.open()
    context = side.context()
    buffer = side.keep(side.device.allocate(1 << 16))
    side.attempt("set", lambda: context.set_tensor_address("x", buffer.address + 1))


# Profiles


@scenario
def profiles(side):
    side.open("encoder2")
    contexts, stream = [side.context() for _ in range(2)], side.stream()
    side.note("at first", [one.active_optimization_profile for one in contexts])
    first = contexts[0]
    side.attempt("a shape of the other", lambda: first.set_input_shape("ids", (16, 128)))
    side.attempt("a shape", lambda: first.set_input_shape("ids", (16, 16)))
    side.attempt("the same profile", lambda: first.set_optimization_profile_async(0, stream.handle))
    side.attempt("shape after it", lambda: first.get_tensor_shape("ids"))
    side.attempt("the other profile", lambda: first.set_optimization_profile_async(1, stream.handle))
    side.finish(stream)
    side.attempt("shape then", lambda: first.get_tensor_shape("ids"))
    side.attempt("missing then", first.infer_shapes)
    side.note("then", [one.active_optimization_profile for one in contexts])
    side.attempt("run", lambda: sorted(side.run(first, 16, 128, stream=stream)))
    side.attempt("a shape of the first", lambda: first.set_input_shape("ids", (64, 16)))
    side.attempt("no such profile", lambda: first.set_optimization_profile_async(9, stream.handle))
    side.note("still", first.active_optimization_profile)
    side.attempt("back", lambda: first.set_optimization_profile_async(0, stream.handle))
    side.attempt("run then", lambda: sorted(side.run(first, 64, 16, stream=stream)))
    side.attempt("run the other", lambda: sorted(side.run(contexts[1], 64, 16)))


@scenario
def enqueue_after_a_profile_without_shapes(side):
    context, stream = opened(side, "encoder2")
    side.give(context, 16, 16)
    side.attempt("the other profile", lambda: context.set_optimization_profile_async(1, stream.handle))
    side.finish(stream)
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))


@risky
def output_of_a_shape_that_is_refused(side):
    """What the adapter goes by where ``infer_shapes`` would end the process."""
    side.open("encoder2")
    context = side.context()
    side.attempt("a shape of the other", lambda: context.set_input_shape("ids", (16, 128)))
    side.attempt("all are there", lambda: context.all_binding_shapes_specified)
    side.attempt("output", lambda: context.get_tensor_shape("pooled"))


# Enqueue memory


@scenario
def memory_without_a_size(side):
    side.open("encoder2")
    context = side.context()
    before = side.run(context, 16, 16)
    other = side.keep(side.device.allocate(max(256, side.engine.device_memory_size)))
    side.attempt("other memory", lambda: setattr(context, "device_memory", other.address))
    side.attempt("the same answers", lambda: same(before, side.run(context, 16, 16)))
    side.attempt("it can be read", lambda: context.device_memory)


@scenario
def memory_with_a_size(side):
    side.open("encoder2")
    context = side.context()
    memory = side.keep(side.device.allocate(1 << 26))
    side.attempt("set", lambda: context.set_device_memory(memory.address, memory.nbytes))
    side.give(context, 16, 16)
    side.attempt("too little", lambda: context.set_device_memory(memory.address, 256))


@scenario
def memory_of_a_context_that_has_its_own(side):
    side.open("encoder2")
    context = side.engine.create_execution_context()
    memory = side.keep(side.device.allocate(1 << 26))
    side.attempt("set", lambda: setattr(context, "device_memory", memory.address))
    side.attempt("run", lambda: sorted(side.run(context, 16, 16)))


@scenario
def memory_for_a_strategy(side):
    side.open("encoder2")
    held = len(side.allocator.held)
    strategies = getattr(side.trt, "ExecutionContextAllocationStrategy", None)
    create = side.engine.create_execution_context
    context = side.attempt("create", lambda: create(strategies.USER_MANAGED))
    side.note("takes memory", len(side.allocator.held) > held)
    side.attempt("run without setting any", lambda: sorted(side.run(context, 16, 16)))


@scenario
def enqueue_without_memory(side):
    side.open("encoder2")
    context, stream = side.engine.create_execution_context_without_device_memory(), side.stream()
    side.give(context, 16, 16)
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))
    side.attempt("wait", lambda: side.finish(stream))


@scenario
def memory_at_address_0(side):
    side.open("encoder2")
    context = side.context()
    side.attempt("set", lambda: setattr(context, "device_memory", 0))


@scenario
def memory_that_is_not_aligned(side):
    side.open("encoder2")
    context = side.context()
    memory = side.keep(side.device.allocate(1 << 26))
    side.attempt("set", lambda: setattr(context, "device_memory", memory.address + 1))


# Allocators that refuse


def refusing(side, answer=0, create="create_execution_context"):
    side.open("encoder2")
    side.context()
    side.allocator.refuses, side.allocator.answer = True, answer
    for number in range(8):
        side.attempt(f"context {number}", getattr(side.engine, create))
    side.note("calls", bool(side.allocator.calls))


@risky
def allocator_refuses_a_context(side):
    refusing(side)


@risky
def allocator_refuses_a_context_without_memory(side):
    refusing(side, create="create_execution_context_without_device_memory")


@risky
def allocator_answers_none(side):
    refusing(side, answer=None)


@risky
def allocator_refuses_an_engine(side):
    side.start()
    side.allocator.refuses = True
    side.attempt("deserialise", lambda: side.runtime.deserialize_cuda_engine(side.plan("mlp")))


@scenario
def allocator_raises(side):
    side.start()

    def fail(size, alignment, flags, stream=None):
        raise MemoryError("no memory today")

    type(side.allocator).allocate = type(side.allocator).allocate_async = staticmethod(fail)
    side.attempt("deserialise", lambda: side.runtime.deserialize_cuda_engine(side.plan("mlp")))


# Outputs


def output_allocator(side, nbytes=1 << 20, is_old=False):
    class OutputAllocator(side.trt.IOutputAllocator):
        def __init__(self):
            side.trt.IOutputAllocator.__init__(self)
            self.calls = []
            self.buffer = side.keep(side.device.allocate_staging(nbytes)) if nbytes else None

        def reallocate_output(self, tensor_name, memory, size, alignment):
            self.calls.append(["reallocate_output", tensor_name, bool(memory), size, alignment])
            return self.buffer.address if self.buffer else 0

        def notify_shape(self, tensor_name, shape):
            self.calls.append(["notify_shape", tensor_name, list(shape)])

    def in_order(self, tensor_name, memory, size, alignment, stream):
        self.calls.append(["reallocate_output_async", tensor_name, bool(memory), size, alignment])
        return self.buffer.address if self.buffer else 0

    if not is_old:
        OutputAllocator.reallocate_output_async = in_order
    return side.keep(OutputAllocator())


@risky
def allocator_of_an_output(side):
    context, stream = opened(side)
    for is_old in (False, True):
        allocator = output_allocator(side, is_old=is_old)
        side.give(context, 4, 64)
        side.attempt("set", lambda one=allocator: context.set_output_allocator("y", one))
        side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))
        side.finish(stream)
        side.note("calls", allocator.calls)


@risky
def settings_of_output_allocators(side):
    side.open()
    context, allocator = side.context(), output_allocator(side)
    side.attempt("of an input", lambda: context.set_output_allocator("x", allocator))
    side.attempt("of nobody", lambda: context.set_output_allocator("nobody", allocator))
    side.attempt("of an output", lambda: context.set_output_allocator("y", allocator))
    side.attempt("none", lambda: context.set_output_allocator("y", None))


@risky
def allocator_of_an_output_refuses(side):
    context, stream = opened(side)
    side.give(context, 4, 64)
    context.set_tensor_address("y", 0)
    context.set_output_allocator("y", output_allocator(side, nbytes=0))
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))


# Capture


@scenario
def capture(side):
    context, stream = opened(side)
    arrays = side.give(context, 4, 64)
    side.attempt("enqueue", lambda: context.execute_async_v3(stream.handle))
    side.finish(stream)
    expected = {name: array.copy() for name, array in arrays.items()}
    stream.begin_capture()
    side.attempt("while capturing", lambda: context.execute_async_v3(stream.handle))
    graph = stream.end_capture()
    for array in arrays.values():
        array[...] = 0
    graph.launch(stream=stream)
    side.finish(stream)
    side.note("the same answers", same(expected, arrays))


def captured_at_once(side, change):
    context, stream = opened(side, "encoder2")
    side.give(context, 16, 16)
    change(context, stream)
    stream.begin_capture()
    side.attempt("while capturing", lambda: context.execute_async_v3(stream.handle))
    side.attempt("end", lambda: bool(stream.end_capture()))


@risky
def capture_of_the_first_batch(side):
    captured_at_once(side, lambda context, stream: None)


@risky
def capture_after_other_shapes(side):
    def change(context, stream):
        assert context.execute_async_v3(stream.handle)
        side.finish(stream)
        side.give(context, 8, 24)

    captured_at_once(side, change)


@risky
def graph_after_other_shapes_and_back(side):
    context, stream = opened(side)
    side.run(context, 4, 64, stream=stream)
    side.give(context, 4, 64)
    assert context.execute_async_v3(stream.handle)
    side.finish(stream)
    stream.begin_capture()
    assert context.execute_async_v3(stream.handle)
    graph = stream.end_capture()
    context.set_input_shape("x", (8, 64))
    context.set_input_shape("x", (4, 64))
    graph.launch(stream=stream)
    wait(side.device, stream)
    side.attempt("next call", lambda: context.get_tensor_shape("x"))


# Misuse


@scenario
def enqueue_on_the_default_stream(side):
    side.open()
    context = side.context()
    side.give(context, 4, 64)
    side.attempt("enqueue", lambda: context.execute_async_v3(0))


@scenario
def auxiliary_streams_that_are_the_same(side):
    context, stream = opened(side)
    side.attempt("set", lambda: context.set_aux_streams([stream.handle, stream.handle]))


@risky
def recorder_that_is_gone(side):
    engine = side.open()
    other = type(side.recorder)()
    engine.error_recorder = other
    del other
    gc.collect()
    side.attempt("an error", lambda: engine.get_tensor_mode("nobody"))
