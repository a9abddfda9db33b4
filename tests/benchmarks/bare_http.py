"""The least that a server in Python can do: find where each request ends, and answer all of them the same.

What a machine and its clients cannot get out of this, they cannot get out of any server on the same loop.
"""

import argparse
import asyncio
import os
import re
import socket

import uvloop

LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
BODY = b'{"model_name":"noop","outputs":[]}'
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)


class Connection(asyncio.Protocol):
    """Answers what has come as a whole, in one write."""

    def __init__(self):
        self._transport = None
        self._left = b""

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        data = self._left + data if self._left else data
        at = count = 0
        while (head := data.find(b"\r\n\r\n", at)) >= 0:
            length = LENGTH.search(data, at, head)
            end = head + 4 + (int(length[1]) if length else 0)
            if end > len(data):
                break
            at, count = end, count + 1
        self._left = data[at:]
        if count:
            self._transport.write(ANSWER * count)


async def serve(listening):
    server = await asyncio.get_running_loop().create_server(Connection, sock=listening)
    await server.serve_forever()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.processes - 1):
        if not os.fork():
            break
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind(("127.0.0.1", options.port))
    uvloop.run(serve(listening))


if __name__ == "__main__":
    main()
