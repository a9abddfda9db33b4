"""Compress and decompress bodies, within limits on memory and on event loop time."""

import zlib
from collections.abc import Sequence
from typing import Final

from asynctrt.errors import RequestError, TooLargeError
from asynctrt.kserve.datatypes import Buffer
from asynctrt.serving.assembly import ASSEMBLED_NBYTES_MIN, Assembly

COMPRESS_NBYTES_MIN: Final = 512
"""Smaller answers are not compressed."""
OFF_LOOP_NBYTES_MIN: Final = 32 << 10
"""Bodies of at least this size are compressed and decompressed in a thread; so are smaller ones that inflate
beyond it. Compressing this much takes 0.6 ms, inflating it up to 0.4 ms."""

DEFLATED_NBYTES: Final = 64 << 10
INFLATED_NBYTES: Final = 256 << 10
"""Compressed bytes inflated at a time, and the most bytes that they may become."""
INFLATION_MAX: Final = 1032
"""The largest compression ratio that the format allows."""

GZIP: Final = b"\x1f\x8b"
ZLIB: Final = b"\x78"

Body = bytes | bytearray | memoryview


def inflated_nbytes_max(nbytes: int) -> int:
    """Return the largest size that ``nbytes`` compressed bytes can inflate to."""
    return INFLATION_MAX * nbytes


def is_compressed(body: bytes) -> bool:
    """Return whether a message begins like gzip or zlib data; no protobuf message of this protocol does.

    As protobuf, gzip's first bytes are not a valid field, and zlib's are field 15.
    """
    return body[:2] == GZIP or (body[:1] == ZLIB and int.from_bytes(body[:2], "big") % 31 == 0)


def decompress(body: Body, nbytes_max: int) -> Body:
    """Decompress a body that was compressed with gzip or zlib."""
    machine = zlib.decompressobj(wbits=47)  # gzip or zlib, detected by the first bytes.
    pieces: list[bytes] = []
    assembly: Assembly | None = None
    nbytes = taken = 0
    try:
        # In pieces, because each call copies the input that it leaves unconsumed.
        while nbytes <= nbytes_max and not machine.eof:
            rest = machine.unconsumed_tail or body[taken : taken + DEFLATED_NBYTES]
            taken += 0 if machine.unconsumed_tail else len(rest)
            piece = machine.decompress(rest, min(INFLATED_NBYTES, nbytes_max + 1 - nbytes))
            if not piece and not rest:
                break  # The body is truncated.
            nbytes += len(piece)
            if assembly is None and nbytes >= ASSEMBLED_NBYTES_MIN:
                # Of the largest possible size: memory that is never written costs nothing.
                assembly = Assembly(min(nbytes_max + 1, inflated_nbytes_max(len(body))))
                for one in pieces:
                    assembly.add(one)
                pieces.clear()
            if assembly is None:
                pieces.append(piece)
            else:
                assembly.add(piece)
    except zlib.error as error:
        raise RequestError(f"the body is not compressed as Content-Encoding states: {error}") from error
    if nbytes > nbytes_max:
        raise TooLargeError(f"the decompressed body exceeds the {nbytes_max} bytes that this server accepts")
    if not machine.eof:
        raise RequestError("the compressed body is truncated")
    if machine.unused_data or taken < len(body):
        raise RequestError("something follows the compressed body; several gzip members are not accepted")
    return b"".join(pieces) if assembly is None else assembly.whole()


def compress(coding: str, pieces: Sequence[Buffer]) -> bytes:
    """Join the pieces into one compressed body."""
    machine = zlib.compressobj(1, zlib.DEFLATED, 31 if coding == "gzip" else 15)
    return b"".join([*(machine.compress(piece) for piece in pieces), machine.flush()])


def accepted_coding(header: bytes) -> str | None:
    """Return the coding that an ``Accept-Encoding`` asks for, if it names exactly one of gzip and deflate.

    A header that names both comes from a library that always sends it, and compressing tensors of numbers
    costs far more time than it saves.
    """
    asked = accepted_codings(header)
    return asked[0] if len(asked) == 1 else None


def accepted_codings(header: bytes) -> list[str]:
    """Return which of gzip and deflate an ``Accept-Encoding`` names."""
    asked = []
    for item in header.decode("latin-1").lower().split(","):
        coding, _, weight = item.partition(";")
        refused = weight.replace(" ", "").rstrip("0") in ("q=", "q=0.")
        if coding.strip() in ("gzip", "deflate") and not refused:
            asked.append(coding.strip())
    return asked
