"""Run an engine on the machines of a Ray cluster, as a deployment of Ray Serve. The only importer of ``ray``.

::

    handle = serve.run(asynctrt.ray.application("model.onnx", device="cuda:0", replicas=(1, 8)))
    outputs = await handle.infer.remote({"input": rows})

A call through a handle costs milliseconds however few rows it has, so send many rows a call; the engine of
the replica that they come to batches them with those of others. The router sends a call where it is expected
to be answered first, and the autoscaler keeps the time that answers take, both by the estimate that engines
give of the time that they need for all they have taken: :meth:`asynctrt.Statistics.drain_s`.
"""

import os
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

from asynctrt._util import clock
from asynctrt.core.inputs import Inputs, Outputs
from asynctrt.engine import Engine
from asynctrt.errors import DeviceLostError, MissingExtraError, OptionsError, show
from asynctrt.opening import open as open_engine
from asynctrt.options import Options, Settings
from asynctrt.tensors import InferResult

try:
    from ray import serve
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext
    from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise MissingExtraError("asynctrt.ray needs Ray Serve: pip install 'asynctrt[ray]'") from error

DRAIN_KEY: Final = "asynctrt_drain_seconds"
BUSY_KEY: Final = "asynctrt_busy_share"
"""What a replica reports to the autoscaler, by the names that the metrics of a server have."""

DEPLOYMENT: Final[Mapping[str, Any]] = {
    # The engine has a queue of its own, with a bound; Ray's default of 5 would keep batches at 5 requests.
    "max_ongoing_requests": 1024,
    "health_check_period_s": 5.0,
}
ROUTER: Final[Mapping[str, Any]] = {"request_routing_stats_period_s": 0.5}
GPU: Final = re.compile(r"cuda(?::(\d+))?")


class EngineReplica:
    """What one replica of a deployment is: an engine. :func:`application` makes the deployment.

    For a deployment of your own: ``serve.deployment(...)(EngineReplica).bind(model, device, options)``.

    :param model: a path or ``"module:attribute"``, as for :func:`asynctrt.open`, on the replica's machine.
    :param device: the name of a device, or several; ``options`` those of the engine.
    """

    _engine: Engine | None = None

    async def __init__(  # type: ignore[misc]  # Ray awaits it: the engine belongs to the replica's loop.
        self,
        model: str | os.PathLike[str],
        device: str | Sequence[str] = "host",
        options: Options | None = None,
    ) -> None:
        self._engine = await open_engine(model, device=device, options=options)
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
        """Run rows through the model: what :meth:`asynctrt.Engine.infer` does, with its errors.

        Name ``outputs``, and the others are not sent between processes.
        """
        return await self._running().infer(inputs, timeout=timeout, priority=priority, outputs=outputs)

    async def check_health(self) -> None:
        """Fail if the device is lost, which only a new process can use again: Ray starts one.

        :raises DeviceLostError: if the engine can run nothing any more.
        """
        state = self._running().state
        if state == "lost":
            raise DeviceLostError(f"nothing can run on {self._running()!r} any more: start the replica again")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Report to the routers how long the engine needs for what it has taken."""
        done = self._running().statistics()
        # `taken` makes each report another one, but not while there is nothing to report: a report that
        # differs from the last is sent to every handle in the cluster.
        return {"drain_s": done.drain_s(), "row_s": done.row_s, "taken": done.submitted}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Report to the autoscaler the seconds to drain, and how busy the engine was since the last time."""
        done, now_ns = self._running().statistics(), clock.now_ns()
        share = done.busy_share_since(self._before, max(1, now_ns - self._before_ns))
        self._before, self._before_ns = done, now_ns
        drain_s = done.drain_s()
        return {BUSY_KEY: share} if drain_s is None else {BUSY_KEY: share, DRAIN_KEY: drain_s}

    def __del__(self) -> Any:
        """Close the engine. Ray calls it once all calls are answered, and awaits what it returns."""
        engine, self._engine = self._engine, None
        return None if engine is None else engine.aclose()

    def _running(self) -> Engine:
        assert self._engine is not None, "Ray calls nothing once it has called __del__"
        return self._engine


class Backlog:
    """Estimate how much work a replica has before it, in seconds, between its reports.

    A report is old when it is used, and all that was sent since is missing from it; so what is sent is
    added, and what the replica will have done meanwhile is taken off.
    """

    __slots__ = ("_at_s", "_report", "_work_s")

    def __init__(self) -> None:
        self._report: Mapping[str, Any] = {}
        self._work_s = 0.0
        self._at_s = 0.0

    def __repr__(self) -> str:
        return f"<Backlog {self._work_s:.6f} s at {self._at_s:.6f}>"

    def seconds(self, report: Mapping[str, Any], now_s: float) -> float:
        """Return the seconds of work at ``now_s``, by the replica's newest report."""
        self._work_s = max(0.0, self._work_s - max(0.0, now_s - self._at_s))
        self._at_s = now_s
        if report and report != self._report:
            self._report = report
            # A replica that has not run a batch yet does not know; it is told apart by what was sent to it.
            known_s = report.get("drain_s")
            self._work_s = self._work_s if known_s is None else known_s
        return self._work_s

    def send(self, rows: int) -> None:
        """Count rows that are sent to it now."""
        self._work_s += rows * (self._report.get("row_s") or UNKNOWN_ROW_S)


UNKNOWN_ROW_S: Final = 0.001
"""What a row is taken for while nobody knows: enough to spread the first calls over all replicas."""


class DrainRouter(FIFOMixin, RequestRouter):
    """Send a call to the replica of two that is expected to have done its work first.

    The two are drawn at random: reports are up to half a second old, and whoever had least by the last
    report would else be flooded by all handles until the next.
    """

    def initialize_state(self) -> None:
        """Begin without any estimate."""
        self._backlogs: dict[ReplicaID, Backlog] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: "PendingRequest | None" = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried: two at random, then the others."""
        order = random.sample(candidate_replicas, len(candidate_replicas))
        if not order:
            return []
        now_s = clock.now_ns() / 1e9
        backlogs = self._backlogs
        if len(backlogs) > len(order):
            known = {replica.replica_id for replica in order}
            self._backlogs = backlogs = {key: one for key, one in backlogs.items() if key in known}
        order[:2] = sorted(
            order[:2],
            key=lambda replica: backlogs.setdefault(replica.replica_id, Backlog()).seconds(
                replica.routing_stats, now_s
            ),
        )
        # Ray asks again, after a while, if all replicas have as many calls as they may.
        if pending_request is not None and not pending_request.routing_context.should_backoff:
            pending_request.routing_context.should_backoff = True
            backlogs[order[0].replica_id].send(rows_of(pending_request))
        return [[replica] for replica in order]


def rows_of(request: PendingRequest) -> int:
    """Return the rows of a call, as far as they can be told before it is read; else 1."""
    inputs = request.args[0] if request.args else request.kwargs.get("inputs")
    if isinstance(inputs, Mapping):
        inputs = next(iter(inputs.values()), None)
    shape = getattr(inputs, "shape", None)
    if isinstance(shape, tuple):
        return int(shape[0]) if shape else 1
    return len(inputs) if isinstance(inputs, list) else 1


class DrainPolicy:
    """Choose as many replicas as keep the seconds to drain and the share of busy time below their targets.

    Where the queues take longer than they should, there are as many more replicas as they are too long, at
    most twice as many at once: a queue grows with time however little is missing. Else there are as many as
    the busy ones need, so that none is given up which is needed to keep the queues short. Ray applies its own
    delays and bounds to this.

    :param target_s: seconds that a replica may need for what it has taken, on average.
    :param busy: the share of time in which a replica may compute, 0 to 1.
    """

    def __init__(self, target_s: float = 0.1, busy: float = 0.7) -> None:
        self._target_s = target_s
        self._busy = busy

    def __repr__(self) -> str:
        return f"<DrainPolicy target_s={self._target_s} busy={self._busy}>"

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas that is wanted, and no state."""
        count = context.current_num_replicas
        metrics = context.aggregated_metrics or {}
        shares = list(metrics.get("asynctrt_busy_share", {}).values())
        drains = list(metrics.get("asynctrt_drain_seconds", {}).values())
        # New replicas have reported nothing yet: what they will take over cannot be told before they have.
        if not count or len(shares) < count:
            return float(context.target_num_replicas), {}
        factor = sum(shares) / count / self._busy
        if 0.9 < factor < 1.1:
            factor = 1.0  # Not worth a change: what is measured is never quite the same.
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
    options: Options | None = None,
    **settings: Unpack[Settings],
) -> Application:
    """Return an application for ``serve.run``: replicas of an engine behind one handle.

    ``await handle.infer.remote(inputs)`` takes what :meth:`asynctrt.Engine.infer` takes, and raises what it
    raises. Each replica opens the model by itself, in a process of its own.

    :param model: a path, which is one on the machines of the replicas, so make it absolute; or
        ``"module:attribute"``, which these can import.
    :param device: ``"host"``, or ``"cuda:0"``: each replica then asks Ray for a GPU of its own, and sees no
        other; several, with ``isolation="process"``, as for :func:`asynctrt.open`: for as many GPUs.
    :param replicas: how many; or at least and at most how many, and :class:`DrainPolicy` chooses.
    :param drain_target: with two numbers of replicas: the seconds that a replica may need for what it has
        taken, on average; and ``scaling``, more of Ray's ``AutoscalingConfig``, such as its delays.
    :param deployment: arguments of ``serve.deployment``, which win over those that are chosen here.
    :param options: an :class:`asynctrt.Options`; ``settings`` are single options, and win over it.
    :raises OptionsError: for an option that is unknown or impossible.
    """
    if not isinstance(model, str | os.PathLike):
        raise OptionsError(
            f"each replica opens the model by itself: give a path or 'module:attribute', not {show(model)}"
        )
    chosen: dict[str, Any] = {"name": "engine", **DEPLOYMENT}
    chosen["request_router_config"] = {"request_router_class": DrainRouter, **ROUTER}
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
    application: Application = serve.deployment(**chosen)(EngineReplica).bind(model, device, opened)
    return application
