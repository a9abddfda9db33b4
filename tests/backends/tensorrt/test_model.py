"""A plan as a model: its description, its memory, and its end."""

import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    InputError,
    ModelError,
    UsageError,
)
from tests.backends.tensorrt.helpers import Bench, header
from tests.doubles.tensorrt import (
    EngineSpec,
    StrictTensorRT,
    TensorIO,
    double_plan,
    double_plugin_library,
)

ROOT = Path(__file__).parents[3]


def test_its_name_is_the_files_or_as_told(tmp_path):
    device = HostDevice()
    trt = StrictTensorRT(device)
    path = tmp_path / "resnet.plan"
    path.write_bytes(double_plan(EngineSpec()))
    for name, expected in ((None, "resnet"), ("classifier", "classifier")):
        model = TensorRTModel(path, device=device, flavour=trt, name=name)
        assert model.name == expected
        model.close()
    assert trt.violations() == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_models_of_one_library_are_closed_in_any_order(order):
    """The library keeps calling the first logger that it was given, whose model may be long gone."""
    device = HostDevice()
    trt = StrictTensorRT(device)
    models = [TensorRTModel(double_plan(EngineSpec()), device=device, flavour=trt) for _ in range(3)]
    for closed in order:
        models[closed].close()
        models[closed] = None
        gc.collect()
        for model in models:
            if model is not None:
                model.create_context(device).close()
    TensorRTModel(double_plan(EngineSpec()), device=device, flavour=trt).close()
    assert trt.violations() == ()


def test_profiles_and_their_memory(bench):
    small, large = {"input": ((1, 4), (4, 4), (8, 4))}, {"input": ((1, 4), (32, 32), (64, 128))}
    model = bench(EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), profiles=(large, small))).model
    assert model.profile_of(((4,),), 8) == 1
    assert model.profile_of(((4,),), 9) == 0
    large, small = (profile.enqueue_nbytes for profile in model.signature.profiles)
    assert small < large == model.capabilities.enqueue_nbytes
    with pytest.raises(InputError, match="profile 1 takes"):
        model.profile_of(((129,),), 1)


@pytest.mark.parametrize(
    ("version", "has_stats"),
    [("10.9.0.34", False), ("10.13.2.6", False), ("10.14.1.48", True), ("11.4.0.106", True)],
)
def test_versions_that_lack_something(bench, version, has_stats):
    """EngineStat, for one, came with 10.14."""
    device = HostDevice()
    trt = StrictTensorRT(device, version=version)
    assert hasattr(trt, "EngineStat") == has_stats
    spec = EngineSpec(weights_nbytes=5120)
    made = bench(spec, device=device, trt=trt, plan=double_plan(spec, version=version))
    assert made.model.weights_nbytes == 5120
    context = made.model.create_context(device)
    made.run(made.bind(context), 3, made.arena())
    context.close()


def test_a_plan_without_its_weights_is_refused(bench):
    made = bench(EngineSpec(stripped_weights_nbytes=3 << 20), model=False)
    with pytest.raises(
        ModelError, match=r"without 3.0 MiB of its weights \(BuilderFlag.STRIP_PLAN\).*refit_from=path"
    ):
        made.open()


def test_what_cannot_be_captured(bench):
    assert not bench(EngineSpec(data_dependent=True)).model.capabilities.is_capturable
    assert bench().model.capabilities.is_capturable


PLUGGED = EngineSpec(plugins=("EfficientNMS_TRT",))


def test_the_librarys_own_plugins_are_registered(bench):
    made = bench(PLUGGED)
    binding, arena = made.ready()
    made.run(binding, 3, arena)


def test_a_plugin_that_nobody_has_is_named(bench):
    with pytest.raises(ModelError, match=r"TensorRTOptions\(plugins=\[path\]\).*Cannot find plugin: Mine"):
        bench(EngineSpec(plugins=("Mine",)), model=False).open()


def test_libraries_of_plugins_are_loaded_once(bench, tmp_path):
    libraries = tmp_path / "libmine.so", tmp_path / "libother.so"
    libraries[0].write_bytes(double_plugin_library("Mine", "Yours"))
    libraries[1].write_bytes(double_plugin_library("Yours"))
    made = bench(EngineSpec(plugins=("Mine",)), plugins=[libraries[0]])
    again = made.open()
    again.close()
    for wrong in (libraries[1], ROOT / "README.md"):
        with pytest.raises(ModelError, match=r"cannot load the plugins of .*: the library cannot be opened"):
            bench(trt=made.trt, device=made.device, model=False, plugins=wrong).open()


def test_everything_is_given_back(bench, caplog):
    made = bench(EngineSpec(persistent_nbytes=3000, data_dependent=True))
    contexts = [made.create_context() for _ in range(3)]
    for context in contexts:
        context.close()
    assert made.model.memory_statistics().blocks == 1
    made.model.close()
    made.model.close()
    assert made.device.memory().held_nbytes == 0
    assert not caplog.records
    assert "closed" in repr(made.model)
    with pytest.raises(UsageError, match="is closed"):
        made.create_context()
    with pytest.raises(UsageError, match="is closed"):
        made.model.memory_statistics()


def test_contexts_outlive_their_model(bench, caplog):
    made = bench(EngineSpec(persistent_nbytes=3000))
    contexts = [made.create_context() for _ in range(2)]
    binding, arena = made.bind(contexts[0]), made.arena()
    made.model.close()
    assert "closed before 2 of its contexts" in caplog.text
    made.run(binding, 5, arena)
    contexts[1].close()
    made.run(binding, 5, arena)
    contexts[0].close()
    arena.close()
    for buffer in made._buffers:
        buffer.close()
    assert made.device.memory().held_nbytes == 0


def test_what_nobody_closed_is_given_back_too():
    """They are destroyed in whatever order the interpreter chooses."""
    made = Bench(EngineSpec(persistent_nbytes=3000, data_dependent=True))
    context = made.create_context()
    made.run(made.bind(context), 5, made.arena())
    device, trt, stream = made.device, made.trt, made.stream
    for buffer in made._buffers:
        buffer.close()
    held = device.memory().held_nbytes
    del made, context, buffer
    gc.collect()
    assert trt.violations() == ()
    assert device.memory().held_nbytes < held
    assert stream.close(20)


def test_a_lost_device_can_still_be_closed(bench, monkeypatch):
    made = bench(EngineSpec(data_dependent=True))
    context = made.create_context()
    made.run(made.bind(context), 5, made.arena())

    def lost():
        raise DeviceLostError("an illegal address")

    monkeypatch.setattr(made.device, "activate", lost)
    context.close()
    made.model.close()
    assert "closed" in repr(context)
    assert "closed" in repr(made.model)


def test_another_device(bench):
    made = bench()
    with pytest.raises(UsageError, match="once for each device"):
        made.model.create_context(HostDevice())


@pytest.mark.parametrize("flavour", ["tensorrt_lean", "tensorrt_dispatch", None])
def test_a_real_package_runs_on_cuda_alone(flavour):
    plan = double_plan(EngineSpec())
    with pytest.raises(DeviceUnavailableError, match="device='cuda:0'"):
        TensorRTModel(plan, device=HostDevice(), flavour=flavour)


def test_the_options_name_a_flavour_too(rtx_plan):
    with pytest.raises(ModelError, match="tensorrt_rtx"):
        TensorRTModel(rtx_plan(), device=HostDevice(), options=TensorRTOptions(flavour="tensorrt_lean"))


def test_a_header_with_nothing_that_it_announces(bench):
    with pytest.raises(ModelError, match="damaged"):
        bench(model=False).open(header(nbytes=80) + bytes(16))


def test_messages_go_to_the_logger(bench, caplog):
    with caplog.at_level(logging.DEBUG, "asynctrt.tensorrt"):
        bench(verbosity=logging.DEBUG)
    assert "Loaded engine size" in caplog.text


def test_importing_it_loads_no_library():
    program = (
        "import sys, asynctrt.backends.tensorrt\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "assert not names & {'tensorrt', 'tensorrt_lean', 'tensorrt_dispatch', 'tensorrt_rtx', 'cuda'}, names"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=50)
