"""TensorRT for RTX: the cache of what it compiles."""

import gc
import logging
import os
import stat

import pytest

from asynctrt.backends.tensorrt import jit
from asynctrt.errors import ExecutionError, OptionsError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan
from tests.doubles.tensorrt.rtx import CACHE

RTX = "tensorrt_rtx"


def run(made, rows=3):
    context = made.model.create_context(made.device)
    made.run(made.bind(context), rows, made.arena())
    context.close()


class TestCache:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "kernels.cache"

    def test_what_is_in_it_is_not_compiled_again(self, bench, path, caplog):
        first = bench(double=RTX, runtime_cache=path)
        run(first)
        assert not path.exists()
        first.model.close()
        assert len(first.trt.compiled) == 2
        second = bench(double=RTX, runtime_cache=path)
        run(second)
        second.model.close()
        assert second.trt.compiled == ()
        assert not caplog.records
        assert os.listdir(path.parent) == [path.name], "nothing is left beside it"

    def test_it_is_written_only_if_there_is_more_in_it(self, bench, path):
        first = bench(double=RTX, runtime_cache=path)
        run(first)
        first.model.close()
        path.chmod(0o640)
        for rows, is_written in ((3, False), (5, True)):
            before = path.stat().st_ino
            made = bench(double=RTX, runtime_cache=path)
            run(made, rows)
            made.model.close()
            made.model.close()
            assert (path.stat().st_ino != before) == is_written

    def test_it_is_written_when_the_last_context_is_closed(self, bench, path):
        made = bench(double=RTX, runtime_cache=path)
        context = made.model.create_context(made.device)
        made.model.close()
        assert not path.exists()
        context.close()
        assert path.exists()

    @pytest.mark.parametrize("content", [b"", b"no cache", CACHE, CACHE + b"abcd{}"])
    def test_a_damaged_one_is_a_warning_and_is_replaced(self, bench, path, caplog, content):
        path.write_bytes(content)
        made = bench(double=RTX, runtime_cache=path)
        assert "is not used as a runtime cache: it is damaged" in caplog.text
        run(made)
        made.model.close()
        caplog.clear()
        again = bench(double=RTX, runtime_cache=path)
        run(again)
        assert again.trt.compiled == ()
        assert not caplog.records

    def test_one_of_another_version_too(self, bench, path, caplog):
        old = StrictTensorRT(bench(model=False).device, version="1.6.0.1", flavour=RTX)
        plan = double_plan(EngineSpec(), version="1.6.0.1", flavour=RTX)
        bench(trt=old, device=old.device, plan=plan, runtime_cache=path).model.close()
        bench(double=RTX, runtime_cache=path)
        assert "another version" in caplog.text

    def test_a_deserializer_that_raises(self, bench, path, caplog, monkeypatch):
        path.write_bytes(b"x")
        made = bench(double=RTX, model=False, runtime_cache=path)

        def wrong(self, blob):
            raise RuntimeError("unknown")

        monkeypatch.setattr(made.trt.IRuntimeCache, "deserialize", wrong)
        made.open().close()
        assert "is damaged" in caplog.text

    def test_a_file_that_cannot_be_read_or_written(self, bench, path, caplog, monkeypatch):
        path.write_bytes(b"x")
        made = bench(double=RTX, model=False, runtime_cache=path)
        path.unlink()
        path.mkdir()
        made.open().close()
        assert "was not read" in caplog.text

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(jit, "write_whole", full)
        made.open().close()
        assert "was not written: [Errno 28] No space left on device" in caplog.text

    def test_one_that_is_refused_is_done_without(self, bench, path, caplog, monkeypatch):
        made = bench(double=RTX, model=False, runtime_cache=path)
        monkeypatch.setattr(made.trt.IRuntimeConfig, "set_runtime_cache", lambda self, cache: False)
        made.model = made.open()
        run(made)
        assert "TensorRT refused it" in caplog.text

    def test_nothing_is_written_after_the_device_is_lost(self, bench, path, monkeypatch):
        made = bench(double=RTX, runtime_cache=path)
        monkeypatch.setattr(type(made.device), "lost", property(lambda self: RuntimeError("lost")))
        made.model.close()
        assert not path.exists()

    def test_it_outlives_what_uses_it(self, bench, path):
        made = bench(double=RTX, runtime_cache=path)
        context = made.model.create_context(made.device)
        kept = context._trt  # As a traceback may keep it.
        context.close()
        made.model.close()
        gc.collect()
        del kept
        gc.collect()

    def test_others_cannot_write_to_it(self, bench, path):
        bench(double=RTX, runtime_cache=path).model.close()
        assert not stat.S_IMODE(path.stat().st_mode) & 0o022

    def test_a_place_where_it_cannot_be(self, bench, tmp_path):
        for wrong in (tmp_path, tmp_path / "absent" / "kernels.cache"):
            with pytest.raises(OptionsError, match="runtime_cache: .* is not the path of a file"):
                bench(model=False, runtime_cache=wrong)


def test_contexts_capture_nothing_by_themselves(bench, monkeypatch):
    made = bench(double=RTX, model=False)
    strategy = made.trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    made.open().close()
    silent = property(lambda self: strategy, lambda self, value: None)
    monkeypatch.setattr(made.trt.IRuntimeConfig, "cuda_graph_strategy", silent)
    with pytest.raises(ExecutionError, match="cuda_graph_strategy"):
        made.open()


@pytest.mark.parametrize("double", ["tensorrt", "tensorrt_lean", "tensorrt_dispatch"])
def test_the_other_packages_have_no_cache(bench, double):
    made = bench(double=double, model=False, runtime_cache="kernels")
    with pytest.raises(
        OptionsError, match=rf"runtime_cache is .*{double} .* install one that has it: a new tensorrt_rtx"
    ):
        made.open()


def test_messages_are_quiet_by_default(bench, caplog):
    with caplog.at_level(logging.WARNING):
        run(bench(double=RTX))
    assert not caplog.records
