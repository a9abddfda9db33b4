"""How strict the double is about what only TensorRT for RTX has."""

import gc

import pytest

from tests.doubles.support import Bench, rows
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, ViolationError, double_plan

RTX = "tensorrt_rtx"


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
        assert not config.set_runtime_cache()
        assert config.set_runtime_cache(cache)
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


def test_plans_of_the_other_kind():
    bench = Bench(flavour=RTX)
    assert bench.runtime.deserialize_cuda_engine(double_plan(EngineSpec())) is None
    assert "Magic tag" in bench.recorder.last()[1]
    assert repr(bench.trt).startswith("<StrictTensorRT tensorrt_rtx 1.7.1.116 on")
    with pytest.raises(AttributeError, match="'tensorrt' has no attribute 'IRuntimeCache'"):
        _ = StrictTensorRT(bench.device).IRuntimeCache
