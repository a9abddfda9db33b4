"""What only the CUDA device does: it names what is missing, and turns each status into the right error.

The driver is a stand-in here that answers as CUDA's does, so it all runs without a GPU. That the device works
is what the contract suite and ``tests/gpu`` are for, on a real one.
"""

import asyncio
import ctypes
import gc
import logging
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.cuda import (
    DRIVER_MIN,
    STICKY,
    CudaDevice,
    bindings,
    context,
    find_cuda_device,
    limit_memory,
    memory,
    streams,
)
from asynctrt.devices.cuda import (
    device as cuda_device,
)
from asynctrt.errors import (
    DeviceError,
    DeviceLostError,
    DeviceMemoryError,
    DeviceUnavailableError,
    OptionsError,
    UsageError,
)
from tests.gpu.support import gpu_is_here
from tests.models import double_model

ROOT = Path(__file__).parent.parent.parent
REAL = bindings.driver
OK = REAL.CUresult.CUDA_SUCCESS
PENDING = REAL.CUresult.CUDA_ERROR_NOT_READY
UNHEARD_OF = REAL.CUresult.CUDA_ERROR_NOT_PERMITTED
NO_MEMORY = REAL.CUresult.CUDA_ERROR_OUT_OF_MEMORY
ILLEGAL = REAL.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
REFUSED = REAL.CUresult.CUDA_ERROR_INVALID_VALUE
FREE, TOTAL = 3 << 30, 8 << 30
WAIT_S = 20


class Driver:
    """Answers as ``cuda.bindings.driver`` does: a tuple with the status first. Constants are the real ones.

    ``codes`` are the statuses of functions that shall not succeed; ``calls`` are the names in order.
    """

    def __init__(self):
        self.codes = {}
        self.calls = []
        self.destroyed = []
        self.version = 13_000
        self.gpus = 2
        self.blocks = {}
        self.handles = iter(range(1, 10**6))

    def __getattr__(self, name):
        if not name.startswith("cu"):
            return getattr(REAL, name)
        answer = getattr(self, f"do_{name}", None)

        def call(*args):
            self.calls.append(name)
            code = self.codes.get(name, OK)
            values = () if answer is None else answer(*args)
            return (code, *((None,) * len(values) if code != OK else values))

        return call

    # The two that tell what a status means succeed whatever else fails.
    def cuGetErrorName(self, code):
        return OK, code.name.encode() + b"\0"

    def cuGetErrorString(self, code):
        return OK, b"what it means\0"

    def do_cuDriverGetVersion(self):
        return (self.version,)

    def do_cuDeviceGetCount(self):
        return (self.gpus,)

    def do_cuDeviceGet(self, ordinal):
        return (ordinal,)

    def do_cuDevicePrimaryCtxRetain(self, device):
        return ("context",)

    def do_cuDeviceGetName(self, length, device):
        return (b"NVIDIA Stand-in".ljust(length, b"\0"),)

    def do_cuDeviceGetAttribute(self, attribute, device):
        return (9,)

    def do_cuModuleGetLoadingMode(self):
        return (REAL.CUmoduleLoadingMode.CU_MODULE_LAZY_LOADING,)

    def do_cuMemGetInfo(self):
        return FREE, TOTAL

    def do_cuStreamCreate(self, flags):
        return (next(self.handles),)

    def do_cuEventCreate(self, flags):
        # No number: what is left of a test that failed must not reach a real driver as if it were one.
        return (f"event {next(self.handles)}",)

    def do_cuEventDestroy(self, event):
        self.destroyed.append(event)
        return ()

    def do_cuMemAllocAsync(self, nbytes, stream):
        return (256 * next(self.handles),)

    def do_cuStreamEndCapture(self, stream):
        return ("graph",)

    def do_cuEventElapsedTime(self, since, until):
        return (1.5,)

    def do_cuMemAlloc(self, nbytes):
        return (256 * next(self.handles),)

    def do_cuMemHostAlloc(self, nbytes, flags):
        block = ctypes.create_string_buffer(b"\xff" * nbytes, nbytes)
        address = ctypes.addressof(block)
        self.blocks[address] = block
        return (address,)

    def do_cuMemFree(self, address):
        return ()

    def do_cuMemFreeHost(self, address):
        del self.blocks[address]
        return ()

    def count(self, name):
        """How often it was called."""
        return self.calls.count(name)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    for module in (context, cuda_device, memory, streams):
        monkeypatch.setattr(module, "driver", made)
    monkeypatch.setattr(context, "_gpus", defaultdict(context.Gpu))
    yield made
    gc.collect()


@pytest.fixture
def device(driver):
    return CudaDevice(memory_nbytes=1 << 20)


def held_frees(driver):
    """Hold up the calls that free memory; returns an event of the first, one to let all go, and by whom."""
    begun, go, freed_by = threading.Event(), threading.Event(), []

    def wait_and_free(address):
        begun.set()
        freed_by.append(threading.get_ident())
        assert go.wait(WAIT_S)
        return ()

    driver.do_cuMemFree = wait_and_free
    return begun, go, freed_by


class TestMissing:
    def test_the_driver(self, driver):
        driver.cuInit = lambda flags: exec("raise RuntimeError('libcuda.so.1: cannot open shared object')")
        with pytest.raises(DeviceUnavailableError) as caught:
            CudaDevice()
        message = str(caught.value)
        assert message.startswith("cuda:0 cannot be used: the NVIDIA driver's library libcuda.so.1 cannot be")
        assert "(libcuda.so.1: cannot open shared object)" in message
        for fix in ("Install the driver", "--gpus all", "device='host'"):
            assert fix in message
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_a_gpu(self, driver):
        driver.codes["cuInit"] = REAL.CUresult.CUDA_ERROR_NO_DEVICE
        with pytest.raises(DeviceUnavailableError, match=r"no GPU \(CUDA_ERROR_NO_DEVICE\)") as caught:
            CudaDevice()
        assert "CUDA_VISIBLE_DEVICES" in str(caught.value)
        assert "device='host'" in str(caught.value)

    @pytest.mark.parametrize("code", ["SYSTEM_DRIVER_MISMATCH", "UNKNOWN", "COMPAT_NOT_SUPPORTED_ON_DEVICE"])
    def test_a_driver_that_starts(self, driver, code):
        driver.codes["cuInit"] = getattr(REAL.CUresult, f"CUDA_ERROR_{code}")
        with pytest.raises(DeviceUnavailableError, match=f"CUDA_ERROR_{code}: what it means") as caught:
            CudaDevice(1)
        assert str(caught.value).startswith("cuda:1 cannot be used: the driver could not be started")
        assert "reboot after an update" in str(caught.value)

    @pytest.mark.parametrize(("version", "said"), [(DRIVER_MIN - 1, "11.99"), (11_080, "11.8")])
    def test_a_driver_that_is_new_enough(self, driver, version, said):
        driver.version = version
        with pytest.raises(DeviceUnavailableError, match=f"CUDA {said}, and at least 12.0 .* Update the"):
            CudaDevice()
        driver.version = DRIVER_MIN
        CudaDevice()

    @pytest.mark.parametrize("ordinal", [2, 7])
    def test_that_gpu(self, driver, ordinal):
        with pytest.raises(DeviceUnavailableError, match="2 GPUs are visible, cuda:0 to cuda:1") as caught:
            find_cuda_device(f"cuda:{ordinal}")
        assert str(caught.value).startswith(f"there is no cuda:{ordinal}:")
        assert find_cuda_device("cuda:1").name == "cuda:1"

    def test_room_for_its_context(self, driver):
        driver.codes["cuDevicePrimaryCtxRetain"] = NO_MEMORY
        with pytest.raises(DeviceMemoryError, match="no room for the context of cuda:0"):
            CudaDevice()

    def test_cuda_python(self):
        program = (
            "import sys; sys.modules['cuda.bindings'] = None\n"
            "import asyncio, asynctrt\n"
            "from tests.models import double_model\n"
            "async def main(): await asynctrt.open(double_model(), device='cuda:0')\n"
            "try: asyncio.run(main())\n"
            "except asynctrt.DeviceUnavailableError as error: print(error)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert "needs cuda-python" in done.stdout
        assert "pip install cuda-python" in done.stdout

    @pytest.mark.skipif(gpu_is_here(), reason="here is a GPU")
    @pytest.mark.anyio
    async def test_what_this_machine_has_not(self):
        for name in ("cuda", "cuda:0"):
            with pytest.raises(DeviceUnavailableError, match="cuda:0 cannot be used.*device='host'"):
                await asynctrt.open(double_model(), device=name)


class TestNames:
    @pytest.mark.parametrize(("name", "ordinal"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:01", 1)])
    def test_that_there_are(self, driver, name, ordinal):
        assert find_cuda_device(name).ordinal == ordinal

    @pytest.mark.parametrize(
        "name", ["cuda:", "cuda:-1", "cuda:x", "cuda0", "cuda:0:1", " cuda", "CUDA", "cuda:1.0", "cudaa"]
    )
    def test_that_there_are_not(self, driver, name):
        with pytest.raises(DeviceUnavailableError, match="is not a device.* called 'cuda:0', 'cuda:1'"):
            find_cuda_device(name)
        assert not driver.calls

    def test_what_it_says_of_itself(self, device):
        assert (device.name, device.gpu, device.compute_capability) == ("cuda:0", "NVIDIA Stand-in", (9, 9))
        assert repr(device) == "<CudaDevice cuda:0 'NVIDIA Stand-in' ready held=0>"
        assert not device.unified
        assert not device.is_parallel
        assert device.prefers_graphs


class TestStatuses:
    def test_out_of_memory_says_how_much_there_is_and_leaves_the_device_as_it_was(self, device, driver):
        driver.codes["cuMemAlloc"] = NO_MEMORY
        with pytest.raises(DeviceMemoryError) as caught:
            device.allocate(5000)
        message = str(caught.value)
        assert message.startswith("cuda:0 has no room for 5000 bytes of memory (CUDA_ERROR_OUT_OF_MEMORY); ")
        assert "3,072.0 MiB of 8,192.0 MiB are free, 0 bytes held here out of a budget of 1.0 MiB" in message
        assert "nvidia-smi" in message
        assert device.lost is None
        assert device.memory().held_nbytes == 0
        driver.codes.clear()
        device.allocate(5000).close()

    def test_out_of_memory_when_the_free_memory_is_unknown(self, device, driver):
        driver.codes = {"cuMemAlloc": NO_MEMORY, "cuMemGetInfo": REFUSED}
        with pytest.raises(DeviceMemoryError, match="how much is free is not known"):
            device.allocate(5000)

    def test_a_refusal_names_the_call_and_leaves_the_device_as_it_was(self, device, driver):
        driver.codes["cuMemcpyAsync"] = REFUSED
        buffer, stream = device.allocate(256), device.create_stream()
        with pytest.raises(DeviceError) as caught:
            stream.copy(buffer, buffer, offset=0, nbytes=100)
        assert str(caught.value) == (
            "cuda:0: a copy of 100 bytes failed with CUDA_ERROR_INVALID_VALUE (what it means)"
        )
        assert not isinstance(caught.value, DeviceLostError)
        assert device.lost is None

    @pytest.mark.parametrize("code", sorted(STICKY), ids=lambda code: code.name)
    def test_after_a_sticky_error_the_device_is_lost(self, device, driver, code, caplog):
        with caplog.at_level(logging.CRITICAL, "asynctrt"):
            error = device.failed(code, "work on a stream")
        assert type(error) is DeviceLostError
        assert device.lost is error
        for said in (f"work on a stream failed with {code.name}", "only a new process helps", "Restart"):
            assert said in str(error)
        assert [record.message for record in caplog.records] == [str(error)]
        assert "lost" in repr(device)

    def test_every_error_that_ends_the_process_is_sticky(self):
        """CUDA's own words, where the bindings carry them."""
        documented = {code: code.__doc__ or "" for code in REAL.CUresult}
        ends = {code for code, text in documented.items() if "must be terminated" in " ".join(text.split())}
        if not ends:
            pytest.skip("these bindings do not document their statuses")
        assert {code.name for code in ends - STICKY} == set()

    @pytest.mark.parametrize("code", [NO_MEMORY, REFUSED, PENDING], ids=lambda code: code.name)
    def test_no_other_status_ends_it(self, device, code):
        assert not isinstance(device.failed(code, "something"), DeviceLostError)
        assert device.lost is None

    def test_the_first_loss_is_the_one_that_is_told(self, device, caplog):
        with caplog.at_level(logging.CRITICAL, "asynctrt"):
            first = device.failed(ILLEGAL, "work on a stream")
            later = device.failed(REAL.CUresult.CUDA_ERROR_LAUNCH_FAILED, "a copy of 8 bytes")
        assert isinstance(later, DeviceLostError)
        assert device.lost is first
        assert len(caplog.records) == 1

    @pytest.mark.parametrize(
        ("function", "use"),
        [
            ("cuCtxSetCurrent", lambda device: device.activate()),
            ("cuCtxSetCurrent", lambda device: device.allocate(1)),
            ("cuCtxSetCurrent", lambda device: device.memory()),
            ("cuMemGetInfo", lambda device: device.memory()),
            ("cuMemAlloc", lambda device: device.allocate(1)),
            ("cuMemsetD8Async", lambda device: device.allocate(1)),
            ("cuStreamSynchronize", lambda device: device.allocate(1)),
            ("cuMemHostAlloc", lambda device: device.allocate_staging(1)),
            ("cuMemHostRegister", lambda device: device.pin(4096, 1)),
            ("cuMemAllocAsync", lambda device: device.allocate_ordered(1, stream=1)),
            ("cuEventCreate", lambda device: device.create_event()),
            ("cuStreamCreate", lambda device: device.create_stream()),
            ("cuEventRecord", lambda device: device.create_stream().record(device.create_event())),
            ("cuStreamWaitEvent", lambda device: device.create_stream().wait(device.create_event())),
            ("cuMemcpyAsync", lambda device: device.create_stream().copy_bytes(1, 2, 3)),
            ("cuStreamBeginCapture", lambda device: device.create_stream().begin_capture()),
            ("cuStreamEndCapture", lambda device: device.create_stream().end_capture()),
            ("cuEventElapsedTime", lambda device: device.create_event().elapsed_ns(device.create_event())),
        ],
    )
    def test_every_call_goes_through_the_funnel(self, device, driver, function, use):
        driver.codes[function] = ILLEGAL
        with pytest.raises(DeviceLostError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
            use(device)
        assert driver.count(function)
        assert device.lost is not None


def behind(device):
    """Return two streams, and events: one on the first, and the end of the second, which waits for it."""
    streams = [device.create_stream() for _ in range(2)]
    before, end = device.create_event(is_timed=False), device.create_event()
    streams[0].record(before)
    assert before.is_running()
    streams[1].wait(before)
    streams[1].record(end)
    return streams, before, end


class TestEvents:
    def test_pending_and_done(self, device, driver):
        event = device.create_event()
        driver.codes["cuEventQuery"] = PENDING
        assert not event.query()
        assert not event.synchronize(0.001)
        driver.codes.clear()
        assert event.query()
        assert event.synchronize(0.0)
        assert event.error is None

    def test_waiting_without_a_timeout_finds_the_error_too(self, device, driver):
        event = device.create_event()
        driver.codes["cuEventSynchronize"] = ILLEGAL
        assert event.synchronize()
        assert isinstance(event.error, DeviceLostError)

    @pytest.mark.parametrize("code", [ILLEGAL, REFUSED, NO_MEMORY, UNHEARD_OF])
    def test_after_work_that_failed_it_is_done_and_the_device_is_lost(self, device, driver, code):
        """Whatever the error: the work may still read and write, so what it uses is never used again."""
        event = device.create_event()
        driver.codes["cuEventQuery"] = code
        assert event.query()
        assert isinstance(event.error, DeviceLostError)
        assert device.lost is event.error

    def test_recorded_again_it_has_no_error(self, device, driver):
        event, stream = device.create_event(), device.create_stream()
        driver.codes["cuEventQuery"] = REFUSED
        assert event.query()
        assert event.error is not None
        stream.record(event)
        assert event.error is None

    def test_it_never_calls_back(self, device):
        event = device.create_event()
        assert not event.on_done(lambda: None)
        assert not event.nudge()

    def test_work_runs_once_what_it_waits_for_is_done(self, device, driver):
        """Behind another batch in an arena it waits for its turn, which is no sign that it hangs."""
        _, _, end = behind(device)
        driver.codes["cuEventQuery"] = PENDING
        assert not end.is_running()
        driver.codes.clear()
        assert end.is_running()
        driver.codes["cuEventQuery"] = PENDING
        assert end.is_running(), "it was seen to run, so nothing is asked again"

    @pytest.mark.parametrize("why", ["recorded again", "abandoned", "freed"])
    def test_what_it_waits_for_need_not_be_seen_to_be_done(self, device, driver, why):
        streams, before, end = behind(device)
        driver.codes["cuEventQuery"] = PENDING
        assert not end.is_running()
        if why == "recorded again":
            streams[0].record(before)
        elif why == "abandoned":
            streams[0].abandon()
        else:
            del before
        assert end.is_running()

    def test_they_keep_no_other_event_alive(self, device, driver):
        _, before, _end = behind(device)
        known = ref(before)
        del before
        assert known() is None

    def test_times_are_in_ns(self, device):
        assert device.create_event().elapsed_ns(device.create_event()) == 1_500_000

    def test_their_handles_are_given_back(self, device, driver):
        event = device.create_event()
        handle = event.cuda
        assert handle not in driver.destroyed
        del event
        gc.collect()
        assert driver.destroyed.count(handle) == 1

    def test_those_of_other_devices_are_refused(self, device):
        other = asynctrt.HostDevice().create_event()
        stream = device.create_stream()
        for use in (stream.record, stream.wait, device.create_event().elapsed_ns):
            with pytest.raises(DeviceError, match="not an event of a CUDA device"):
                use(other)


class TestParts:
    """Green contexts. That they keep work apart is for a real GPU to show."""

    @pytest.fixture
    def divisible(self, driver):
        def resource(count):
            return SimpleNamespace(sm=SimpleNamespace(smCount=count))

        def split(groups, whole, flags, least):
            count = -(-least // 8) * 8
            return [resource(count)], groups, resource(whole.sm.smCount - count)

        driver.do_cuDeviceGetDevResource = lambda cuda_device, kind: (resource(132),)
        driver.do_cuDevSmResourceSplitByCount = split
        driver.do_cuDevResourceGenerateDesc = lambda resources, count: (resources[0].sm.smCount,)
        driver.do_cuGreenCtxCreate = lambda description, cuda_device, flags: (f"green {description}",)
        driver.do_cuGreenCtxStreamCreate = lambda green, flags, priority: (next(driver.handles),)
        return driver

    def test_they_have_multiprocessors_of_their_own_and_one_memory(self, divisible, device):
        some, rest = device.partition(0.25)
        assert "multiprocessors=40" in repr(some)
        assert "multiprocessors=92" in repr(rest)
        assert some.whole is rest.whole is device
        buffer = some.allocate(1 << 19)
        assert rest.memory().room_nbytes == device.memory().room_nbytes == 1 << 19
        before = divisible.count("cuStreamCreate")
        some.create_stream(), rest.create_stream()
        assert divisible.count("cuGreenCtxStreamCreate") == 2
        assert divisible.count("cuStreamCreate") == before
        buffer.close()
        for part in (some, rest):
            part.close()
            part.close()
            with pytest.raises(UsageError, match="Divide the device again"):
                part.create_stream()
        assert divisible.count("cuGreenCtxDestroy") == 2

    def test_a_loss_is_known_to_all(self, divisible, device):
        some, _ = device.partition(0.25)
        some.failed(ILLEGAL, "work on a stream")
        assert device.lost is not None
        some.close()
        assert divisible.count("cuGreenCtxDestroy") == 0

    @pytest.mark.parametrize("function", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount"])
    def test_a_gpu_that_cannot_be_divided(self, divisible, device, function):
        divisible.codes[function] = REFUSED
        with pytest.raises(DeviceUnavailableError, match=r"into 25% .* CUDA_ERROR_INVALID_VALUE.* 12\.4"):
            device.partition(0.25)

    def test_nothing_is_left_for_the_rest(self, divisible, device):
        divisible.do_cuDeviceGetDevResource = lambda *_: (SimpleNamespace(sm=SimpleNamespace(smCount=8)),)
        with pytest.raises(DeviceUnavailableError, match="try another share"):
            device.partition(0.99)

    def test_what_was_made_is_given_back(self, divisible, device):
        made = iter(["one"])
        divisible.do_cuGreenCtxCreate = lambda *_: (next(made),)
        with pytest.raises(StopIteration):
            device.partition(0.25)
        assert divisible.count("cuGreenCtxDestroy") == 1


class TestMemory:
    def test_the_budget(self, device, driver):
        kept = device.allocate((1 << 20) - 512)
        said = "holds 1048064 of the 1048576 bytes of its budget.* Lower max_rows, .* or raise memory_nbytes"
        with pytest.raises(DeviceMemoryError, match=said):
            device.allocate(513)
        assert device.memory().room_nbytes == 512
        device.allocate(512).close()
        kept.close()
        kept.close()
        assert device.memory().held_nbytes == 0
        assert driver.count("cuMemFree") == 2

    def test_one_limit_for_all_devices_and_models_of_the_process(self, device, driver, monkeypatch):
        monkeypatch.setattr(context, "_limit_nbytes", None)
        other, elsewhere = CudaDevice(0), CudaDevice(1)
        limit_memory(5000)
        kept = device.allocate(3000)
        assert (other.memory().room_nbytes, elsewhere.memory().room_nbytes) == (2000, 5000)
        with pytest.raises(DeviceMemoryError, match="holds 3000 of the 5000 .* the limit of the process"):
            other.allocate(2001)
        other.allocate(2000).close()
        elsewhere.allocate(5000).close()
        # Of two limits the tighter one is told.
        assert device.memory().budget_nbytes == 5000
        limit_memory(2 << 20)
        assert (device.memory().budget_nbytes, device.memory().held_nbytes) == (1 << 20, 3000)
        kept.close()
        driver.codes["cuMemAlloc"] = NO_MEMORY
        with pytest.raises(DeviceMemoryError):
            other.allocate(100)
        assert other.memory().held_nbytes == 0
        for wrong in (0, -1):
            with pytest.raises(OptionsError, match="at least 1 byte"):
                limit_memory(wrong)

    @pytest.mark.parametrize("mode", ["lazy", "eager"])
    def test_when_kernels_are_loaded(self, driver, caplog, mode):
        modes = REAL.CUmoduleLoadingMode
        driver.do_cuModuleGetLoadingMode = lambda: (
            modes.CU_MODULE_LAZY_LOADING if mode == "lazy" else modes.CU_MODULE_EAGER_LOADING,
        )
        CudaDevice()
        assert ("CUDA_MODULE_LOADING" in caplog.text) == (mode == "eager")

    def test_a_gpu_without_memory_of_its_own(self, driver):
        integrated = REAL.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
        assert CudaDevice().is_integrated
        driver.do_cuDeviceGetAttribute = lambda attribute, cuda_device: (int(attribute != integrated),)
        assert not CudaDevice().is_integrated

    def test_it_is_zeroed_before_it_is_used(self, device, driver):
        device.allocate(1000)
        assert driver.calls[-3:] == ["cuMemAlloc", "cuMemsetD8Async", "cuStreamSynchronize"]

    def test_the_cpu_cannot_look_at_it(self, device):
        buffer = device.allocate(1000)
        assert not buffer.is_host_visible
        with pytest.raises(DeviceError, match="memory of the GPU: copy it to staging memory"):
            buffer.array(np.dtype("uint8"), (1000,), 0)

    def test_pinned_memory_is_zeroed_and_outlives_its_buffer_while_it_is_viewed(self, device, driver):
        buffer = device.allocate_staging(1000)
        view = buffer.array(np.dtype("float32"), (5, 10), 200)
        assert not view.any()
        view[...] = 7
        buffer.close()
        buffer.close()
        del buffer
        gc.collect()
        assert (view == 7).all()
        assert len(driver.blocks) == 1
        del view
        gc.collect()
        assert not driver.blocks

    def test_pinned_memory_is_freed_by_whichever_thread_lets_go_of_it(self, device, driver):
        """In a context of its own for the call: the thread may never have seen the device."""
        kept = [device.allocate_staging(1000)]
        thread = threading.Thread(target=lambda: (kept.clear(), gc.collect()))
        thread.start()
        thread.join()
        assert not driver.blocks
        assert driver.calls[-3:] == ["cuCtxPushCurrent", "cuMemFreeHost", "cuCtxPopCurrent"]

    @pytest.mark.parametrize("why", ["stuck", "lost"])
    def test_on_a_device_that_is_stuck_or_lost_nothing_is_freed(self, device, driver, why, caplog):
        """To free would wait for work that never ends, or fail."""
        buffer, pinned = device.allocate(1000), device.allocate_staging(1000)
        if why == "stuck":
            for stream in (device.create_stream(), device.create_stream()):
                device.abandon(stream)
                device.abandon(stream)
            assert caplog.text.count("work on it did not end") == 1
        else:
            device.failed(ILLEGAL, "work on a stream")
        assert why in repr(device)
        buffer.close()
        pinned.close()
        del pinned
        gc.collect()
        assert not driver.count("cuMemFree")
        assert not driver.count("cuMemFreeHost")
        assert len(driver.blocks) == 1
        assert device.memory().held_nbytes == 1000

    def test_what_hung_and_has_ended_after_all_is_waited_for_no_longer(self, device, driver):
        buffer, pinned = device.allocate(1000), device.allocate_staging(1000)
        hanging = [device.create_stream() for _ in range(2)]
        for stream in hanging:
            device.abandon(stream)
        buffer.close()
        pinned.close()
        del pinned
        gc.collect()
        device.ended(device.create_stream())
        device.ended(hanging[0])
        device.ended(hanging[0])
        assert driver.blocks
        assert not driver.count("cuMemFree")
        device.ended(hanging[1])
        assert not driver.blocks
        assert device.memory().held_nbytes == 0
        assert "ready" in repr(device)
        device.allocate(1000).close()
        assert driver.count("cuMemFree") == 2

    def test_an_event_loop_frees_in_a_thread(self, device, driver):
        """To free waits for all work on the GPU, and the loop must not."""
        begun, go, freed_by = held_frees(driver)
        small, large = device.allocate(1000), device.allocate((1 << 20) - 1000)

        async def loop():
            large.close()
            assert begun.wait(WAIT_S)
            small.close()
            assert device.memory().held_nbytes == 1 << 20
            threading.Timer(0.05, go.set).start()
            # There is no room for it before the others are free.
            return device.allocate(1 << 20)

        again = asyncio.run(loop())
        assert freed_by[0] != threading.get_ident()
        assert device.memory().held_nbytes == 1 << 20
        again.close()
        assert freed_by[-1] == threading.get_ident(), "without a loop it is done at once"

    def test_what_waits_to_be_freed_when_work_hangs_is_put_off(self, device, driver):
        begun, go, _ = held_frees(driver)
        buffers = [device.allocate(1000) for _ in range(3)]
        stream = device.create_stream()

        async def loop():
            for buffer in buffers:
                buffer.close()
            assert begun.wait(WAIT_S)
            device.abandon(stream)

        asyncio.run(loop())
        go.set()
        device._gpu.wait_for_frees()
        assert driver.count("cuMemFree") == 1
        device.ended(stream)
        assert driver.count("cuMemFree") == 3
        assert device.memory().held_nbytes == 0

    def test_another_device_object_of_a_gpu_knows_what_hangs_there(self, device, driver):
        other, elsewhere = CudaDevice(0), CudaDevice(1)
        buffers = other.allocate(1000), elsewhere.allocate(1000)
        stream = device.create_stream()
        device.abandon(stream)
        assert ("stuck" in repr(other), "stuck" in repr(elsewhere)) == (True, False)
        for buffer in buffers:
            buffer.close()
        assert driver.count("cuMemFree") == 1
        device.ended(stream)
        assert driver.count("cuMemFree") == 2
        assert other.memory().held_nbytes == 0

    def test_a_gpu_that_is_lost_is_lost_for_the_whole_process(self, device, driver):
        other, elsewhere = CudaDevice(0), CudaDevice(1)
        device.failed(ILLEGAL, "work on a stream")
        assert isinstance(other.lost, DeviceLostError)
        assert elsewhere.lost is None
        with pytest.raises(DeviceLostError, match="only a new process helps"):
            find_cuda_device("cuda:0")
        CudaDevice(1)


class TestClosing:
    def test_a_stream_twice(self, device, driver):
        stream = device.create_stream()
        assert stream.close(1.0)
        assert stream.close(1.0)
        assert driver.count("cuStreamDestroy") == 1
        assert repr(stream) == "<CudaStream cuda:0 closed>"

    def test_a_stream_whose_work_does_not_end(self, device, driver):
        stream = device.create_stream()
        driver.codes["cuEventQuery"] = PENDING
        assert not stream.close(0.001)
        assert not driver.count("cuStreamDestroy"), "its work would use what is freed after it"
        driver.codes.clear()
        assert stream.close(1.0)

    def test_a_stream_of_a_lost_device_has_nothing_to_wait_for(self, device, driver):
        stream = device.create_stream()
        device.failed(ILLEGAL, "work on a stream")
        driver.codes = dict.fromkeys(("cuEventCreate", "cuEventRecord", "cuCtxSetCurrent"), ILLEGAL)
        assert stream.close(1.0)

    @pytest.mark.parametrize(
        "function", ["cuCtxSetCurrent", "cuEventCreate", "cuEventRecord", "cuEventQuery"]
    )
    def test_a_stream_by_which_the_loss_is_found(self, device, driver, function):
        """An engine that is being closed is closed, whatever its device says."""
        stream = device.create_stream()
        driver.codes[function] = ILLEGAL
        assert stream.close(1.0)
        assert device.lost is not None

    def test_a_device_in_a_forked_process(self, device, monkeypatch):
        monkeypatch.setattr("os.getpid", lambda: 1)
        for use in (device.create_stream, device.create_event, device.activate, device.memory):
            with pytest.raises(UsageError, match="used in process 1, which was forked from it"):
                use()

    def test_a_device_twice(self, device, driver):
        device.close()
        device.close()
        assert driver.count("cuStreamDestroy") == 1


def test_a_graph_is_uploaded_when_it_is_made_and_closed_once(device, driver):
    """So that its first launch costs no more than the others."""
    driver.do_cuGraphInstantiate = lambda graph, flags: (f"{graph}, executable",)
    launched = []
    driver.do_cuGraphLaunch = lambda *args: launched.append(args) or ()
    stream = device.create_stream()
    stream.begin_capture()
    assert repr(stream) == "<CudaStream cuda:0 capturing>"
    graph = stream.end_capture()
    assert repr(stream) == "<CudaStream cuda:0 open>"
    assert driver.calls[-2:] == ["cuGraphInstantiate", "cuGraphUpload"]
    graph.launch(stream=stream)
    graph.launch(stream=stream)
    assert launched == [("graph, executable", stream.handle)] * 2
    graph.close()
    graph.close()
    assert driver.count("cuGraphExecDestroy") == driver.count("cuGraphDestroy") == 1


@pytest.mark.parametrize("function", ["cuGraphInstantiate", "cuGraphUpload", "cuGraphLaunch"])
def test_a_graph_that_is_refused(device, driver, function):
    driver.do_cuGraphInstantiate = lambda graph, flags: ("executable",)
    driver.codes[function] = REFUSED
    stream = device.create_stream()
    stream.begin_capture()
    with pytest.raises(DeviceError, match=r"graph.* failed with CUDA_ERROR_INVALID_VALUE"):
        stream.end_capture().launch(stream=stream)
    assert not stream.is_capturing
    assert device.lost is None


def test_events_without_times_are_told_so(device, driver):
    """They cost less."""
    flags = []
    driver.do_cuEventCreate = lambda given: flags.append(given) or ("event",)
    device.create_event()
    device.create_event(is_timed=True)
    device.create_event(is_timed=False)
    no_times = int(REAL.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    assert [bool(given & no_times) for given in flags] == [False, False, True]
    blocking = int(REAL.CUevent_flags.CU_EVENT_BLOCKING_SYNC)
    assert all(given & blocking for given in flags), "a thread that waits for one sleeps"


def test_nothing_is_collected_while_a_stream_captures(device, driver):
    """It would free memory of an earlier engine in the thread that captures, and end the capture."""
    driver.do_cuGraphInstantiate = lambda graph, flags: ("executable",)
    one, other = device.create_stream(), device.create_stream()
    assert gc.isenabled()
    one.begin_capture()
    other.begin_capture()
    one.end_capture().close()
    assert not gc.isenabled(), "the other still captures"
    driver.codes["cuStreamEndCapture"] = REFUSED
    with pytest.raises(DeviceError):
        other.end_capture()
    assert gc.isenabled()
    driver.codes["cuStreamBeginCapture"] = REFUSED
    with pytest.raises(DeviceError):
        one.begin_capture()
    assert gc.isenabled()


def test_whoever_keeps_the_collector_off_finds_it_off_after_a_capture(device, driver):
    driver.do_cuGraphInstantiate = lambda graph, flags: ("executable",)
    stream = device.create_stream()
    gc.disable()
    try:
        stream.begin_capture()
        stream.end_capture().close()
        assert not gc.isenabled()
    finally:
        gc.enable()
