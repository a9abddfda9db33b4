"""``asynctrt.loadtest.run``, a load test from Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asynctrt.engine import Engine
from asynctrt.errors import UsageError
from asynctrt.loadtest.job import LoadJob, carry_out
from asynctrt.loadtest.report import Report
from asynctrt.loadtest.session import SETTING_NAMES, LoadSession
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import Call, Target, TargetSpec
from asynctrt.options import Options
from asynctrt.synonyms import ALL_SYNONYMS
from asynctrt.validation import check_names


async def run(
    target: str | Path | Engine | Target | TargetSpec | Call,
    *,
    model: str | None = None,
    token: str | None = None,
    device: str = "host",
    options: Options | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    search: bool = False,
    compare: Mapping[str, Any] | None = None,
    precision: float = 0.05,
    **settings: Any,
) -> Report:
    """Measure a target from this process and event loop.

    :param target: an engine that is open; a path or ``module:factory``, opened for the test; the address of a
        server, ``http://HOST:PORT/v2/models/NAME``, ``grpc://HOST:PORT/NAME`` or
        ``ws://HOST:PORT/v2/models/NAME/ws``; an async function that takes and returns arrays by name.
    :param model: the server's model, if the address does not name it.
    :param token: the server's bearer token.
    :param device: the device of an engine that is opened for the test.
    :param options: the options of an engine that is opened for the test.
    :param sweep: settings or engine options by name, with the values to try in every combination.
    :param search: find the highest rate that holds the ``slo``, to within ``precision``.
    :param compare: settings or engine options of a second configuration; the two run in turn, A B A B.
    :param precision: the precision of a search, as a share of the rate.
    :param settings: the fields of :class:`LoadSettings`: rate, callers, seconds, slo, ...
    :raises OptionsError: for a setting that is unknown or impossible.
    :raises TargetError: if the target cannot be reached or does not answer.
    :raises AsynctrtError: the target's own error, if it refuses the first request.
    """
    check_names(settings, SETTING_NAMES, "setting of a load test", synonyms=ALL_SYNONYMS)
    if isinstance(target, str | Path):
        target = TargetSpec(str(target), model, token, device, options or Options())
    elif model is not None or token is not None or options is not None:
        raise UsageError(
            "model, token and options apply to paths and addresses only: this target is open already"
        )
    job = LoadJob(target, LoadSettings(**settings), sweep or {}, search, compare or {}, precision)
    async with LoadSession(apart=job.settings.processes > 1, watch=None) as session:
        return await carry_out(job, session)
