"""Engines behind sockets: KServe V2 over HTTP and gRPC, websocket, metrics, a dashboard. Thin over Engine.

::

    from asynctrt.serving import websocket_endpoint

    app = Starlette(routes=[WebSocketRoute("/ws", websocket_endpoint(engine))])
"""
