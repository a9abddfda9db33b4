"""Tokens and certificates from files, which change while the server runs."""

import asyncio
import logging
import os
import signal
import ssl
import sys

import grpc
import pytest

from asynctrt.errors import OptionsError, UnauthorizedError
from asynctrt.serving.credentials import CONFIG_NBYTES_MAX, Certificate, read_tokens
from tests.helpers import until
from tests.serving.support import WAIT_S, address, connected, request, serving, settle_grpc
from tests.serving.test_http import infer, outputs
from tests.serving.tls import certificate


def written(path, text):
    path.write_text(text)
    path.chmod(0o600)
    return path


class TestTokens:
    def test_one_a_line(self, tmp_path):
        path = written(tmp_path / "tokens", "# a comment\n\n one \ntwo\r\none\n#three\na#b")
        assert read_tokens(path) == ("one", "two", "a#b")

    @pytest.mark.parametrize(
        ("raw", "says"),
        [
            (b"", "has no token"),
            (b"\n# only this\n", "has no token"),
            (b"one\ntwo words\n", "line 2 .* is not a token"),
            ("t\u00f6ken".encode(), "line 1 .* is not a token"),
            (b"\xff\xfe", "cannot read"),
            (b"x" * (CONFIG_NBYTES_MAX + 1), "more than"),
        ],
    )
    def test_what_is_broken_is_refused_without_telling_it(self, tmp_path, raw, says):
        path = tmp_path / "tokens"
        path.write_bytes(raw)
        with pytest.raises(OptionsError, match=says) as caught:
            read_tokens(path)
        assert "two words" not in str(caught.value)

    def test_a_file_that_is_missing_or_a_folder(self, tmp_path):
        for path in (tmp_path, tmp_path / "none"):
            with pytest.raises(OptionsError, match="cannot read the tokens"):
                read_tokens(path)


def test_a_certificate_that_is_broken_later_is_refused(tmp_path):
    chain, key = certificate(tmp_path)
    known = Certificate(chain, key)
    before = known.pem
    (tmp_path / "other").mkdir()
    _, other_key = certificate(tmp_path / "other")
    key.write_bytes(other_key.read_bytes())
    with pytest.raises(OptionsError, match="cannot be used"):
        known.read()
    assert known.pem is before


async def status_with(raw, token):
    raw.send(request("/v2/models/double", Authorization=f"Bearer {token}"))
    return (await raw.answer())[0]


@pytest.mark.anyio
async def test_a_refusal_costs_the_same_for_one_token_and_a_thousand():
    calls = []
    for count in (1, 1000):
        async with serving(tokens=tuple(f"token-{number}" for number in range(count))) as server:
            made = []
            sys.setprofile(lambda _, event, what, made=made: made.append(event))
            try:
                with pytest.raises(UnauthorizedError):
                    server.api.authorize(b"/v2/models/double", {b"authorization": b"Bearer wrong"})
            finally:
                sys.setprofile(None)
            calls.append(len(made))
    assert calls[0] == calls[1]


@pytest.mark.anyio
class TestReloading:
    async def test_tokens_change_and_connections_stay(self, tmp_path, caplog):
        caplog.set_level(logging.INFO, logger="asynctrt")
        path = written(tmp_path / "tokens", "old")
        async with serving(tokens=["fixed"], tokens_file=path) as server, connected(server) as raw:
            raw.send(request("/v2"))
            assert (await raw.answer())[0] == 401
            assert [await status_with(raw, token) for token in ("fixed", "old", "new")] == [200, 200, 401]
            written(path, "new")
            assert await status_with(raw, "old") == 200, "not read until it is asked to"
            await server.reload()
            assert [await status_with(raw, token) for token in ("fixed", "old", "new")] == [200, 401, 200]
            for broken in ("", "two words"):
                written(path, broken)
                with pytest.raises(OptionsError):
                    await server.reload()
                assert [await status_with(raw, token) for token in ("fixed", "new")] == [200, 200]
        assert "reloaded 2 token(s)" in caplog.text
        assert not {"old", "new", "two words"} & set(caplog.text.split())

    async def test_a_file_that_all_may_read_is_warned_of(self, tmp_path, caplog):
        path = written(tmp_path / "tokens", "old")
        path.chmod(0o644)
        async with serving(tokens_file=path):
            assert "every user" in caplog.text

    async def test_without_its_file_it_does_not_start(self, tmp_path):
        with pytest.raises(OptionsError, match="cannot read the tokens"):
            async with serving(tokens_file=tmp_path / "none"):
                pass

    async def test_certificates_change_for_new_connections(self, tmp_path):
        chain, key = certificate(tmp_path)
        tokens = written(tmp_path / "tokens", "t")
        settings = {"tls_certificate": chain, "tls_key": key, "tokens_file": tokens, "grpc": True}
        async with serving(**settings) as server:
            first = chain.read_text()
            trusted = ssl.create_default_context(cafile=chain)
            async with connected(server, ssl=trusted, server_hostname="localhost") as open_before:
                assert await presented(server) == await presented(server, "localhost") == first
                await call_grpc(server, first)
                key.write_bytes(b"broken")
                written(tokens, "u")
                with pytest.raises(OptionsError, match="cannot be used"):
                    await server.reload()
                assert await presented(server) == first
                assert await status_with(open_before, "t") == 200, "of two files one was broken"
                certificate(tmp_path)
                assert chain.read_text() != first
                await server.reload()
                assert await presented(server) == await presented(server, "localhost") == chain.read_text()
                assert await status_with(open_before, "u") == 200
                await call_grpc(server, chain.read_text())
                with pytest.raises(grpc.aio.AioRpcError):
                    await call_grpc(server, first)
        await settle_grpc()

    async def test_the_signal(self, tmp_path, caplog):
        path = written(tmp_path / "tokens", "old")
        async with serving(tokens_file=path) as server, connected(server) as raw:
            serve = asyncio.create_task(server.serve())
            # Under nohup it is ignored before.
            before = (signal.SIG_DFL, signal.SIG_IGN)
            await until(lambda: signal.getsignal(signal.SIGHUP) not in before)
            written(path, "two words")
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: "SIGHUP" in caplog.text)
            assert await status_with(raw, "old") == 200
            written(path, "new")
            version = server.api.tokens_version
            os.kill(os.getpid(), signal.SIGHUP)
            await until(lambda: server.api.tokens_version != version)
            raw.send(infer(1, Authorization="Bearer new"))
            assert outputs(await raw.answer()) == [2]
            os.kill(os.getpid(), signal.SIGTERM)
            async with asyncio.timeout(WAIT_S):
                await serve
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def presented(server, name=None):
    """The certificate that a new connection gets, in PEM; without a name the client does not say one."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = address(server)
    # An address is not sent as a server's name.
    _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name or host)
    try:
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(der)
    finally:
        writer.transport.abort()


async def call_grpc(server, pem):
    """Call the server as a client that trusts this certificate alone."""
    target = server.grpc_target.replace("127.0.0.1", "localhost")
    trusted = grpc.ssl_channel_credentials(root_certificates=pem.encode())
    # A channel of its own, not one that gRPC shares with an earlier client of the same address.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(target, trusted, options) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        return await call(b"", timeout=5)
