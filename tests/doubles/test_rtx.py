"""How strict the double is about what only TensorRT for RTX has."""

import gc

import pytest

from tests.doubles.support import Bench, rows
from tests.doubles.tensorrt import ViolationError

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
