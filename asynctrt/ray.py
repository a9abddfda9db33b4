"""Run engines on a Ray cluster, as a deployment of Ray Serve. The only importer of ``ray``.

::

    handle = serve.run(asynctrt.ray.application("model.onnx", device="cuda:0", replicas=(1, 8)))
    outputs = await handle.infer.remote({"input": rows})

A call through a handle costs milliseconds however few rows it has, so send many rows per call. Or let
replicas serve KServe by themselves (``serving=``), and call them directly::

    async with asynctrt.client.connect(asynctrt.ray.addresses(handle)) as client:
        outputs = await client.infer("model", {"input": rows})

The autoscaler keeps the time to answer near a target, by the engines' estimates of the time that they need
for their accepted requests: :meth:`asynctrt.Statistics.drain_s`.
"""

import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Unpack

from asynctrt._util import clock
from asynctrt._util.loops import in_thread
from asynctrt.core.inputs import Inputs, Outputs
from asynctrt.core.loading import name_of
from asynctrt.engine import Engine
from asynctrt.errors import DeviceLostError, MissingExtraError, OptionsError, show
from asynctrt.opening import open as open_engine
from asynctrt.options import Options, Settings
from asynctrt.tensors import InferResult

try:
    from ray import serve
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext
    from ray.serve.handle import DeploymentHandle
    from ray.util import get_node_ip_address
except ImportError as error:
    raise MissingExtraError("asynctrt.ray needs Ray Serve: pip install 'asynctrt[ray]'") from error

if TYPE_CHECKING:
    from asynctrt.serving import ServerSettings

ANSWER_S: Final = 5.0
"""How long replicas may take to say their addresses."""

DRAIN_KEY: Final = "asynctrt_drain_seconds"
BUSY_KEY: Final = "asynctrt_busy_share"
"""Keys of a replica's report to the autoscaler: the names of the same metrics of a server."""

DEPLOYMENT: Final[Mapping[str, Any]] = {
    # The engine has its own bounded queue. Ray's default of 5 would limit batches to 5 requests.
    "max_ongoing_requests": 1024,
    "health_check_period_s": 5.0,
}
GPU: Final = re.compile(r"cuda(?::(\d+))?")


class EngineReplica:
    """One replica of a deployment: an engine. :func:`application` makes the deployment.

    To make a deployment yourself: ``serve.deployment(...)(EngineReplica).bind(model, device, options)``.

    :param model: a path or ``"module:attribute"``, as for :func:`asynctrt.open`, on the replica's machine.
    :param device: the name of a device, or several names.
    :param options: the engine's options.
    :param serving: settings of a server that the replica runs, at its node's address.
    """

    _engine: Engine | None = None
    _server: Any = None

    async def __init__(  # type: ignore[misc]  # Ray awaits it: the engine belongs to the replica's loop.
        self,
        model: str | os.PathLike[str],
        device: str | Sequence[str] = "host",
        options: Options | None = None,
        serving: "ServerSettings | None" = None,
    ) -> None:
        self._engine = await open_engine(model, device=device, options=options)
        if serving is not None:
            from asynctrt.serving import Repository, Server  # noqa: PLC0415  (it needs the extra `serve`)

            repository = Repository(replace(serving, host=get_node_ip_address()))
            repository.add(name_of(os.fspath(model)), self._engine)
            self._server = Server(repository)
            await self._server.start()
        self._before = self._engine.statistics()
        self._before_ns = clock.now_ns()

    async def infer(
        self,
        inputs: Inputs,
        *,
        timeout: float | None = None,
        priority: int = 0,
        outputs: Outputs = "host",
    ) -> InferResult:
        """Run rows through the model, as :meth:`asynctrt.Engine.infer` does, with its errors.

        If ``outputs`` names some outputs, the others are not sent between processes.
        """
        return await self._running().infer(inputs, timeout=timeout, priority=priority, outputs=outputs)

    async def url(self) -> str | None:
        """Return the address of the replica's server; ``None`` if it has none."""
        return None if self._server is None else str(self._server.http_url)

    async def check_health(self) -> None:
        """Fail if the device is lost, so that Ray starts a new process, which alone can use it again.

        :raises DeviceLostError: if the engine can run nothing any more.
        """
        state = self._running().state
        if state == "lost":
            raise DeviceLostError(f"nothing can run on {self._running()!r} any more: start the replica again")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report the seconds to drain to the autoscaler, and the busy share since the last report."""
        done, now_ns = self._running().statistics(), clock.now_ns()
        share = done.busy_share_since(self._before, max(1, now_ns - self._before_ns))
        self._before, self._before_ns = done, now_ns
        drain_s = done.drain_s()
        return {BUSY_KEY: share} if drain_s is None else {BUSY_KEY: share, DRAIN_KEY: drain_s}

    def __del__(self) -> Any:
        """Close the engine. Ray calls this once all calls are answered, and awaits the result."""
        engine, self._engine = self._engine, None
        return None if engine is None else self._close(engine)

    async def _close(self, engine: Engine) -> None:
        if self._server is not None:
            await self._server.stop()
        await engine.aclose()

    def _running(self) -> Engine:
        assert self._engine is not None, "Ray calls nothing once it has called __del__"
        return self._engine


def addresses(handle: "DeploymentHandle[Any]") -> Callable[[], Awaitable[list[str]]]:
    """Return a function for :func:`asynctrt.client.connect` that finds the servers of all replicas.

    :param handle: of an :func:`application` with ``serving``: what ``serve.run`` returned, or
        ``serve.get_app_handle``.
    """

    def find() -> list[str]:
        found = handle.broadcast("url").results(timeout_s=ANSWER_S, return_exceptions=True)
        return [url for url in found if isinstance(url, str)]

    return lambda: in_thread(find)


class DrainPolicy:
    """Choose a number of replicas that keeps the seconds to drain and the busy share below their targets.

    If the queues take too long to drain, the number grows in proportion, but at most doubles at once: a queue
    keeps growing however little capacity is missing. Otherwise the number follows from the busy share, so
    that no replica is removed that is needed to keep the queues short. Ray applies its own delays and bounds
    to the result.

    :param target_s: seconds that a replica may need for its accepted requests, on average.
    :param busy: the share of time in which a replica may compute, 0 to 1.
    """

    def __init__(self, target_s: float = 0.1, busy: float = 0.7) -> None:
        self._target_s = target_s
        self._busy = busy

    def __repr__(self) -> str:
        return f"<DrainPolicy target_s={self._target_s} busy={self._busy}>"

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the target number of replicas, and no state."""
        count = context.current_num_replicas
        metrics = context.aggregated_metrics or {}
        shares = list(metrics.get("asynctrt_busy_share", {}).values())
        drains = list(metrics.get("asynctrt_drain_seconds", {}).values())
        # Some replicas are new and have not reported yet, so the load that they will take is unknown.
        if not count or len(shares) < count:
            return float(context.target_num_replicas), {}
        factor = sum(shares) / count / self._busy
        if 0.9 < factor < 1.1:
            factor = 1.0  # Not worth a change: measurements always vary a little.
        if drains:
            late = sum(drains) / len(drains) / self._target_s
            if late > 1.1:
                factor = max(factor, min(late, 2.0))
        return count * factor, {}


def application(
    model: str | os.PathLike[str],
    *,
    device: str | Sequence[str] = "host",
    replicas: int | tuple[int, int] = 1,
    drain_target: float = 0.1,
    scaling: Mapping[str, Any] | None = None,
    deployment: Mapping[str, Any] | None = None,
    serving: "ServerSettings | None" = None,
    options: Options | None = None,
    **settings: Unpack[Settings],
) -> Application:
    """Return an application for ``serve.run``: replicas of an engine behind one handle.

    ``await handle.infer.remote(inputs)`` takes the arguments of :meth:`asynctrt.Engine.infer` and raises its
    errors. Each replica opens the model itself, in its own process.

    :param model: an absolute path on the replicas' machines, or a ``"module:attribute"`` that they can
        import.
    :param device: ``"host"`` or ``"cuda:0"``. With ``"cuda:0"`` each replica asks Ray for a GPU, and sees no
        other. With ``isolation="process"`` several devices, as for :func:`asynctrt.open`; each replica then
        asks for that many GPUs.
    :param replicas: the number of replicas; or the least and the largest number, between which
        :class:`DrainPolicy` chooses.
    :param drain_target: if ``replicas`` is a range: the seconds that a replica may need for its accepted
        requests, on average.
    :param scaling: if ``replicas`` is a range: more of Ray's ``AutoscalingConfig``, such as its delays.
    :param deployment: arguments of ``serve.deployment``, which override those chosen here.
    :param serving: settings of a server that each replica runs beside the handle, such as
        ``ServerSettings(http_port=0, grpc=False)``, over HTTP and websockets. Its model has the name of the
        file or the attribute, and :func:`addresses` finds the servers.
    :param options: an :class:`asynctrt.Options`; ``settings`` are single options, which override it.
    :raises OptionsError: if an option is unknown or impossible.
    """
    if not isinstance(model, str | os.PathLike):
        raise OptionsError(
            f"each replica opens the model by itself: give a path or 'module:attribute', not {show(model)}"
        )
    chosen: dict[str, Any] = {"name": "engine", **DEPLOYMENT}
    names = device.split(",") if isinstance(device, str) else device
    numbers = [int(found[1] or 0) for found in map(GPU.fullmatch, names) if found]
    if numbers:
        chosen["ray_actor_options"] = {"num_gpus": len(numbers)}
    if isinstance(replicas, tuple):
        least, most = replicas
        chosen["autoscaling_config"] = {
            "min_replicas": least,
            "max_replicas": most,
            "policy": {"policy_function": DrainPolicy, "policy_kwargs": {"target_s": drain_target}},
            **(scaling or {}),
        }
    else:
        chosen["num_replicas"] = replicas
    chosen |= deployment or {}
    gpus = (chosen.get("ray_actor_options") or {}).get("num_gpus", 0)
    if numbers and max(numbers) >= max(1, gpus):
        raise OptionsError(
            f"device={show(device)}, but a replica with {gpus:g} GPUs numbers them from 0, whichever Ray "
            "gives it: the first is 'cuda:0'"
        )
    opened = Options.from_settings(options, dict(settings))
    application: Application = serve.deployment(**chosen)(EngineReplica).bind(model, device, opened, serving)
    return application
