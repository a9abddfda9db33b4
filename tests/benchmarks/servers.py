"""Servers that only answer, with which serving is compared. Each runs in a process of its own.

``python -m tests.benchmarks.servers KIND PORT``
"""

import asyncio
import sys

import uvloop


def uvicorn(port):
    """Serve the HTTP limit of uvicorn: 64 bytes for any request."""
    import uvicorn

    async def app(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        headers = [(b"content-length", b"64"), (b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(64)})

    uvicorn.run(app, port=port, log_level="critical", access_log=False, lifespan="off", loop="uvloop")


def websockets(port):
    """Serve the limit of ``websockets``: return every message."""
    from websockets.asyncio.server import serve

    async def echo(socket):
        async for message in socket:
            await socket.send(message)

    async def main():
        async with serve(echo, "127.0.0.1", port, compression=None):
            await asyncio.Future()

    uvloop.run(main())


def grpc(port):
    """Serve the limit of ``grpc.aio``: return every message unread."""
    import grpc

    async def echo(request, context):
        return request

    async def main():
        server = grpc.aio.server()
        handlers = {"ModelInfer": grpc.unary_unary_rpc_method_handler(echo)}
        name = "inference.GRPCInferenceService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    uvloop.run(main())


if __name__ == "__main__":
    KINDS = {"uvicorn": uvicorn, "websockets": websockets, "grpc": grpc}
    KINDS[sys.argv[1]](int(sys.argv[2]))
