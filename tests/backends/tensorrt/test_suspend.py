"""Weights that are taken off the device, and loaded again, under contexts that stay."""

import gc

import pytest

from asynctrt.backends.base import SuspendableModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError, ExecutionError, OptionsError, UsageError
from asynctrt.testing.tensorrt import EngineSpec

RTX = "tensorrt_rtx"
SPEC = EngineSpec(weights_nbytes=1 << 20)


@pytest.fixture
def made(bench):
    made = bench(SPEC, double=RTX, suspendable=True)
    assert isinstance(made.model, SuspendableModel)
    return made


def held(made):
    return made.model.memory_statistics().held_nbytes


def test_contexts_run_again(made):
    assert made.model.weights_nbytes == held(made) == 1 << 20
    context = made.model.create_context(made.device)
    binding, arena = made.bind(context), made.arena()
    for seed in range(3):
        made.run(binding, 5, arena, seed=seed)
        for _ in range(2):
            made.model.suspend([context])
            assert held(made) == 0
        with pytest.raises(ExecutionError, match="Load weights before calling"):
            binding.enqueue(5, profile=None, stream=made.stream, arena=arena)
        for _ in range(2):
            made.model.resume()
            assert held(made) == 1 << 20
    made.run(binding, 5, arena)
    context.close()


def test_others_may_run(made):
    contexts = [made.model.create_context(made.device) for _ in range(2)]
    with pytest.raises(UsageError, match="1 of its contexts belong to somebody else"):
        made.model.suspend(contexts[:1])
    assert held(made) == 1 << 20
    for context in contexts:
        context.close()


@pytest.mark.parametrize("double", [RTX, "tensorrt"])
def test_a_plan_that_was_not_opened_for_it(bench, double):
    model = bench(SPEC, double=double).model
    model.resume()
    for call in (model.check_suspendable, model.suspend):
        with pytest.raises(UsageError, match=r"tensorrt=\{'suspendable': True\}"):
            call([])


def test_no_room_any_more(made, monkeypatch):
    made.model.suspend([])

    def full(self, nbytes):
        raise DeviceMemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(HostDevice, "allocate", full)
        with pytest.raises(
            DeviceMemoryError, match="loading the weights of 'plan' failed for lack of memory"
        ):
            made.model.resume()
    assert held(made) == 0
    made.model.resume()
    assert held(made) == 1 << 20


def test_no_room_at_first(bench):
    made = bench(SPEC, double=RTX, model=False, suspendable=True, memory_budget=1 << 19)
    with pytest.raises(DeviceMemoryError, match="loading the weights .* memory_budget"):
        made.open()
    gc.collect()
    assert made.device.memory().held_nbytes == 0


def test_what_the_library_refuses(made, monkeypatch):
    monkeypatch.setattr(made.trt.ICudaEngine, "unload_weights", lambda self: False)
    with pytest.raises(ExecutionError, match="unloading the weights of 'plan' failed"):
        made.model.suspend([])
    assert held(made) == 1 << 20


def test_it_can_be_closed_meanwhile(made):
    made.model.suspend([])
    made.model.close()
    assert made.device.memory().held_nbytes == 0
    for call in (lambda: made.model.suspend([]), made.model.resume):
        with pytest.raises(UsageError, match="is closed"):
            call()


@pytest.mark.parametrize("other", [{"refit_from": __file__}, {"weight_streaming_budget": 0}])
def test_options_that_do_not_go_with_it(bench, other):
    with pytest.raises(OptionsError, match="suspendable: .* Leave out suspendable or"):
        bench(model=False, suspendable=True, **other)
