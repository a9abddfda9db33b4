"""How strict the double is about what only TensorRT for RTX has."""

import gc

import pytest

from asynctrt.testing import LatchDevice
from tests.doubles.support import Bench, rows, wait
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, ViolationError, double_plan

RTX = "tensorrt_rtx"
PLAN = double_plan(EngineSpec(), flavour=RTX)


def deferred(**kw):
    bench = Bench(start=False, flavour=RTX, **kw)
    bench.runtime.defer_weights_loading = True
    bench.engine = bench.load(bench.spec)
    return bench


class TestWeights:
    def test_they_come_and_go(self):
        bench = deferred()
        assert not bench.engine.weights_loaded
        assert not bench.allocator.held
        user = bench.user().give(rows(8, 16))
        assert not user.context.execute_async_v3(bench.stream().handle)
        assert "Load weights before calling enqueueV3" in bench.recorder.last()[1]
        for _ in range(2):
            assert bench.engine.load_weights(PLAN)
            assert bench.engine.weights_loaded
            user.run()
            user.check()
            assert bench.engine.unload_weights()
            assert not bench.allocator.held
        assert bench.trt.violations() == ()
        bench.close()

    def test_what_is_refused(self):
        bench = deferred()
        assert not bench.engine.unload_weights()
        assert not bench.engine.load_weights(PLAN[:-1])
        with pytest.raises(TypeError):
            bench.engine.load_weights("model.plan")
        bench.allocator.refuse = True
        assert not bench.engine.load_weights(PLAN)
        assert not bench.engine.weights_loaded
        assert "OutOfMemory" in bench.recorder.last()[1]
        bench.allocator.refuse = False
        assert bench.engine.load_weights(PLAN)
        assert not bench.engine.load_weights(PLAN)
        plain = Bench(flavour=RTX)
        assert plain.engine.weights_loaded
        assert not plain.engine.unload_weights()
        assert "only valid for engines deserialized with" in plain.recorder.last()[1]

    @pytest.mark.parametrize(
        "spec",
        [
            EngineSpec(stripped_weights_nbytes=8),
            EngineSpec(weights_nbytes=8192, streamable_weights_nbytes=4096),
        ],
    )
    def test_plans_whose_weights_cannot_come_later(self, spec):
        bench = Bench(start=False, flavour=RTX)
        bench.runtime.defer_weights_loading = True
        assert bench.load(spec) is None
        assert "Deferred weight loading" in bench.recorder.last()[1]

    def test_a_batch_in_flight(self):
        bench = deferred(device=LatchDevice())
        assert bench.engine.load_weights(PLAN)
        user, stream = bench.user().give(rows(8, 16)), bench.stream()
        assert user.context.execute_async_v3(stream.handle)
        with pytest.raises(ViolationError, match="unloaded while a batch ran"):
            bench.engine.unload_weights()
        bench.device.open()
        bench.close()

    @pytest.mark.parametrize("again", [False, True])
    def test_a_graph_with_weights_that_were_unloaded(self, again):
        bench = deferred()
        assert bench.engine.load_weights(PLAN)
        user, stream = bench.user().give(rows(8, 16)), bench.stream()
        user.run(stream)
        stream.begin_capture()
        assert user.context.execute_async_v3(stream.handle)
        graph = stream.end_capture()
        assert bench.engine.unload_weights()
        if again:
            assert bench.engine.load_weights(PLAN)
        graph.launch(stream=stream)
        wait(bench.device, stream)
        assert any("a graph was launched" in text for text in bench.trt.violations())
        graph.close()
        bench.close()


class TestCompiling:
    def config(self, bench):
        config = bench.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            bench.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        return config

    def test_a_cache_that_was_destroyed_before_its_context(self):
        bench = Bench(flavour=RTX)
        config = self.config(bench)
        cache = config.create_runtime_cache()
        assert config.get_runtime_cache() is None
        assert not config.set_runtime_cache()
        assert config.set_runtime_cache(cache)
        assert config.get_runtime_cache() is cache
        with pytest.raises(TypeError):
            config.set_runtime_cache(config)
        context = bench.engine.create_execution_context(config)
        del cache
        gc.collect()
        user = bench.user()
        user.context = context
        user.context.set_device_memory(user.arena.address, user.arena.nbytes)
        user.give(rows(8, 16))
        with pytest.raises(ViolationError, match="runtime cache was destroyed"):
            context.execute_async_v3(bench.stream().handle)

    def test_caches_of_others(self):
        bench, other = Bench(flavour=RTX), Bench(flavour=RTX, compute_capability=(8, 9), start=False)
        cache = self.config(bench).create_runtime_cache()
        content = cache.serialize()
        assert content.nbytes == len(content)
        assert content.dtype == bench.trt.DataType.INT8
        assert cache.deserialize(content)
        assert not cache.deserialize(bytes(content)[:-1])
        assert cache.reset()
        engine = other.load(EngineSpec(), compute_capability=(8, 9))
        assert not engine.create_runtime_config().create_runtime_cache().deserialize(content)

    def test_a_context_that_captures_by_itself_cannot_be_captured(self):
        bench = Bench(flavour=RTX)
        config = self.config(bench)
        config.cuda_graph_strategy = bench.trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        user, stream = bench.user(), bench.stream()
        user.context = bench.engine.create_execution_context(config)
        user.context.set_device_memory(user.arena.address, user.arena.nbytes)
        user.give(rows(8, 16)).run(stream)
        stream.begin_capture()
        with pytest.raises(ViolationError, match="captures by itself"):
            user.context.execute_async_v3(stream.handle)
        stream.end_capture().close()
        bench.close()

    def test_whether_it_can_be_captured(self):
        for spec, can in ((EngineSpec(), True), (EngineSpec(capturable=False), False)):
            bench = Bench(spec, flavour=RTX)
            assert bench.user().context.is_stream_capturable(bench.stream().handle) == can


def test_plans_of_the_other_kind():
    bench = Bench(flavour=RTX)
    assert bench.runtime.deserialize_cuda_engine(double_plan(EngineSpec())) is None
    assert "Magic tag" in bench.recorder.last()[1]
    assert repr(bench.trt).startswith("<StrictTensorRT tensorrt_rtx 1.7.1.116 on")
    with pytest.raises(AttributeError, match="'tensorrt' has no attribute 'IRuntimeCache'"):
        _ = StrictTensorRT(bench.device).IRuntimeCache
