"""Contexts of the double: settings, refusals and violations."""

import gc
import threading

import numpy as np
import pytest

from asynctrt.devices.host import HostDevice
from asynctrt.testing import LatchDevice
from tests.doubles.support import (
    WAIT_S,
    Bench,
    rows,
    same,
    two_profiles,
    wait,
)
from tests.doubles.tensorrt import EngineSpec, TensorIO, ViolationError

TWO_PROFILES = (
    {"input": ((1, 16), (2, 16), (4, 16))},
    {"input": ((1, 16), (16, 16), (64, 16))},
)


@pytest.fixture
def bench():
    made = []

    def make(*args, **kwargs):
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def violated(bench, match):
    """That the call raises, and that it is remembered."""

    class Check:
        def __enter__(self):
            self.raises = pytest.raises(ViolationError, match=match)
            self.before = len(bench.trt.violations())
            return self.raises.__enter__()

        def __exit__(self, *raised):
            done = self.raises.__exit__(*raised)
            assert len(bench.trt.violations()) == self.before + 1
            return done

    return Check()


# What works


def test_a_profile_is_not_switched_while_a_batch_is_pending(bench):
    """Not on the batch's own stream either: the library asks for it, and looks at nothing."""
    made = bench(two_profiles(), device=LatchDevice())
    user, stream = made.user().give(rows(4, 16)), made.stream()
    assert user.context.execute_async_v3(stream.handle)
    assert user.context.set_optimization_profile_async(0, stream.handle), "which it has already"
    with violated(made, "its profile is switched while batch .* is pending"):
        user.context.set_optimization_profile_async(1, stream.handle)
    made.device.open()
    assert wait(made.device, stream) is None
    assert user.context.set_optimization_profile_async(1, stream.handle)
    # A switch that is pending is in order with the next one on its stream.
    made.device.shut()
    for index in (0, 1):
        assert user.context.set_optimization_profile_async(index, stream.handle)
    made.device.open()


TWO_INPUTS = EngineSpec(inputs=(TensorIO("a"), TensorIO("b", dims=(-1, 4))))


def test_inputs_with_different_numbers_of_rows_do_not_fit_together(bench):
    made = bench(TWO_INPUTS)
    user, stream = made.user().give({"a": rows(4, 16), "b": rows(4, 4)}), made.stream()
    context = user.context
    assert context.set_input_shape("b", (5, 4)), "each for itself is within the profile"
    with pytest.raises(RuntimeError, match="infer_shapes error code: -1"):
        context.infer_shapes()
    code, said = made.recorder.last()
    assert code == made.trt.ErrorCodeTRT.FAILED_EXECUTION
    assert said.startswith("IExecutionContext::inferShapes: Error Code 7: Internal Error (a and b: ")
    assert "Condition '==' violated: 4 != 5" in said
    reported = len(made.recorder.errors)
    assert not context.execute_async_v3(stream.handle)
    assert [text.split(":: ")[0] for _, text in made.recorder.errors[reported:]] == [
        text.split(":: ")[0] for _, text in made.recorder.errors[reported:] if "CHECK_EQUAL 4 5" in text
    ]
    assert len(made.recorder.errors) == reported + 1
    user.give({"a": rows(5, 16), "b": rows(5, 4)}).run(stream)
    user.check()
    assert made.trt.violations() == ()


def test_a_context_can_have_enqueue_memory_of_its_own(bench):
    made = bench(EngineSpec(profiles=TWO_PROFILES))
    user, stream = made.user(strategy="STATIC"), made.stream()
    user.give(rows(3, 16)).run(stream)
    user.check()
    assert user.context.set_optimization_profile_async(1, stream.handle)
    user.give(rows(60, 16)).run(stream)
    user.check()
    with violated(made, "created with STATIC"):
        user.context.set_device_memory(user.arena.address, user.arena.nbytes)


def test_a_data_dependent_output_goes_through_its_allocator(bench):
    made = bench(EngineSpec(data_dependent=True))
    user, stream = made.user(), made.stream()
    for count in (2, 40, 5):
        user.give(rows(count, 16, seed=count))
        assert tuple(user.context.get_tensor_shape("positives")) == (count, -1)
        expected = made.spec.expected(user.arrays)
        same(user.run(stream), expected)
        # First a guess, and then, in the middle of the enqueue, what it takes.
        assert user.allocators["positives"].asked == [
            ("positives", 0, count * 4, 256, stream.handle),
            ("positives", 0, expected["positives"].nbytes, 256, stream.handle),
        ]


@pytest.mark.parametrize("which", [1, 2], ids=["the guess", "in the middle"])
def test_memory_for_an_output_that_is_refused(bench, which):
    """In the middle of the enqueue, the rest of its batch is on the stream, and the device goes on."""
    made = bench(EngineSpec(data_dependent=True, work_ns=10_000_000))
    user, stream = made.user().give(rows(4, 16)), made.stream()
    kind = type(user.allocators["positives"])
    ask, asked = kind.reallocate_output_async, []

    def refuse(self, *args):
        asked.append(args)
        return 0 if len(asked) == which else ask(self, *args)

    kind.reallocate_output_async = refuse
    assert not user.context.execute_async_v3(stream.handle)
    code, said = made.recorder.last()
    assert code == made.trt.ErrorCodeTRT.INTERNAL_ERROR
    size = asked[-1][2]
    assert f"IOutputAllocator returned nullptr for allocation request of {size} bytes." in said
    assert wait(made.device, stream) is None
    if which == 2:
        (output,) = (user.outputs[name].array(np.dtype("f4"), (4, 16), 0) for name in user.outputs)
        same({"output": output}, {"output": made.spec.expected(user.arrays)["output"]})
    same(user.run(stream), made.spec.expected(user.arrays))
    assert made.trt.violations() == ()


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("reallocate_output_async", lambda *_: None, "returned None, of which the bindings complain"),
        ("reallocate_output_async", lambda *_: 128, "which is not aligned to 256"),
        ("reallocate_output_async", lambda: 0, "of 'positives' raised TypeError"),
        ("notify_shape", lambda: 0, "notify_shape of 'positives' raised TypeError"),
    ],
)
def test_an_output_allocator_of_which_nobody_hears(bench, method, does, said):
    made = bench(EngineSpec(data_dependent=True))
    user, stream = made.user().give(rows(4, 16)), made.stream()
    setattr(type(user.allocators["positives"]), method, does)
    with violated(made, said):
        user.context.execute_async_v3(stream.handle)
    assert wait(made.device, stream) is None


# What raises


def test_an_enqueue_without_an_output_allocator(bench):
    made = bench(EngineSpec(data_dependent=True))
    user = made.user().give(rows(4, 16))
    spare = made.device.allocate(1 << 12)
    user.context.set_output_allocator("positives", None)
    user.context.set_tensor_address("positives", spare.address)
    with violated(made, "without an output allocator for 'positives'"):
        user.context.execute_async_v3(made.stream().handle)


def test_an_output_allocator_that_is_gone(bench):
    made = bench(EngineSpec(data_dependent=True))
    user = made.user().give(rows(4, 16))
    user.allocators.clear()
    gc.collect()
    with violated(made, "output allocator of 'positives' was destroyed"):
        user.context.execute_async_v3(made.stream().handle)


def test_enqueue_memory_that_is_too_small(bench):
    made = bench(EngineSpec(profiles=TWO_PROFILES))
    user = made.user()
    small, large = (made.engine.get_device_memory_size_for_profile_v2(index) for index in (0, 1))
    user.context.set_device_memory(user.arena.address, small - 256)
    assert f"too small. Provided {small - 256}, but expected at least {small}" in made.recorder.last()[1]
    user.context.set_device_memory(0, large)
    assert "Cannot set memory to nullptr" in made.recorder.last()[1]
    user.give(rows(4, 16)).run()  # In the memory that it had.
    user.check()
    user.context.set_device_memory(user.arena.address, large - 256)
    stream = made.stream()
    assert user.context.set_optimization_profile_async(1, stream.handle)
    user.give(rows(64, 16))
    with violated(made, f"executes with {large - 256} bytes of enqueue memory, but needs {large}"):
        user.context.execute_async_v3(stream.handle)


def test_enqueue_memory_without_a_size(bench):
    made = bench()
    context = made.user().context
    with violated(made, "use set_device_memory"):
        context.device_memory = 1 << 20


def test_memory_that_overlaps(bench):
    made = bench()
    user = made.user().give(rows(4, 16))
    address = user.context.get_tensor_address("input")
    user.context.set_tensor_address("output", address)
    with violated(made, "overlap in memory"):
        user.context.execute_async_v3(made.stream().handle)
    for offset in (256, user.arena.nbytes - 256):  # All of the memory that was given, however few rows.
        user.context.set_tensor_address("output", user.arena.address + offset)
        with violated(made, "the enqueue memory and 'output' overlap"):
            user.context.execute_async_v3(made.stream().handle)


def test_a_stream_of_nobody(bench):
    made = bench()
    user = made.user().give(rows(4, 16))
    for handle in (0, 987_654):
        with violated(made, f"no stream of .* has the handle {handle}"):
            user.context.execute_async_v3(handle)
        with violated(made, f"no stream of .* has the handle {handle}"):
            user.context.set_optimization_profile_async(0, handle)
        with violated(made, f"no stream of .* has the handle {handle}"):
            user.context.set_aux_streams([handle])


def test_auxiliary_streams_that_are_not_all_different(bench):
    made = bench(EngineSpec(aux_streams=2))
    user, stream = made.user().give(rows(4, 16)), made.stream()
    with violated(made, "not all different"):
        user.context.set_aux_streams([stream.handle, stream.handle])
    user.context.set_aux_streams([stream.handle])
    with violated(made, "both its main stream and an auxiliary one"):
        user.context.execute_async_v3(stream.handle)


def test_an_enqueue_while_another_is_pending_on_another_stream(bench):
    made = bench(device=LatchDevice())
    user = made.user().give(rows(4, 16))
    first, second = made.stream(), made.stream()
    assert user.context.execute_async_v3(first.handle)
    with violated(made, f"executes on stream {second.handle} while batch .* is pending on stream"):
        user.context.execute_async_v3(second.handle)
    with violated(made, "its profile is switched on stream"):
        user.context.set_optimization_profile_async(0, second.handle)
    made.device.open()
    assert wait(made.device, first) is None
    assert user.context.execute_async_v3(second.handle)
    assert wait(made.device, second) is None


def test_a_context_that_two_threads_use_at_once(bench):
    made = bench(EngineSpec(data_dependent=True))
    user, stream = made.user().give(rows(4, 16)), made.stream()
    inside, leave = threading.Event(), threading.Event()
    ask = type(user.allocators["positives"]).reallocate_output_async

    def slow(self, *args):
        inside.set()
        assert leave.wait(WAIT_S)
        return ask(self, *args)

    type(user.allocators["positives"]).reallocate_output_async = slow
    answers = []
    thread = threading.Thread(target=lambda: answers.append(user.context.execute_async_v3(stream.handle)))
    thread.start()
    assert inside.wait(WAIT_S)
    try:
        with violated(made, "used by two threads at once: set_input_shape"):
            user.context.set_input_shape("input", (2, 16))
        with violated(made, "used by two threads at once: execute_async_v3"):
            user.context.execute_async_v3(stream.handle)
    finally:
        leave.set()
        thread.join(WAIT_S)
    assert answers == [True]
    assert wait(made.device, stream) is None
    same(user.answers(), made.spec.expected(user.arrays))
    # One after the other they may.
    user.run(stream)


def test_contexts_of_one_engine_are_created_and_used_by_several_threads(bench):
    made = bench(device=HostDevice(threads=2))
    failed = []

    def work(seed):
        try:
            user, stream = made.user(), made.device.create_stream()
            for turn in range(10):
                user.give(rows(1 + turn, 16, seed=seed)).run(stream)
                user.check()
            assert stream.close(WAIT_S)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert failed == []
    assert made.trt.violations() == ()


def test_a_context_that_is_destroyed_while_its_batch_is_in_flight(bench):
    made = bench(device=LatchDevice())
    user, stream = made.user().give(rows(4, 16)), made.stream()
    assert user.context.execute_async_v3(stream.handle)
    user.context = None
    gc.collect()
    assert "was destroyed while batch" in made.trt.violations()[0]
    with pytest.raises(ViolationError, match="was destroyed while batch"):
        made.engine.create_execution_context()
    # It is raised once.
    assert made.engine.create_execution_context()
    made.device.open()


def test_a_context_that_is_destroyed_when_its_batch_is_through(bench):
    made = bench()
    user = made.user().give(rows(4, 16))
    user.run()
    user.context = user.engine = made.engine = None
    gc.collect()
    assert made.trt.violations() == ()
    assert made.allocator.held == {}


def test_to_ask_for_a_profile_of_another_context_crashes_with_tensorrt_8(bench):
    made = bench(start=False, version="8.6.1.6")
    engine = made.load(EngineSpec(shares_profiles=False), version="8.6.1.6")
    _first, second = (engine.create_execution_context() for _ in range(2))
    with pytest.raises(ViolationError, match="refused a profile"):
        second.set_optimization_profile_async(0, made.stream().handle)


def test_a_profile_that_is_not_shared_belongs_to_one_context(bench):
    made = bench(start=False, version="10.16.1.11")
    made.runtime.engine_host_code_allowed = True
    spec = EngineSpec(profiles=TWO_PROFILES, shares_profiles=False, version_compatible=True)
    engine = made.load(spec, version="8.6.1.6")
    strategy = made.trt.ExecutionContextAllocationStrategy.STATIC
    first, second = (engine.create_execution_context(strategy) for _ in range(2))
    stream = made.stream()
    assert (first.active_optimization_profile, second.active_optimization_profile) == (0, -1)
    assert "Could not set default profile 0 for execution context" in made.logger.said[-1][1]
    assert not second.set_input_shape("input", (4, 16))
    assert "Profile index must be set explicitly" in made.recorder.last()[1]
    assert not second.execute_async_v3(stream.handle)
    with pytest.raises(RuntimeError, match="Error in set optimization profile async"):
        second.set_optimization_profile_async(0, stream.handle)
    code, said = made.recorder.last()
    assert code == made.trt.ErrorCodeTRT.INVALID_ARGUMENT
    assert "Error Code 3: Internal Error (Profile 0 has been chosen by another IExecutionContext." in said
    assert second.set_optimization_profile_async(1, stream.handle)
    with pytest.raises(RuntimeError):
        first.set_optimization_profile_async(1, stream.handle)
    assert first.active_optimization_profile == 0
    assert first.set_optimization_profile_async(0, stream.handle), "which it has"
    assert wait(made.device, stream) is None
    del first
    gc.collect()
    assert second.set_optimization_profile_async(0, stream.handle)
    assert wait(made.device, stream) is None
    third = engine.create_execution_context(strategy)
    assert third.active_optimization_profile == -1
    assert third.set_optimization_profile_async(1, stream.handle), "which the second has left"
    assert wait(made.device, stream) is None
    assert made.trt.violations() == ()


def test_profiles_are_shared_if_the_plan_was_built_so_and_in_every_later_version(bench):
    made = bench(start=False, version="8.6.1.6")
    engine = made.load(EngineSpec(), version="8.6.1.6")
    contexts = [engine.create_execution_context() for _ in range(2)]
    assert [context.active_optimization_profile for context in contexts] == [0, 0]
    older = bench(start=False, version="8.5.3.1")
    engine = older.load(EngineSpec(), version="8.5.3.1")
    contexts = [engine.create_execution_context() for _ in range(2)]
    assert [context.active_optimization_profile for context in contexts] == [0, -1]
