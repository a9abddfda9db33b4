"""``asynctrt.loadtest.run``, a load test from Python."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from asynctrt._util.synonyms import ALL_SYNONYMS
from asynctrt._util.validation import check_names
from asynctrt.engine import Engine
from asynctrt.errors import UsageError
from asynctrt.loadtest.job import LoadJob, carry_out
from asynctrt.loadtest.report import Report
from asynctrt.loadtest.session import SETTING_NAMES, LoadSession
from asynctrt.loadtest.settings import LoadSettings, RunSettings
from asynctrt.loadtest.targets import Call, Target, TargetSpec
from asynctrt.loadtest.tls import Tls
from asynctrt.options import Options


async def run(
    target: str | Path | Engine | Target | TargetSpec | Call,
    *,
    token: str | None = None,
    device: str = "host",
    options: Options | None = None,
    body: Any = None,
    headers: Mapping[str, str] | Sequence[str] | None = None,
    method: str | None = None,
    until_message: str | int | None = None,
    tls: Tls | None = None,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    search: bool = False,
    **settings: Unpack[RunSettings],
) -> Report:
    """Run a load test against a target, from this process and event loop.

    :param target: an open engine; a path or ``module:factory``, opened for the test; a server's address,
        ``http://HOST:PORT/v2/models/NAME``, ``grpc://HOST:PORT/NAME`` or
        ``ws://HOST:PORT/v2/models/NAME/ws``; any other HTTP or websocket address; or an async function, or
        its ``module:name``, that takes arrays by name, or no arguments.
    :param token: the server's bearer token.
    :param device: the device of an engine that is opened for the test.
    :param options: the options of an engine that is opened for the test.
    :param body: the body to send to a server that does not speak KServe: text, bytes, or a JSON value, with
        ``"${name}"`` in place of an array of ``inputs``; ``"@FILE"`` for the content of a file.
    :param headers: the headers of every request, by name, or each as ``"Name: value"``. Over gRPC they are
        sent as metadata.
    :param method: the HTTP method. Default: POST with a body, GET without.
    :param until_message: how to recognise the last message of a websocket's answer: the number of messages,
        ``"done=true"`` for a JSON field, ``"/regex/"``, or text that the message contains. Default: an
        answer is one message.
    :param tls: whom to trust over TLS, and the client's own certificate.
    :param sweep: settings or engine options by name, with the values to try in every combination.
    :param search: find the highest rate that holds the ``slo``, to within 5%.
    :param settings: the fields of :class:`LoadSettings` (rate, callers, seconds, slo, ...). ``inputs`` and
        ``expect`` may be arrays by name.
    :raises OptionsError: for an unknown or invalid setting.
    :raises TargetError: if the target cannot be reached or does not answer.
    :raises AsynctrtError: the target's own error, if it refuses the first request.
    """
    given: dict[str, Any] = dict(settings)  # With wider types than the settings have.
    check_names(given, SETTING_NAMES, "setting of a load test", synonyms=ALL_SYNONYMS)
    if isinstance(target, str | Path):
        target = TargetSpec(
            str(target),
            token,
            device,
            options or Options(),
            body if body is None or isinstance(body, str | bytes) else json.dumps(body),
            _lines(headers or ()),
            method,
            None if until_message is None else str(until_message),
            tls or Tls(),
        )
    elif any(one is not None for one in (token, options, body, headers, method, until_message, tls)):
        raise UsageError(
            "token, options, body, headers, method, until_message and tls apply to paths and addresses "
            "only: this target is open already"
        )
    job = LoadJob(target, LoadSettings(**given), sweep or {}, search)
    async with LoadSession(apart=job.settings.processes > 1, watch=None) as session:
        return await carry_out(job, session)


def _lines(headers: Mapping[str, str] | Sequence[str]) -> tuple[str, ...]:
    if isinstance(headers, Mapping):
        return tuple(f"{name}: {value}" for name, value in headers.items())
    return (headers,) if isinstance(headers, str) else tuple(headers)
