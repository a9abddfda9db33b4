"""The websocket of a server as a target."""

import asyncio
from urllib.parse import quote

import pytest

from asynctrt.errors import ConnectionLostError, ExecutionError, InputError, TargetError
from asynctrt.loadtest import websocket_target
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.loadtest.kserve_support import ServerContract, answer, fails
from tests.models import rows
from tests.serving.support import taken

pytestmark = pytest.mark.anyio


class TestOurServer(ServerContract):
    kind = "websocket"
    wrong_input = InputError
    model_failure = ExecutionError

    def where(self, server, model="double", version=""):
        path = f"/models/{quote(model, safe='')}" if model else ""
        version = f"/versions/{version}" if version else ""
        return f"{server.http_url.replace('http', 'ws', 1)}/v2{path}{version}/ws"

    async def after_death(self, target, prepared):
        """It waits for its connection to be made again."""
        future = target.start(prepared)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not future.done()
        future.cancel()
        await asyncio.wait([future])
        assert future.cancelled()

    async def test_more_on_the_way_than_a_connection_takes(self):
        device = LatchDevice()
        served = self.served(engine={"device": device}, max_requests_per_connection=2)
        async with served as server, self.open(server) as target:
            prepared = target.prepare({"input": rows(1)})
            futures = [target.start(prepared) for _ in range(20)]
            await until(lambda: taken(server) == 8)
            device.open()
            for future in futures:
                assert target.outputs(await future)["output"][0, 0] == 2

    async def test_one_of_its_connections_is_lost(self):
        async with self.latched() as (target, server, device):
            prepared = target.prepare({"input": rows(1)})
            futures = [target.start(prepared) for _ in range(8)]
            await until(lambda: taken(server) == 8)
            sockets = [one for one in server._hub.connections if "SocketConnection" in repr(one)]
            assert len(sockets) == 4
            sockets[0].abort()
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            device.open()
            errors = [await fails(future) for future in futures]
            lost = [error for error in errors if error is not None]
            assert len(lost) == 2
            assert all(isinstance(error, ConnectionLostError) for error in lost)
            for _ in range(8):
                assert (await answer(target, {"input": rows(2)}))["output"][0, 0] == 4

    async def test_a_server_that_is_gone_when_its_pages_were_read(self, monkeypatch):
        read = websocket_target.Pages.read
        async with self.served() as server:

            async def read_and_stop(pages):
                await read(pages)
                for listener in server._listeners:
                    listener.close()

            monkeypatch.setattr(websocket_target.Pages, "read", read_and_stop)
            with pytest.raises(TargetError, match="cannot connect to ws://127.0.0.1"):
                async with self.open(server):
                    pass
