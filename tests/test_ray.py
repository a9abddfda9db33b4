"""asynctrt.ray: calls, errors, the autoscaler, lost devices, on a Ray cluster of two nodes."""

import asyncio
import os
import re
import signal
import threading
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.tensors import TensorSpec
from tests.helpers import needed
from tests.models import double_onnx
from tests.ray_cluster import two_nodes

ROOT = Path(__file__).parent.parent
WAIT_S = 100  # Beside two busy processes it took 40 s and more to start a replica.
SLOW_S = 1.5
QUICK = {
    "graceful_shutdown_wait_loop_s": 0.05,
    "health_check_period_s": 0.3,
    "graceful_shutdown_timeout_s": 0.5,
}
MARK = "ASYNCTRT_TEST_FIRST"
pytestmark = [pytest.mark.tier2, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(250)]
if not find_spec("ray"):
    pytestmark.append(pytest.mark.usefixtures("ray_is_needed"))


@pytest.fixture
def ray_is_needed():
    needed(find_spec("ray"), "there is no Ray: pip install '.[ray]'")


def who_and_twice():
    """A model that gives twice its input, and the process that it runs in."""

    def compute(inputs, outputs):
        outputs["twice"][...] = inputs["input"] * 2
        outputs["pid"][...] = os.getpid()

    return _model(compute)


def slow_first():
    """Like the above; the first replica that loads it takes long for each batch."""
    try:
        Path(os.environ[MARK]).mkdir()
    except FileExistsError:
        return who_and_twice()

    def compute(inputs, outputs):
        time.sleep(SLOW_S)
        outputs["twice"][...] = inputs["input"] * 2
        outputs["pid"][...] = -os.getpid()

    return _model(compute)


def hangs():
    """A batch with a negative value does not end, so that the engine loses its only context."""
    never = threading.Event()

    def compute(inputs, outputs):
        if (inputs["input"] < 0).any():
            never.wait()
        outputs["twice"][...] = inputs["input"] * 2
        outputs["pid"][...] = os.getpid()

    return _model(compute)


def slow():
    """A model that takes 50 ms for a batch."""

    def compute(inputs, outputs):
        time.sleep(0.05)
        outputs["twice"][...] = inputs["input"] * 2
        outputs["pid"][...] = os.getpid()

    return _model(compute)


def _model(compute):
    return FunctionModel(
        compute,
        inputs=TensorSpec("input", "float32", (1,)),
        outputs=[TensorSpec("twice", "float32", (1,)), TensorSpec("pid", "int64", ())],
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster of two nodes on this machine, without a proxy."""
    needed(find_spec("ray"), "there is no Ray: pip install '.[ray]'")
    with two_nodes(**{MARK: str(tmp_path_factory.mktemp("ray") / "first")}) as made:
        yield made


@pytest.fixture
def run(cluster):
    """Run a model of this module under a name of its own, and take it away again."""
    from ray import serve

    import asynctrt.ray

    names = []

    def running(model, deployment=None, **kw):
        names.append(model.__name__)
        path = f"{__name__}:{model.__name__}"
        application = asynctrt.ray.application(path, deployment={**QUICK, **(deployment or {})}, **kw)
        return serve.run(application, name=model.__name__, route_prefix=None)

    yield running
    for name in names:
        serve.delete(name)


def column(*values):
    return {"input": np.array(values, np.float32)[:, None]}


async def check(handle, *values):
    """Send rows, and return the process that answered rightly."""
    result = await handle.infer.remote(column(*values))
    assert result["twice"][:, 0].tolist() == [2 * value for value in values]
    (pid,) = set(result["pid"].tolist())
    return pid


def in_time(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


class TestOnTwoNodes:
    def test_each_caller_gets_its_own_rows_from_replicas_on_both_nodes(self, run, cluster):
        handle = run(who_and_twice, replicas=2, deployment={"max_replicas_per_node": 1}, max_rows=64)

        async def calls():
            pids = set()
            while len(pids) < 2:  # The handle may hear of one of them later, on a machine that is busy.
                pids.update(
                    await asyncio.gather(
                        *(check(handle, number, number + 0.5, -number) for number in range(200))
                    )
                )
            with pytest.raises(asynctrt.InputError, match=r"unknown: \['nope'\]") as caught:
                await handle.infer.remote({"nope": np.ones((1, 1), np.float32)})
            assert not isinstance(caught.value, asynctrt.OverloadError)
            # Arguments of `infer` are passed on; a deadline is kept where the rows are queued.
            result = await handle.infer.remote(column(1), timeout=5.0, priority=0, outputs=["twice"])
            assert list(result) == ["twice"]
            assert result.batch_rows == 1
            assert result.timing.compute_ns > 0

        in_time(calls())
        assert len(cluster.list_all_nodes()) == 2

    def test_replicas_serve_by_themselves_and_a_client_calls_them_directly(self, run):
        """One of them dies: its calls go to the other, and the one that takes its place is found."""
        import asynctrt.ray
        from asynctrt.client import connect
        from asynctrt.serving import ServerSettings

        handle = run(who_and_twice, replicas=2, serving=ServerSettings(http_port=0, grpc=False))

        async def calls():
            pids = set()
            async with connect(asynctrt.ray.addresses(handle), idempotent=True) as client:

                async def call():
                    outputs = await client.infer("who_and_twice", column(3))
                    assert outputs["twice"].item() == 6
                    pids.add(outputs["pid"].item())

                while len(pids) < 2:
                    await call()
                os.kill(pids.pop(), signal.SIGKILL)
                left, pids = pids, set()
                while len(pids) < 2:
                    await call()
                assert left < pids

        in_time(calls())

    def test_the_page(self, cluster, tmp_path):
        from ray import serve

        (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL)
        path, names = double_onnx(tmp_path / "model.onnx"), {}
        try:
            exec(snippet.replace("/models/model.onnx", str(path)), names)
            answer = in_time(names["classify"](np.ones((3, 4), np.float32)))
        finally:
            serve.delete("default")
        assert answer.tolist() == [[2.0] * 4] * 3

    def test_a_slow_replica_gets_few_calls(self, run):
        handle = run(slow_first, replicas=2, max_rows=8, contexts=1)
        answered = Counter()

        async def caller(number):
            for turn in range(6):
                pid = await check(handle, number, turn)
                answered["slow" if pid < 0 else "fast"] += 1

        async def calls():
            # At random it would be half of them. On a machine that is busy with something else, the other one
            # is slow, too, now and then.
            while not answered or answered["slow"] >= 0.25 * answered["fast"]:
                answered.clear()
                await asyncio.gather(*(caller(number) for number in range(32)))
                assert answered["slow"] + answered["fast"] == 32 * 6

        in_time(calls())

    def test_a_replica_that_has_lost_its_device_is_replaced(self, run):
        from ray.exceptions import RayError

        handle = run(hangs, batch_timeout=0.05, contexts=1)

        async def calls():
            first = await check(handle, 1)
            with pytest.raises(asynctrt.AsynctrtError):
                await handle.infer.remote(column(-1))
            while True:
                try:
                    second = await check(handle, 2)
                except (asynctrt.AsynctrtError, RayError):
                    await asyncio.sleep(0.1)  # It is lost, or just gone.
                else:
                    assert second != first
                    return

        in_time(calls())

    def test_a_worker_process_of_a_replica_that_dies_is_noticed_by_nobody(self, run):
        handle = run(who_and_twice, isolation="spare")

        async def calls():
            first = await check(handle, 1)
            asking = [asyncio.ensure_future(check(handle, number)) for number in range(50)]
            os.kill(first, signal.SIGKILL)
            await asyncio.gather(*asking)
            while await check(handle, 2) == first:
                await asyncio.sleep(0.01)

        in_time(calls())

    def test_replicas_are_added_while_queues_are_long_and_taken_away_after(self, run):
        from ray import serve

        scaling = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.3}
        scaling |= {"metrics_interval_s": 0.2, "look_back_period_s": 1.0}
        handle = run(slow, replicas=(1, 2), drain_target=0.1, scaling=scaling, max_rows=1, contexts=1)

        def running():
            replicas = serve.status().applications["slow"].deployments["engine"].replica_states
            return replicas.get("RUNNING", 0)

        async def reaches(count):
            while await asyncio.to_thread(running) != count:
                await asyncio.sleep(0.1)

        async def load():
            while True:
                await asyncio.gather(*(check(handle, number) for number in range(20)))

        async def calls():
            await reaches(1)
            loading = asyncio.create_task(load())
            await asyncio.wait(
                [loading, two := asyncio.create_task(reaches(2))], return_when="FIRST_COMPLETED"
            )
            assert two.done()
            loading.cancel()
            await asyncio.wait([loading])
            await reaches(1)

        in_time(calls())


def wanted(count, shares, drain=None, target=None, **kw):
    from asynctrt.ray import DrainPolicy

    metrics = {
        "asynctrt_busy_share": dict(enumerate(shares)),
        "asynctrt_drain_seconds": dict(enumerate(drain or ())),
    }
    context = SimpleNamespace(
        current_num_replicas=count, target_num_replicas=target or count, aggregated_metrics=metrics
    )
    return DrainPolicy(**kw)(context)[0]


def test_the_policy():
    # As many as the busy ones need, and no change for a tenth.
    assert wanted(2, [0.7, 0.7], [0.0, 0.0]) == 2
    assert wanted(2, [0.74, 0.73], [0.1, 0.1]) == 2
    assert wanted(4, [0.35] * 4) == pytest.approx(2)
    assert wanted(2, [1.0, 1.0], [0.05, 0.05]) == pytest.approx(2 / 0.7)
    assert wanted(3, [0.0] * 3, [0.0] * 3) == 0
    # Queues that are too long: as many more as they are too long, twice as many at most.
    assert wanted(2, [0.1, 0.1], [0.3, 0.0]) == pytest.approx(3)
    assert wanted(2, [1.0, 1.0], [60.0, 0.0]) == 4
    assert wanted(2, [0.5, 0.5], [60.0, 0.0], target_s=100, busy=0.5) == 2
    # New replicas have reported nothing yet, or there are none.
    assert wanted(2, [0.0], target=2) == 2
    assert wanted(0, [], target=1) == 1


def test_what_an_application_asks_ray_for():
    import asynctrt.ray

    def deployment(**kw):
        return asynctrt.ray.application("model.onnx", **kw)._bound_deployment

    assert deployment().ray_actor_options.get("num_gpus", 0) == 0
    assert deployment(device="cuda:0").ray_actor_options["num_gpus"] == 1
    assert deployment(replicas=3).num_replicas == 3
    scaling = deployment(replicas=(2, 5), drain_target=0.25)._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.policy.policy_kwargs == {"target_s": 0.25}
    assert deployment(deployment={"name": "mine", "max_ongoing_requests": 7}).name == "mine"
    both = deployment(device=["cuda:0", "cuda:1"], isolation="process")
    assert both.ray_actor_options["num_gpus"] == 2
    for devices in ("cuda:1", "cuda:0,cuda:2"):
        with pytest.raises(asynctrt.OptionsError, match="numbers them from 0"):
            deployment(device=devices)
    assert deployment(device="cuda:1", deployment={"ray_actor_options": {"num_gpus": 2}})
    with pytest.raises(asynctrt.OptionsError, match="unknown option 'max_row'"):
        deployment(max_row=3)
    with pytest.raises(asynctrt.OptionsError, match="by itself"):
        asynctrt.ray.application(who_and_twice())
