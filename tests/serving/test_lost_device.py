"""A server whose device is lost says that it is not ready, so that a supervisor starts it anew."""

import asyncio
import threading
import time
from urllib.request import urlopen

import numpy as np
import pytest

import asynctrt
from asynctrt._util import clock
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.errors import DeviceLostError, ModelNotReadyError
from asynctrt.serving.entries import LOST
from asynctrt.serving.repository import LOST_NS, Repository
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan
from tests.helpers import free_port
from tests.models import double_model
from tests.serving.support import ask, engine_of, serving
from tests.serving.test_server import ROOT, call, command

pytestmark = pytest.mark.anyio
WAIT_S = 30


async def test_a_model_whose_device_is_lost_is_not_ready():
    device = asynctrt.HostDevice()
    double = StrictTensorRT(device)
    model = TensorRTModel(double_plan(EngineSpec()), device=device, flavour=double)
    async with asynctrt.open(model, device=device, arenas=1) as engine:
        repository = Repository()
        repository.add("model", engine)
        assert repository.is_ready
        assert repository.find_ready("model").engine is engine
        double.fail_next("illegal-address")
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(DeviceLostError):
                await engine.infer(np.ones((1, 16), np.float32))
        assert not repository.is_ready
        (entry,) = repository.index()
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", LOST)
        with pytest.raises(ModelNotReadyError, match="restart the server"):
            repository.find_ready("model")
        # Who asks for an inference is told by the engine itself.
        with pytest.raises(DeviceLostError):
            await repository.find("model").engine.infer(np.ones((1, 16), np.float32))
    model.close()


class Losing:
    """A model of which a batch hangs when it is told to, so that its engine loses its only context."""

    def __init__(self):
        self.go = threading.Event()

    def __call__(self, inputs, outputs):
        if (inputs["input"] < 0).any():
            self.go.wait(WAIT_S)
        outputs["output"][...] = inputs["input"]

    async def lose(self, engine):
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(DeviceLostError):
                await engine.infer(np.full((1, 4), -1, np.float32))
        assert engine.state == "lost"


@pytest.fixture
def losing():
    made = Losing()
    yield made
    made.go.set()


OPTIONS = {"contexts": 1, "batch_timeout": 0.2, "close_timeout": 0.2}


async def test_after_a_while_the_server_is_not_alive(losing):
    async with serving({"double": double_model(losing)}, engine=OPTIONS) as server:
        server._look_for_losses()
        for path in ("live", "ready"):
            assert (await ask(server, f"/v2/health/{path}"))[0] == 200
        await losing.lose(engine_of(server))
        server._look_for_losses()
        assert (await ask(server, "/v2/health/ready"))[0] == 503
        assert (await ask(server, "/v2/health/live"))[0] == 200
        assert server.repository.look_for_losses(clock.now_ns() + LOST_NS) == ["double"]
        assert (await ask(server, "/v2/health/live"))[0] == 503
        losing.go.set()


async def test_a_model_that_is_replaced_makes_it_alive_again(losing):
    repository = Repository()
    async with asynctrt.open(double_model(losing), **OPTIONS) as engine:
        repository.add("double", engine)
        configuration = repository.find("double").config()
        await losing.lose(engine)
        assert repository.find("double").config() == configuration
        assert repository.look_for_losses(0) == ["double"]
        assert repository.is_live
        repository.look_for_losses(LOST_NS)
        assert not repository.is_live
        await repository.unload("double")
        assert repository.look_for_losses(LOST_NS + 1) == []
        assert repository.is_live
        losing.go.set()


def wait_until_ready(url):
    end_s = time.monotonic() + WAIT_S
    while True:
        try:
            urlopen(f"{url}/v2/models/double/ready").close()
        except OSError:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        else:
            return


@pytest.mark.tier2
@pytest.mark.parametrize("loads_another", [False, True])
def test_it_exits_with_a_status_of_its_own_if_it_is_told_to(tmp_path, loads_another):
    """Also while a model is being loaded, which cannot be interrupted."""
    (tmp_path / "losing.py").write_text(
        "import threading\nfrom tests.models import double_model\n"
        "def hang(inputs, outputs):\n"
        "    threading.Event().wait()\n"
        "model = double_model(hang)\n"
    )
    (tmp_path / "loading.py").write_text("import time\nwhile True:\n    time.sleep(0.1)\n")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    models = ["double=losing:model"] + ["other=loading:model"] * loads_another
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = "--no-grpc --contexts 1 --batch-timeout 0.2 --close-timeout 0.2 --drain-timeout 0.2"
    flags += f" --http-port {port} --on-device-lost exit"
    with command(*models, *flags.split(), env=env) as (process, line):
        wait_until_ready(url)
        with pytest.raises(DeviceLostError):
            call(url)
        line(r"stopping, as nothing can run double any more")
        if loads_another:
            line("a model that is being loaded cannot be interrupted: the process ends without it")
        else:
            line(r"error: nothing can run double any more in this process: start the server again")
        assert process.wait(WAIT_S) == 75
