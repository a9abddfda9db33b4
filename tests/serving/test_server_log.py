"""The server's log: its two forms, failed batches, refusals, loads, and what it warns of."""

import io
import json
import logging
import sys
from contextlib import AsyncExitStack

import pytest

from asynctrt.serving import command, server_log
from asynctrt.serving.command import warnings_of
from asynctrt.serving.server_log import FAILURES_MAX, IDS_MAX, JsonFormatter, TextFormatter, set_up_logging
from asynctrt.serving.settings import ServerSettings
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import failing_model
from tests.serving.support import ask, connected, engine_of, request, serving
from tests.serving.test_http import infer


def record(message, *args, error=None, **extra):
    made = logging.LogRecord("asynctrt.serving", logging.WARNING, "f.py", 1, message, args, None)
    if error is not None:
        made.exc_info = (type(error), error, error.__traceback__)
    made.__dict__.update(extra)
    return made


def raised(text):
    try:
        raise ValueError(text)
    except ValueError as error:
        return error


class TestForms:
    def test_text(self):
        line = TextFormatter().format(record("model %s", "m", request_id="r1", requests=["a", "b"]))
        assert line.endswith(" WARNING model m (request_id: r1, requests: a b)")
        assert line[:4].isdigit()

    def test_a_client_cannot_forge_a_line(self):
        evil = "x\n2030-01-01 ERROR all is lost\r\x1b[2J\x85\u2028y"
        text = TextFormatter().format(record("model %s", evil, error=raised(evil), request_id=evil))
        first, *trace = text.split("\n")
        assert "x\ufffd2030" in first
        assert all(row.startswith("    ") for row in trace if row)
        assert not set(text) & set("\r\x1b\x85\u2028")
        line = JsonFormatter().format(record("model %s", evil, error=raised(evil)))
        assert len(line.splitlines()) == 1
        assert evil in json.loads(line)["message"]

    def test_json(self):
        line = json.loads(JsonFormatter().format(record("it %s", "failed", error=raised("why"), model="m")))
        assert (line["level"], line["logger"], line["message"]) == (
            "warning",
            "asynctrt.serving",
            "it failed",
        )
        assert line["model"] == "m"
        assert line["time"] > 1.7e9
        assert "ValueError: why" in line["traceback"]
        assert "request_id" not in line

    def test_a_traceback_is_bounded(self):
        text = json.loads(JsonFormatter().format(record("it", error=raised("x" * 100_000))))["traceback"]
        assert len(text) < server_log.TRACEBACK_CHARS_MAX + 100
        assert "characters left out" in text

    @pytest.mark.parametrize(("form", "level"), [("text", "info"), ("json", "error")])
    def test_setting_up(self, monkeypatch, form, level):
        root, ours = logging.getLogger(), logging.getLogger("asynctrt")
        before = root.handlers[:], root.level, ours.level
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        root.handlers.clear()  # Those of pytest would be closed.
        try:
            set_up_logging(form, level)
            ours.info("an info")
            ours.error("an error")
            logging.getLogger("another").info("not ours")
            logging.getLogger("grpc._cython.cygrpc").error("ExecuteBatchError raised in core by a method")
            lines = sys.stderr.getvalue().splitlines()
        finally:
            root.handlers[:], ours.level = before[0], before[2]
            root.setLevel(before[1])
        said = [json.loads(line)["message"] if form == "json" else line[-8:].strip() for line in lines]
        assert said == (["an info", "an error"] if level == "info" else ["an error"])


def said(caplog, start):
    return [entry for entry in caplog.records if entry.getMessage().startswith(start)]


@pytest.mark.anyio
class TestFailedBatches:
    async def test_a_batch_is_logged_once_with_its_traceback_and_its_requests(self, caplog):
        device = LatchDevice(concurrency=1)
        engine = {"device": device, "contexts": 1, "max_rows": 32, "idempotent": False}
        async with serving({"double": failing_model()}, engine=engine) as server:
            async with connected(server) as first, connected(server) as other, connected(server) as third:
                first.send(infer(1))
                await until(lambda: device.held == 1)
                other.send(infer(-1, X_Request_ID="r-1"))
                third.send(infer(-1, X_Request_ID="r-2"))
                await until(lambda: engine_of(server).statistics().queued_requests == 2)
                device.open()
                assert [(await raw.answer())[0] for raw in (first, other, third)] == [200, 500, 500]
            await until(lambda: said(caplog, "a batch of"))
        (entry,) = said(caplog, "a batch of")
        assert entry.getMessage() == "a batch of model double version 1 failed, with 2 requests"
        assert (entry.model, entry.version, entry.requests) == ("double", "1", ["r-1", "r-2"])
        text = TextFormatter().format(entry)
        assert "direct cause" in text
        assert "tests/models.py" in text, "where the model raised"
        assert "requests: r-1 r-2" in text

    async def test_a_flood_of_them_is_counted(self, caplog, monkeypatch):
        now_ns = 0
        async with serving({"double": failing_model()}) as server, connected(server) as raw:
            failures = server_log.Failures(lambda: now_ns)
            server.api.failed = failures.note
            for _ in range(FAILURES_MAX + 5):
                raw.send(infer(-1))
                assert (await raw.answer())[0] == 500
            await until(lambda: not failures._batches)
            assert len(said(caplog, "a batch of")) == FAILURES_MAX
            assert not said(caplog, "5 more")
            now_ns += server_log.PERIOD_NS
            failures.tick()
            assert said(caplog, "5 more batches failed in the last 10 s and were not logged")
            raw.send(infer(-1))
            assert (await raw.answer())[0] == 500
            await until(lambda: len(said(caplog, "a batch of")) == FAILURES_MAX + 1)
            now_ns += server_log.PERIOD_NS
            failures.tick()
            assert len(said(caplog, "5 more")) == 1

    async def test_what_clients_do_wrong_is_not_a_failed_batch(self, caplog):
        engine = {"device": LatchDevice(concurrency=1), "contexts": 1, "max_rows": 1, "max_queue_rows": 1}
        async with serving(engine=engine) as server, connected(server) as raw, connected(server) as other:
            raw.send(request("/v2/models/double/infer", b"{}"))
            assert (await raw.answer())[0] == 400
            raw.send(infer(1))
            await until(lambda: engine["device"].held == 1)
            other.close()
            engine["device"].open()
            assert (await raw.answer())[0] == 200
        assert not said(caplog, "a batch of")

    async def test_of_many_requests_a_few_are_named(self, caplog):
        device = LatchDevice(concurrency=1)
        engine = {"device": device, "contexts": 1, "max_rows": 64, "idempotent": False}
        async with serving({"double": failing_model()}, engine=engine) as server, AsyncExitStack() as stack:
            first, *others = [await stack.enter_async_context(connected(server)) for _ in range(IDS_MAX + 4)]
            first.send(infer(1))
            await until(lambda: device.held == 1)
            for raw in others:
                raw.send(infer(-1))
            await until(lambda: engine_of(server).statistics().queued_requests == len(others))
            device.open()
            assert [(await raw.answer())[0] for raw in others] == [500] * len(others)
            await until(lambda: said(caplog, "a batch of"))
        (entry,) = said(caplog, "a batch of")
        assert len(entry.requests) == IDS_MAX
        assert entry.getMessage().endswith(f"{IDS_MAX + 3} requests and 3 more")


@pytest.mark.anyio
class TestRefusals:
    async def test_floods_are_one_line_a_period(self, caplog):
        now_ns = 100_000_000_000
        device = LatchDevice(concurrency=1)
        engine = {"device": device, "contexts": 1, "max_rows": 1, "max_queue_rows": 1}
        async with serving(engine=engine, max_connections=3) as server:
            refusals = server_log.Refusals(server.api, lambda: server._hub.refused, now_ns=lambda: now_ns)
            async with connected(server) as first, connected(server) as second, connected(server) as third:
                first.send(infer(1))
                await until(lambda: device.held == 1)
                second.send(infer(1))
                await until(lambda: engine_of(server).statistics().queued_rows == 1)
                for count in (1, 2):
                    for _ in range(3):
                        third.send(infer(1))
                        assert (await third.answer())[0] == 503
                    now_ns += 1_000_000_000
                    refusals.tick()
                    assert len(said(caplog, "model double version 1 refused")) == 1, count
                async with connected(server) as fourth:
                    fourth.send(infer(1))
                    assert (await fourth.answer())[0] == 503
                now_ns += server_log.PERIOD_NS
                refusals.tick()
                device.open()
                assert [(await raw.answer())[0] for raw in (first, second)] == [200, 200]
            first, second = said(caplog, "model double version 1 refused")
            assert "refused 3 requests within 1 s: 3 found its queue full" in first.getMessage()
            assert "refused 3 requests within 11 s" in second.getMessage()
            (entry,) = said(caplog, "refused 1 connections")
            assert "within 11 s" in entry.getMessage()
            server.api.memory.refuse()
            now_ns += server_log.PERIOD_NS
            refusals.tick()
            assert said(caplog, "refused 1 requests within 10 s, as max_memory is held")
            now_ns += server_log.PERIOD_NS
            caplog.clear()
            refusals.tick()
            assert not caplog.records


@pytest.mark.anyio
async def test_loads_and_unloads(caplog):
    caplog.set_level(logging.INFO, logger="asynctrt")
    async with serving(model_control=True) as server:
        assert said(caplog, "loaded model double version 1 on host")
        assert (await ask(server, "/v2/repository/models/double/unload", method="POST"))[0] == 200
        assert said(caplog, "unloaded model double version 1")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, []),
        ({"host": "localhost", "tokens": ["t"]}, []),
        ({"host": "::1"}, []),
        ({"host": "0.0.0.0"}, ["anyone who can reach this address"]),
        ({"host": "10.1.2.3", "tokens": ["t"]}, ["unencrypted to 10.1.2.3"]),
        ({"host": "a.example", "tokens": ["t"], "tls_certificate": "c", "tls_key": "k"}, []),
        (
            {"host": "::", "tokens": ["t"], "metrics_port": 8002},
            ["unencrypted", "port 8002 can read the metrics"],
        ),
    ],
)
def test_what_is_dangerous_about_an_address(monkeypatch, settings, says):
    monkeypatch.setattr(command, "open_files_max", lambda: 1 << 20)
    found = warnings_of(ServerSettings(**settings))
    assert len(found) == len(says)
    assert all(text in line for line, text in zip(found, says, strict=True))


@pytest.mark.parametrize(
    ("settings", "descriptors", "total", "says"),
    [
        ({}, 1024, None, ["max_connections is 4096, and this process may open 1024 files"]),
        ({"max_connections": 700}, 1024, None, []),
        ({"max_memory": 600 << 20}, 1 << 20, 1 << 30, ["more than half of the 1073741824 bytes"]),
        ({"max_memory": 500 << 20}, 1 << 20, 1 << 30, []),
    ],
)
def test_what_a_server_lacks(monkeypatch, settings, descriptors, total, says):
    monkeypatch.setattr(command, "open_files_max", lambda: descriptors)
    monkeypatch.setattr(command, "memory_nbytes", lambda: total)
    found = warnings_of(ServerSettings(**settings))
    assert len(found) == len(says)
    assert all(text in line for line, text in zip(found, says, strict=True))
