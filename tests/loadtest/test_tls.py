"""TLS: whom a load test trusts, and who it is, over each protocol, against real servers."""

import ssl

import pytest
from aiohttp import web

from asynctrt import loadtest
from asynctrt.errors import AsynctrtError, OptionsError, TargetError, UsageError
from asynctrt.loadtest import Tls
from tests.loadtest.support import serving_app
from tests.serving.support import serving
from tests.serving.tls import certificate

pytestmark = pytest.mark.anyio
QUICK = {"callers": 2, "seconds": 0.2, "warmup": 0.0}


async def test_each_protocol_trusts_the_certificates_that_it_is_given(tmp_path):
    chain, key = certificate(tmp_path)
    settings = {"tls_certificate": chain, "tls_key": key, "grpc": True}
    async with serving(**settings) as server:
        http = f"{server.http_url}/v2/models/double"
        assert http.startswith("https://")
        for where in (http, f"{http.replace('https', 'wss', 1)}/ws", f"grpcs://{server.grpc_target}/double"):
            with pytest.raises(TargetError, match="127.0.0.1"):
                await loadtest.run(where, **QUICK)
            report = await loadtest.run(where, tls=Tls(ca=chain), **QUICK)
            assert report.runs[0].error_share == 0
            assert report.runs[0].answered > 0
        report = await loadtest.run(http, tls=Tls(insecure=True), **QUICK)
        assert report.runs[0].answered > 0
        assert report.target["insecure"] is True
        with pytest.raises(OptionsError, match="gRPC always checks the server's certificate"):
            await loadtest.run(f"grpcs://{server.grpc_target}/double", tls=Tls(insecure=True), **QUICK)


async def answer(_request):
    return web.Response(text="{}")


async def test_a_client_shows_its_own_certificate(tmp_path):
    chain, key = certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=chain)
    context.load_cert_chain(chain, key)
    context.verify_mode = ssl.CERT_REQUIRED
    application = web.Application()
    application.router.add_get("/x", answer)
    both = tmp_path / "both.pem"
    both.write_bytes(chain.read_bytes() + key.read_bytes())
    async with serving_app(application, ssl_context=context) as url:
        for own in ({"cert": chain, "key": key}, {"cert": both}):
            report = await loadtest.run(f"{url}/x", tls=Tls(ca=chain, **own), **QUICK)
            assert report.runs[0].answered > 0
        with pytest.raises(AsynctrtError):
            await loadtest.run(f"{url}/x", tls=Tls(ca=chain), **QUICK)


def test_without_files_it_trusts_what_its_libraries_trust(tmp_path, monkeypatch):
    chain, _ = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(chain))
    assert Tls().context().cert_store_stats()["x509"] == 1
    assert Tls().credentials() == (None, None, None)


async def test_misuse(tmp_path):
    chain, key = certificate(tmp_path)
    with pytest.raises(OptionsError, match="give cert too"):
        Tls(key=key)
    with pytest.raises(OptionsError, match="give only one of them"):
        Tls(ca=chain, insecure=True)
    with pytest.raises(UsageError, match=r"nothing\.pem' cannot be read"):
        await loadtest.run("https://127.0.0.1:9/x", tls=Tls(ca=tmp_path / "nothing.pem"), **QUICK)
    (tmp_path / "junk.pem").write_text("junk")
    for tls in (Tls(ca=tmp_path / "junk.pem"), Tls(cert=tmp_path / "junk.pem"), Tls(cert=chain)):
        for where in ("https://127.0.0.1:9/x", "grpcs://127.0.0.1:9/x"):
            with pytest.raises(UsageError, match="the certificates of the load test cannot be used"):
                await loadtest.run(where, tls=tls, **QUICK)
    for where in ("http://127.0.0.1:9/x", "model.onnx"):
        with pytest.raises(OptionsError, match="ca, cert, key or insecure"):
            await loadtest.run(where, tls=Tls(ca=chain), **QUICK)
