"""What engines of each version can do, and how they run under a later library."""

import asyncio
import dataclasses

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.backends.tensorrt.abilities import Abilities
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.plan import read_header
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceMemoryError,
    ExecutionError,
    InternalError,
    ModelError,
    UsageError,
)
from tests.backends.tensorrt.helpers import WAIT_S, header
from tests.doubles.tensorrt import (
    EngineSpec,
    StrictTensorRT,
    TensorIO,
    double_lean_runtime,
    double_plan,
)

pytestmark = pytest.mark.anyio

VERSION = "8.6.1.6"
TWO = ({"input": ((1, 1), (4, 4), (8, 8))}, {"input": ((1, 1), (16, 8), (64, 32))})
SPECS = {
    "one profile": EngineSpec(shares_profiles=False),
    "two profiles": EngineSpec(
        inputs=(TensorIO("input", dims=(-1, -1)),), profiles=TWO, shares_profiles=False
    ),
}


@pytest.fixture
def load():
    made = []

    def load(spec, version=VERSION, **kw):
        device = HostDevice(in_place="never", unified=False, **kw)
        double = StrictTensorRT(device, version=version)
        model = TensorRTModel(double_plan(spec, version=version), device=device, flavour=double)
        made.append((model, double))
        return model

    yield load
    for model, double in made:
        model.close()
        assert double.violations() == ()


async def check(engine, spec, count=30):
    length = 16 if -1 not in spec.inputs[0].dims[1:] else None
    random = np.random.default_rng(1)
    sent = [
        random.integers(-9, 9, (1 + n % 5, length or 1 + 5 * n % 32)).astype(np.float32) for n in range(count)
    ]
    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(*[engine.infer(one) for one in sent])
    for given, result in zip(sent, results, strict=True):
        np.testing.assert_array_equal(result["output"], spec.expected(given)["output"])


@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("contexts", [1, 2, 8])
async def test_every_request_is_answered_by_the_one_context_that_can_be(load, caplog, kind, contexts):
    spec = SPECS[kind]
    model = load(spec)
    (warning,) = [text for text in caplog.messages if "PreviewFeature.PROFILE_SHARING_0806" in text]
    assert "runs on one execution context" in warning
    assert model.capabilities.contexts_max == 1
    assert not model.capabilities.is_capturable
    async with asynctrt.open(model, device=model.device, contexts=contexts) as engine:
        await check(engine, spec)
        assert (engine.statistics().contexts, engine.statistics().arenas) == (1, 1)


async def test_a_plan_that_shares_its_profiles_has_as_many_contexts_as_are_asked_for(load, caplog):
    spec = EngineSpec()
    model = load(spec)
    assert not caplog.records
    assert (model.capabilities.contexts_max, model.capabilities.is_capturable) == (None, True)
    async with asynctrt.open(model, device=model.device, contexts=3) as engine:
        assert engine.statistics().contexts == 3
        await check(engine, spec)


async def test_with_later_versions_it_is_known_and_not_tried(load, monkeypatch):
    made = []
    engine = StrictTensorRT(HostDevice()).ICudaEngine
    create = engine._create_context
    monkeypatch.setattr(engine, "_create_context", lambda *args: made.append(1) or create(*args))
    load(EngineSpec(), version="10.9.0.34")
    later = len(made)
    load(EngineSpec())
    assert (later, len(made) - later) == (1, 2)


async def test_a_second_engine_on_the_same_model_is_refused_when_it_is_opened(load):
    spec = SPECS["one profile"]
    model = load(spec)
    async with asynctrt.open(model, device=model.device) as engine:
        with pytest.raises(UsageError, match="has its only context already.*PROFILE_SHARING_0806"):
            await asynctrt.open(model, device=model.device)
        await check(engine, spec)
    async with asynctrt.open(model, device=model.device) as engine:
        await check(engine, spec)


async def test_it_works_in_arenas_that_are_shared(load):
    spec = SPECS["two profiles"]
    model = load(spec)
    with Arenas(model.device, 2) as arenas:
        async with asynctrt.open(model, device=model.device, contexts=4, shared_arenas=arenas) as engine:
            await check(engine, spec)


@pytest.mark.parametrize("kind", SPECS)
async def test_the_first_8_6_is_not_asked_what_ends_the_process(load, kind):
    """A format in a profile, a profile of another context."""
    model = load(SPECS[kind], version="8.6.0.12")
    async with asynctrt.open(model, device=model.device, max_rows=4) as engine:
        await check(engine, SPECS[kind])


def agreeing(given):
    if given["ids"].shape != given["mask"].shape:
        raise ValueError("ids and mask are of different lengths")
    return {"sums": given["ids"] * given["mask"]}


AGREEING = EngineSpec(
    inputs=(TensorIO("ids", dims=(-1, -1)), TensorIO("mask", dims=(-1, -1))),
    profiles=(dict.fromkeys(("ids", "mask"), ((1, 1), (4, 16), (8, 32))),),
    function=agreeing,
    function_outputs=(TensorIO("sums", dims=(-1, -1)),),
)


@pytest.mark.parametrize("version", ["8.6.0.12", VERSION, "10.16.1.11"])
async def test_shapes_that_do_not_fit_together_do_not_end_the_process(load, version):
    """The bindings of 8.6 crash where ``infer_shapes`` raises, which the double calls a violation."""
    model = load(AGREEING, version=version)
    assert [one.dims for one in model.outputs] == [("ids.1",)]
    ones = np.ones((2, 8), np.float32)
    async with asynctrt.open(model, device=model.device, max_rows=4) as engine:
        with pytest.raises(ExecutionError, match="infer_shapes for 1 rows.*different lengths"):
            await engine.infer({"ids": ones[:1], "mask": ones[:1, :4]})
        result = await engine.infer({"ids": ones, "mask": ones})
        np.testing.assert_array_equal(result["sums"], ones)


async def test_without_room_for_a_second_context_nothing_is_tried(load, little_reserve):
    spec = EngineSpec(persistent_nbytes=100_000, shares_profiles=True)
    model = load(spec, memory_nbytes=150_000)
    assert model.capabilities.contexts_max is None
    async with asynctrt.open(model, device=model.device, contexts=1, max_rows=4) as engine:
        await check(engine, spec, 3)


@pytest.mark.parametrize(
    ("library", "plan", "shares_profiles", "sizes_memory"),
    [
        ("8.6.0.12", (8, 6, 0, 12), None, False),
        ("8.6.0", (8, 6, 0, 12), None, False),
        ("8.6.1.6", (8, 6, 1, 6), None, False),
        ("10.16.1.11", (8, 6, 0, 12), None, False),
        ("10.0.1.6", (10, 0, 1, 6), True, False),
        ("10.16.1.11", (10, 0, 1, 6), True, False),
        ("10.1.0.27", (10, 1, 0, 27), True, True),
        ("10.16.1.11", (10, 14, 1, 48), True, True),
        ("11.4.0.106", (10, 9, 0, 34), True, True),
        ("11.4.0.106", (11, 4, 0, 106), True, True),
        ("of my own", (8, 6, 1, 6), None, False),
    ],
)
def test_an_engine_has_the_abilities_of_the_version_that_built_it(
    library, plan, shares_profiles, sizes_memory
):
    double = StrictTensorRT(HostDevice())
    double.__version__ = library
    found = Abilities.of(Flavour("tensorrt", double, is_real=False), read_header(header(version=plan)))
    assert found == Abilities(
        shares_profiles=shares_profiles,
        sizes_memory=sizes_memory,
        tells_formats_by_profile=not library.startswith("8.6.0"),
        tells_weights=plan >= (10, 14),
        tells_aliases=plan >= (10, 15),
        allocates_outputs=(library, plan[0]) != ("10.16.1.11", 8),
        raises=not library.startswith("8.") and library != "of my own",
    )


OLD = "8.6.0.12"
LEAN = "10.16.1.11"


@pytest.fixture
def old(tmp_path, bench):
    """Open an engine of 8.6 with its lean runtime under 10.16."""

    def old(spec=None, *, version=LEAN, model=True, **kw):
        device = HostDevice(in_place="never", unified=False, threads=2)
        path = tmp_path / "lean.so"
        path.write_bytes(double_lean_runtime(OLD))
        spec = dataclasses.replace(spec or EngineSpec(), version_compatible=True, excludes_lean_runtime=True)
        return bench(
            spec,
            device=device,
            trt=StrictTensorRT(device, version=version, flavour="tensorrt_lean"),
            plan=double_plan(spec, version=OLD),
            model=model,
            lean_runtime=path,
            **kw,
        )

    return old


@pytest.mark.parametrize("arenas", [1, 2, 4])
async def test_contexts_of_an_older_engine_share_arenas(old, caplog, arenas):
    spec = EngineSpec(inputs=(TensorIO("input", dims=(-1, -1)),), profiles=TWO, persistent_nbytes=512)
    made = old(spec)
    largest = max(made.spec.profile_nbytes(index) for index in range(2))
    assert [profile.enqueue_nbytes for profile in made.model.signature.profiles] == [largest] * 2
    before, held = made.model.memory_statistics().held_nbytes, made.device.memory().held_nbytes
    async with asynctrt.open(made.model, device=made.device, contexts=4, arenas=arenas) as engine:
        await check(engine, spec)
        assert engine.statistics().arenas == arenas
        # One or two of TensorRT's contexts in each, for as many profiles, and nothing private.
        assert 4 * 512 <= made.model.memory_statistics().held_nbytes - before <= 8 * 512
        assert made.device.memory().held_nbytes - held >= arenas * largest
    assert "only supported from" not in caplog.text


async def test_batches_of_an_older_engine_are_captured(old):
    spec = EngineSpec()
    made = old(spec)
    opened = asynctrt.open(made.model, device=made.device, contexts=2, arenas=1, graphs=(1, 4), max_rows=8)
    async with opened as engine:
        await check(engine, spec)


def test_an_older_engine_is_not_given_less_than_it_needs(old):
    made = old()
    context = made.create_context()
    binding = made.bind(context)
    with pytest.raises(InternalError, match="was given an arena of 256 bytes, but needs"):
        binding.enqueue(4, profile=0, stream=made.stream, arena=made.arena(256))
    made.run(binding, 4, made.arena())


async def test_an_older_engine_whose_profiles_are_not_shared(old):
    spec = EngineSpec(shares_profiles=False)
    made = old(spec)
    async with asynctrt.open(made.model, device=made.device, contexts=4) as engine:
        assert engine.statistics().contexts == 1
        await check(engine, spec)


def test_an_older_engine_is_not_asked_what_it_does_not_know(old):
    made = old()
    details = made.model.details()
    assert (details.weights_nbytes, details.stripped_nbytes) == (None, None)
    made.trt.fail_next("context-memory")
    with pytest.raises(DeviceMemoryError) as caught:
        made.model.create_context(made.device)
    # What went before is not mistaken for the reason.
    assert "createExecutionContext: Error Code 2: OutOfMemory" in str(caught.value)
    assert str(caught.value).count("Error Code") == 1


def test_an_older_engine_that_would_call_an_output_allocator_is_refused(old):
    with pytest.raises(ModelError, match="output 'positives' .* ends the process when a plan of TensorRT 8"):
        old(EngineSpec(data_dependent=True), model=False).open()


def test_a_plan_of_8_is_refused_by_11_before_anything_of_it_is_loaded(old):
    made = old(version="11.4.0.106", model=False)
    with pytest.raises(
        ModelError, match=r"the last version that runs plans of TensorRT 8 is TensorRT 10"
    ) as caught:
        made.open()
    assert "refused by its header, before the library loaded it" in str(caught.value)


def test_a_plan_of_a_later_version_is_refused_whatever_the_lean_runtime_would_do(old):
    """That of 8.6 does not look at the version in the header, by which the rest would go."""
    made = old(model=False)
    with pytest.raises(ModelError, match="later version built.* refused by its header, before the library"):
        made.open(double_plan(made.spec, version="99.1.0.0"))


@pytest.mark.parametrize(
    ("library", "lean", "loads"),
    [
        ("11.4.0.106", "8.6.0.12", "10 to 11"),
        ("11.4.0.106", "12.0.0.1", "10 to 11"),
        ("10.16.1.11", "11.4.0.106", "8 to 10"),
    ],
)
def test_a_lean_runtime_that_would_crash_is_not_loaded(old, tmp_path, library, lean, loads):
    made = old(version=library, model=False)
    (tmp_path / "lean.so").write_bytes(double_lean_runtime(lean))
    plan = double_plan(made.spec, version="10.9.0.34")
    with pytest.raises(ModelError, match=rf"is of TensorRT {lean.split('.')[0]}, and .* {loads}\. Pass the"):
        made.open(plan)


def test_what_is_no_lean_runtime_is_left_to_the_library(old, tmp_path):
    made = old(model=False)
    for content in (b"", b"no library"):
        (tmp_path / "lean.so").write_bytes(content)
        with pytest.raises(ModelError, match="cannot be loaded by tensorrt_lean"):
            made.open()
