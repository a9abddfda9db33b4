"""Check that the parsers of what clients send say the same however it comes, and raise nothing unforeseen.

Each is compared with one that is simpler: requests that come whole with the same in pieces, cut websocket
frames with the library alone, a split protobuf message with protobuf alone.
"""

from google.protobuf.message import DecodeError
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from asynctrt.errors import CallerError
from asynctrt.kserve import protobuf
from asynctrt.serving import frame_cutter
from asynctrt.serving.http_reader import RequestReader
from tests.fuzz.decoder import check_error

NBYTES_MAX = 600
MESSAGE = protobuf.message_classes()["ModelInferRequest"]


def pieces_of(raw, sizes):
    """Cut bytes into pieces; each of ``sizes`` is the size of one, over and over."""
    position = number = 0
    while position < len(raw):
        nbytes = max(1, sizes[number % len(sizes)] if sizes else len(raw))
        yield raw[position : position + nbytes]
        position += nbytes
        number += 1


# ---- HTTP


class Sink:
    """Note the requests of a connection, until one is refused or opens a websocket."""

    def __init__(self):
        self.taken = []
        self.end = None
        self.reader = RequestReader(self, max_headers=300, max_body=NBYTES_MAX, has_websockets=True)

    def wants_more(self):
        return True

    def admit(self, request):
        assert request.headers is not None

    def reserve(self, request, nbytes):
        assert nbytes <= NBYTES_MAX

    def take(self, request):
        assert self.end is None, "nothing is read after the end"
        body = bytes(request.body)
        assert len(body) <= NBYTES_MAX
        length = request.headers.get(b"content-length")
        assert length is None or int(length) == len(body)
        self.taken.append((request.method, request.path, request.headers, body, request.keep_alive))

    def switch(self, request, rest):
        assert request.is_websocket
        self.end = "switched"
        self.reader.close()

    def refuse(self, request, status, why):
        assert self.end is None
        assert 400 <= status < 600
        assert status != 500, why
        assert len(why) < 1000
        self.end = "refused"


def requests_of(pieces):
    sink = Sink()
    for piece in pieces:
        sink.reader.feed(piece, 0)
    return sink


def check_http(raw, sizes):
    """Check that requests are the same, whole or in pieces, up to where one is refused."""
    whole, cut = requests_of([raw]), requests_of(pieces_of(raw, sizes))
    count = min(len(whole.taken), len(cut.taken))
    assert whole.taken[:count] == cut.taken[:count]
    # A head or a trailer that is too long is noticed a piece earlier or later.
    if whole.end == cut.end:
        assert len(whole.taken) == len(cut.taken)
    else:
        assert "switched" not in (whole.end, cut.end)


# ---- websockets


class Library:
    """What the library makes of bytes: frames, messages, and how it ended."""

    def __init__(self, max_size=NBYTES_MAX):
        self.protocol = ServerProtocol(max_size=max_size)
        self.protocol.state = State.OPEN
        self.protocol.parser = self.protocol.parse()
        next(self.protocol.parser)
        self.messages = []
        self.largest = 0
        self._pieces = []

    def feed(self, data):
        if data:
            self.protocol.receive_data(data)
        for frame in self.protocol.events_received():
            if frame.opcode >= Opcode.CLOSE:
                self.messages.append((frame.opcode, bytes(frame.data)))
                continue
            self.largest = max(self.largest, len(frame.data))
            self._pieces.append(frame)
            if frame.fin:
                data = b"".join([bytes(piece.data) for piece in self._pieces])
                self.messages.append((self._pieces[0].opcode, data))
                self._pieces = []

    @property
    def said(self):
        closing = self.protocol.close_sent
        return self.messages, None if closing is None else closing.code


def check_frames(raw, sizes):
    """Check that cutting changes no message, and no code with which a connection is closed."""
    whole, cut, cutter = Library(), Library(), frame_cutter.FrameCutter(NBYTES_MAX)
    # What is wrong with a large frame is noticed with its first four bytes, not with its head or its end.
    for piece in (*pieces_of(raw, sizes), bytes(NBYTES_MAX + 24)):
        whole.feed(piece)
        cut.feed(cutter.feed(piece))
    assert cut.said == whole.said


# ---- protobuf


def check_protobuf(raw, sizes):
    """Check that a split message is the message. It comes whole."""
    try:
        split = protobuf.split_request(raw, nbytes_max=NBYTES_MAX)
    except CallerError as error:
        check_error(error)
        return
    try:
        expected = MESSAGE.FromString(raw)
    except DecodeError:
        return
    assert split.raw is not None
    found = MESSAGE.FromString(split.rest)
    assert not found.raw_input_contents
    assert [bytes(tensor) for tensor in split.raw] == list(expected.raw_input_contents)
    expected.ClearField("raw_input_contents")
    assert found.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


# ---- valid input to begin from


def masked(opcode, data, *, fin=True):
    return Frame(opcode, data, fin).serialize(mask=True)


def seeds():
    """Yield valid input for each check to begin from."""
    post = b"POST /v2/models/a/infer?x HTTP/1.1\r\nHost: a\r\n"
    for one in (
        b"GET / HTTP/1.0\r\n\r\n",
        post + b"Content-Length: 3\r\n\r\nabc" + post + b"content-length: 0\r\nX: y\r\nX: z\r\n\r\n",
        post + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nTrailer: a\r\n\r\n",
        post + b"Upgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 3\r\n\r\nabc" + post,
        b"GET /v2/ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nrest",
    ):
        yield check_http, one
    for frames in (
        masked(Opcode.TEXT, b"a") + masked(Opcode.PING, b"") + masked(Opcode.CLOSE, b"\x03\xe8"),
        masked(Opcode.BINARY, bytes(200)) + masked(Opcode.BINARY, b""),
        masked(Opcode.BINARY, bytes(100), fin=False) + masked(Opcode.PING, b"a") + masked(Opcode.CONT, b"b"),
    ):
        yield check_frames, frames
    call = MESSAGE(model_name="a", id="b", raw_input_contents=[b"", bytes(20), b"c"])
    tensor = call.inputs.add(name="input", datatype="FP32", shape=[1, -1])
    tensor.contents.fp32_contents.append(1.5)
    call.parameters["priority"].int64_param = 3
    yield check_protobuf, call.SerializeToString()


SMALL = (
    (frame_cutter, "LARGE_NBYTES", 40),
    (protobuf, "FAST_NBYTES", -1),
)
"""Limits from which on something is large, so low that short inputs reach what is done then."""
