"""Reading requests from bytes: where they end, what is refused, what is kept. No sockets."""

import gc
import random
import weakref

import pytest

from asynctrt.serving import http_reader
from asynctrt.serving.http_reader import (
    KNOWN_HEAD_NBYTES_MAX,
    KNOWN_HEADERS_MAX,
    KNOWN_IN_VAIN_MAX,
    PATH_NBYTES_MAX,
    HttpRequest,
    KnownHead,
    RequestReader,
)
from asynctrt.serving.memory import UNCOUNTED_NBYTES
from tests.serving.support import Held

INNER = b"GET /inner HTTP/1.1\r\nHost: t\r\n\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: t\r\n\r\n"
POST = b"POST /outer HTTP/1.1\r\nHost: t\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(INNER)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
SIZE = b"%x" % len(INNER)
CHUNKS = SIZE + b"\r\n" + INNER + b"\r\n0\r\n\r\n"
WEBSOCKET = b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
MIB = 1 << 20

WHOLE = {
    "a length": POST + LENGTH + b"\r\n" + INNER,
    "chunks": POST + CHUNKED + b"\r\n" + CHUNKS,
    "chunks with a trailer": POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"X: y\r\n\r\n",
    "chunks with an extension": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a=b\r\n", 1),
    "capitals": POST + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n" + CHUNKS,
    "HTTP/1.0": POST.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n" + LENGTH + b"\r\n" + INNER,
    "h2c, a length": POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + LENGTH + b"\r\n" + INNER,
    "h2c, chunks": POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    "another protocol": POST + b"Upgrade: x\r\nConnection: close, upgrade\r\n" + LENGTH + b"\r\n" + INNER,
    "a websocket by POST": POST + WEBSOCKET + LENGTH + b"\r\n" + INNER,
    "a websocket with a body": POST.replace(b"POST", b"GET") + WEBSOCKET + LENGTH + b"\r\n" + INNER,
    "a websocket in chunks": POST.replace(b"POST", b"GET") + WEBSOCKET + CHUNKED + b"\r\n" + CHUNKS,
}
"""Requests to ``/outer`` whose body is `INNER`."""

REFUSED = {
    "CONNECT": (501, b"CONNECT t:80 HTTP/1.1\r\nHost: t\r\n" + LENGTH + b"\r\n" + INNER),
    "a length and chunks": (400, POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS),
    "chunks and a length": (400, POST + CHUNKED + b"Content-Length: 0\r\n\r\n" + CHUNKS),
    "two lengths": (400, POST + b"Content-Length: 0\r\n" + LENGTH + b"\r\n" + INNER),
    "a length twice": (400, POST + LENGTH + LENGTH + b"\r\n" + INNER),
    "a list of lengths": (400, POST + b"Content-Length: 0, 9\r\n\r\n" + INNER),
    "a length with a plus": (400, POST + b"Content-Length: +9\r\n\r\n" + INNER),
    "a negative length": (400, POST + b"Content-Length: -1\r\n\r\n" + INNER),
    "a hexadecimal length": (400, POST + b"Content-Length: 0x9\r\n\r\n" + INNER),
    "a length with a space": (400, POST + b"Content-Length: 0 9\r\n\r\n" + INNER),
    "an empty length": (400, POST + b"Content-Length: \r\n\r\n" + INNER),
    "a length over 64 bits": (400, POST + b"Content-Length: 18446744073709551616\r\n\r\n" + INNER),
    "a space before the colon": (400, POST + b"Transfer-Encoding : chunked\r\n" + LENGTH + b"\r\n" + CHUNKS),
    "a folded header": (400, POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + CHUNKS),
    "an unknown coding": (501, POST + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKS),
    "a coding after chunked": (400, POST + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKS),
    "a coding before chunked": (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS),
    "chunked twice": (400, POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS),
    "a vertical tab": (400, POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS),
    "identity": (400, POST + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + INNER),
    "chunks in HTTP/1.0": (
        400,
        POST.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\n" + CHUNKED + b"\r\n" + CHUNKS,
    ),
    "a size with a plus": (400, POST + CHUNKED + b"\r\n+" + CHUNKS),
    "a size with 0x": (400, POST + CHUNKED + b"\r\n0x" + CHUNKS),
    "a size without CR": (400, POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b"\n", 1)),
    "a chunk without end": (400, POST + CHUNKED + b"\r\n" + SIZE + b"\r\n" + INNER + b"XX0\r\n\r\n"),
    "a size over 64 bits": (400, POST + CHUNKED + b"\r\n1000000000000000" + CHUNKS),
    "a length as a trailer": (400, POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"Content-Length: 3\r\n\r\n"),
    "LF in an extension": (400, POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n", b";a\nb\r\n", 1)),
    "lines without CR": (400, POST.replace(b"\r\n", b"\n") + b"X: y\n\n"),
    "CR in a value": (400, POST + b"X: a\rContent-Length: 9\r\n\r\n" + INNER),
    "NUL in a value": (400, POST + b"X: a\0b\r\n" + LENGTH + b"\r\n" + INNER),
    "a space in a name": (400, POST + b"Bad Header: x\r\n" + LENGTH + b"\r\n" + INNER),
    "two hosts": (400, POST + b"Host: u\r\n" + LENGTH + b"\r\n" + INNER),
    "no host": (400, b"POST /outer HTTP/1.1\r\n" + LENGTH + b"\r\n" + INNER),
    "two tokens": (400, POST + b"Authorization: a\r\nauthorization: b\r\n" + LENGTH + b"\r\n" + INNER),
    "two lengths of JSON": (400, POST + b"Inference-Header-Content-Length: 1\r\n" * 2 + b"\r\n"),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/0.9": (505, b"GET /outer\r\n\r\n"),
}


class Sink:
    """Keeps what it is given."""

    def __init__(self):
        self.taken = []
        self.refused = []
        self.switched = []
        self.admitted = []
        self.reserved = []

    def wants_more(self):
        return True

    def admit(self, request):
        self.admitted.append(request.path)

    def reserve(self, request, nbytes):
        self.reserved.append(nbytes)

    def take(self, request):
        self.taken.append(request)

    def switch(self, request, rest):
        self.switched.append((request, rest))

    def refuse(self, request, status, why):
        self.refused.append((status, why))


def reading(*, max_headers=4096, max_body=MIB, has_websockets=True):
    sink = Sink()
    reader = RequestReader(sink, max_headers=max_headers, max_body=max_body, has_websockets=has_websockets)
    return reader, sink


def fed(raw, step, **limits):
    """The sink of a reader that was fed ``raw`` in pieces of ``step`` bytes."""
    reader, sink = reading(**limits)
    for start in range(0, len(raw), step):
        reader.feed(raw[start : start + step], 0)
    return sink


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
class TestFraming:
    @pytest.mark.parametrize("raw", WHOLE.values(), ids=WHOLE.keys())
    def test_a_body_is_no_request(self, raw, step):
        sink = fed(raw, step)
        assert [(one.path, one.body) for one in sink.taken] == [(b"/outer", INNER)]
        assert (sink.refused, sink.switched, sink.admitted) == ([], [], [b"/outer"])

    @pytest.mark.parametrize("raw", [raw for name, raw in WHOLE.items() if name != "another protocol"])
    def test_the_next_request_is_read_where_the_body_ends(self, raw, step):
        sink = fed(raw + NEXT + raw + NEXT, step)
        assert [one.path for one in sink.taken] == [b"/outer", b"/next"] * 2
        assert sink.taken[2].body == INNER
        assert sink.taken[3].body == b""
        assert sink.refused == []

    @pytest.mark.parametrize(("status", "raw"), REFUSED.values(), ids=REFUSED.keys())
    def test_what_ends_nowhere_certain_is_refused_and_nothing_is_read_after_it(self, status, raw, step):
        sink = fed(raw + NEXT, step)
        assert sink.taken == []
        assert [one for one, _ in sink.refused] == [status]

    def test_what_came_before_is_taken(self, step):
        sink = fed(NEXT + WHOLE["chunks"] + REFUSED["two lengths"][1] + NEXT, step)
        assert [one.path for one in sink.taken] == [b"/next", b"/outer"]
        assert [one for one, _ in sink.refused] == [400]

    def test_keep_alive_is_that_of_the_request(self, step):
        sink = fed(WHOLE["another protocol"], step)
        assert not sink.taken[0].keep_alive
        assert fed(WHOLE["h2c, a length"], step).taken[0].keep_alive

    def test_headers_that_are_repeated_are_lists(self, step):
        sink = fed(b"GET / HTTP/1.1\r\nHost: t\r\nAccept: a\r\naccept: b\r\n\r\n", step)
        assert sink.taken[0].headers[b"accept"] == b"a, b"


class TestWebsockets:
    RAW = b"GET /ws?x=1 HTTP/1.1\r\nHost: t\r\n" + WEBSOCKET + b"\r\n"

    def test_what_follows_belongs_to_the_websocket(self):
        sink = fed(self.RAW + INNER, MIB)
        ((request, rest),) = sink.switched
        assert (request.path, rest, sink.taken) == (b"/ws", INNER, [])

    def test_where_there_are_none_it_is_a_request(self):
        sink = fed(self.RAW + NEXT, MIB, has_websockets=False)
        assert [one.path for one in sink.taken] == [b"/ws", b"/next"]
        assert sink.switched == []


def test_thousands_of_wishes_in_one_piece():
    """The trap: a call within a call for each."""
    raw = b"GET /a HTTP/1.1\r\nHost: t\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    assert len(fed(raw * 5000, 1 << 30).taken) == 5000


class TestLimits:
    @pytest.mark.parametrize(
        ("start", "piece", "status"),
        [
            (b"GET /", b"a" * 1000, 414),
            (b"GET / HTTP/1.1\r\nX: ", b"a" * 1000, 431),
            (b"GET / HTTP/1.1\r\n", b"x: " + b"a" * 997 + b"\r\n", 431),
            (POST + CHUNKED + b"\r\n5;x=", b"a" * 1000, 431),
            (POST + CHUNKED + b"\r\n0\r\nX: ", b"a" * 1000, 431),
            (POST + CHUNKED + b"\r\n0\r\n", b"a: b\r\n" * 200, 431),
            (POST + CHUNKED + b"\r\n", b"3e8\r\n" + b"x" * 1000 + b"\r\n", 413),
        ],
        ids=["target", "header", "headers", "extension", "trailer", "trailers", "chunks"],
    )
    def test_nothing_grows_without_end(self, start, piece, status):
        reader, sink = reading(max_headers=12_000, max_body=10_000)
        reader.feed(start, 0)
        for _ in range(20):
            reader.feed(piece, 0)
        assert [one for one, _ in sink.refused] == [status]
        assert sink.taken == []

    def test_small_pieces_of_a_long_body_are_within_the_limits(self):
        reader, sink = reading(max_headers=100)
        reader.feed(POST + CHUNKED + b"\r\n", 0)
        for _ in range(1000):
            for piece in (b"1", b"\r", b"\n", b"x", b"\r\n"):
                reader.feed(piece, 0)
        reader.feed(b"0\r\n\r\n", 0)
        assert (sink.refused, sink.taken[0].body) == ([], b"x" * 1000)

    def test_a_target_at_its_limit(self):
        raw = b"GET /%s HTTP/1.1\r\nHost: t\r\n\r\n"
        assert fed(raw % (b"a" * (PATH_NBYTES_MAX - 1)), MIB, max_headers=1 << 16).refused == []
        ((status, _),) = fed(raw % (b"a" * PATH_NBYTES_MAX), MIB, max_headers=1 << 16).refused
        assert status == 414


def test_a_reader_that_is_closed_keeps_nothing(monkeypatch):
    reader, _ = reading(max_body=64 * MIB)
    gc.disable()
    held = Held(monkeypatch)
    try:
        reader.feed(POST + b"Content-Length: %d\r\n\r\n" % (32 * MIB), 0)
        for _ in range(16):
            reader.feed(b"x" * MIB, 0)
        assert held.nbytes() > 16 * MIB
        reader.close()
        assert held.nbytes() < MIB
        gone = weakref.ref(reader)
        del reader
        assert gone() is None
    finally:
        held.stop()
        gc.enable()


class Untouched:
    """Stands for a parser that nothing is to be given."""

    def feed_data(self, data):
        raise AssertionError(f"the parser was given {bytes(data)!r}")


def is_known(raw, then=None, **limits):
    """Whether a request, after it came once in a piece of its own, is known without being parsed."""
    reader, sink = reading(**limits)
    reader.feed(raw, 0)
    reader._parser = Untouched() if reader._parser is not None else None
    taken = len(sink.taken)
    try:
        reader.feed(raw if then is None else then, 0)
    except AssertionError:
        return False
    return len(sink.taken) == taken + 1


def said(sink):
    """All that a sink was given."""
    taken = [
        (one.method, one.path, one.version, one.headers, bytes(one.body), one.keep_alive)
        for one in sink.taken
    ]
    switched = [(one.path, bytes(rest)) for one, rest in sink.switched]
    return taken, sink.admitted, switched, sink.refused


class TestKnownHeads:
    """What a connection sent before is read without the parser, and nothing else is."""

    PLAIN = POST + LENGTH + b"\r\n" + INNER

    @pytest.mark.parametrize("raw", [PLAIN, INNER, INNER.replace(b"GET", b"HEAD")])
    def test_the_same_head_is_not_parsed_again(self, raw):
        assert is_known(raw)

    @pytest.mark.parametrize(
        "then",
        [
            PLAIN.replace(b"Host: t", b"Host: u"),
            PLAIN.replace(b"Host", b"host"),
            PLAIN.replace(b"POST", b"PUT "),
            PLAIN + b"\r\n",
            b"\r\n" + PLAIN,
            PLAIN[:-1],
            PLAIN + PLAIN,
        ],
    )
    def test_any_other_is(self, then):
        assert not is_known(self.PLAIN, then)

    @pytest.mark.parametrize("name", [name for name in WHOLE if name != "a length"])
    def test_what_does_not_end_by_its_length_is(self, name):
        assert not is_known(WHOLE[name])

    @pytest.mark.parametrize(
        "header",
        [b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"Upgrade: x\r\n", WEBSOCKET],
    )
    def test_what_is_not_simply_answered_is(self, header):
        assert not is_known(POST + header + LENGTH + b"\r\n" + INNER)

    def test_a_head_is_remembered_up_to_a_size(self):
        rest = b"\r\n" + LENGTH + b"\r\n"
        for more in (0, 1):
            padding = KNOWN_HEAD_NBYTES_MAX - len(POST + b"X: " + rest) + more
            assert is_known(POST + b"X: " + b"x" * padding + rest + INNER) == (not more)

    def test_a_head_is_remembered_up_to_so_many_headers(self):
        for more in (0, 1):
            lines = b"".join(b"%d:x\r\n" % number for number in range(KNOWN_HEADERS_MAX - 2 + more))
            assert is_known(POST + lines + LENGTH + b"\r\n" + INNER) == (not more)

    def test_a_body_for_which_memory_is_asked_is_parsed(self):
        for more in (0, 1):
            nbytes = UNCOUNTED_NBYTES + more
            assert is_known(POST + b"Content-Length: %d\r\n\r\n" % nbytes + bytes(nbytes)) == (not more)

    def test_what_came_in_pieces_or_with_others_is_not_remembered(self):
        for raw, step in ((self.PLAIN, len(self.PLAIN) - 1), (self.PLAIN + NEXT, MIB)):
            reader, _ = reading()
            for start in range(0, len(raw), step):
                reader.feed(raw[start : start + step], 0)
                assert reader._fed is None, "what was fed is kept"
            assert reader._known is None

    @pytest.mark.parametrize("after", [b"\r\n", b"\r\n\r\n"])
    def test_lines_after_a_request_do_not_move_its_end(self, after):
        # Skipped between requests, they would be taken for a part of the head, and two bytes of the body of
        # the next one for the beginning of another request.
        reader, sink = reading()
        reader.feed(POST + LENGTH + b"\r\n" + after + INNER, 0)
        assert reader._known is None
        assert [one.body for one in sink.taken] == [(after + INNER)[: len(INNER)]]

    @pytest.mark.parametrize("end", [b"\n", b"\r", b"\n\r\n", b"\n\n", b"\r\r"])
    def test_no_head_is_remembered_of_which_others_may_see_another_end(self, end):
        # The parser refuses them today; a laxer one would be no reason to take them.
        request = HttpRequest(b"POST", b"/outer", "1.1", {b"host": b"t"}, keep_alive=True)
        head = POST + LENGTH
        assert KnownHead.of(request, head + b"\r\n" + INNER, len(INNER)) is not None
        assert KnownHead.of(request, head + b"X: y" + end + b"\r\n\r\n" + INNER, len(INNER)) is None

    def test_after_the_last_request_nothing_is_read(self):
        reader, sink = reading()
        reader.feed(self.PLAIN, 0)
        reader.feed(POST + b"Connection: close\r\n" + LENGTH + b"\r\n" + INNER, 0)
        reader.feed(self.PLAIN, 0)
        assert len(sink.taken) == 2
        assert [status for status, _ in sink.refused] == [400]

    def test_each_request_is_admitted_and_refused_like_any(self):
        reader, sink = reading()
        reader.feed(self.PLAIN, 0)
        reader.feed(self.PLAIN, 0)
        assert sink.admitted == [b"/outer"] * 2
        sink.admit = lambda _: reader.close()
        reader.feed(self.PLAIN, 0)
        assert len(sink.taken) == 2

    def test_an_error_of_ours_is_answered_like_any(self, caplog):
        for times in (0, 1):
            reader, sink = reading()
            for _ in range(times):
                reader.feed(self.PLAIN, 0)
            sink.take = lambda _: 1 / 0
            reader.feed(self.PLAIN, 0)
            assert [status for status, _ in sink.refused] == [500]
        assert caplog.text.count("ZeroDivisionError") == 2

    def test_what_is_added_to_the_headers_of_one_is_not_in_the_next(self):
        reader, sink = reading()
        for _ in range(3):
            reader.feed(self.PLAIN, 0)
            sink.taken[-1].headers[b"x-request-id"] = b"one"
        reader.feed(self.PLAIN, 0)
        assert set(sink.taken[-1].headers) == {b"host", b"content-length"}

    def test_heads_that_differ_each_time_are_not_remembered_for_ever(self):
        reader, sink = reading()
        for number in range(KNOWN_IN_VAIN_MAX):
            reader.feed(self.PLAIN.replace(b"Host", b"X: %d\r\nHost" % number, 1), 0)
            assert (b"x", b"%d" % number) in reader._known.headers.items()
        reader.feed(self.PLAIN, 0)
        reader._parser = Untouched()
        with pytest.raises(AssertionError):
            reader.feed(self.PLAIN, 0)
        assert len(sink.taken) == KNOWN_IN_VAIN_MAX + 1

    def test_of_a_reader_that_is_closed_nothing_is_kept(self):
        reader, sink = reading()
        reader.feed(self.PLAIN, 0)
        reader.close()
        assert reader._known is None
        reader.feed(self.PLAIN, 0)
        assert len(sink.taken) == 1

    @pytest.mark.parametrize("seed", range(20))
    def test_all_is_as_if_it_were_parsed(self, seed, monkeypatch):
        chosen = random.Random(seed)
        parts = [*WHOLE.values(), self.PLAIN, self.PLAIN, self.PLAIN, INNER, NEXT, b"\r\n", b"\r\n\r\n"]
        bad = [raw for _, raw in REFUSED.values()]
        for _ in range(60):
            few = chosen.sample(parts, 3)
            requests = [chosen.choice(few) for _ in range(chosen.randrange(2, 12))]
            if chosen.random() < 0.3:
                requests.append(chosen.choice(bad))
            pieces = list(requests)
            if chosen.random() < 0.5:  # Some of them in two pieces, and some two in one.
                at = chosen.randrange(len(pieces))
                cut = chosen.randrange(1, len(pieces[at])) if len(pieces[at]) > 1 else 1
                pieces[at : at + 2] = [pieces[at][:cut], pieces[at][cut:] + b"".join(pieces[at + 1 : at + 2])]
            both = []
            for limit in (KNOWN_IN_VAIN_MAX, 0):
                monkeypatch.setattr(http_reader, "KNOWN_IN_VAIN_MAX", limit)
                reader, sink = reading()
                for piece in pieces:
                    reader.feed(piece, 0)
                both.append(said(sink))
            assert both[0] == both[1], pieces
