"""Cut a client's large websocket frames into fragments while they arrive.

The library handles a frame as a whole: it copies and unmasks 60 MiB at once, which would block the event loop
for 100 ms. A message may consist of any number of fragments, and each of these is small.
"""

from typing import Final

LARGE_NBYTES: Final = 128 << 10
"""Larger frames are cut."""

FRAMES_MAX: Final = 16
"""Frames passed on at a time: the library takes 35 us for each, however small."""

MASKED: Final = 0x80
FINAL: Final = 0x80
OPCODE: Final = 0x0F
CONTROL: Final = 8
"""Opcodes from this one on belong to control frames, which are small."""
KEY_NBYTES: Final = 4


class FrameCutter:
    """Rewrite a connection's bytes to an equivalent stream without large frames.

    :param nbytes_max: the largest accepted frame; larger ones are left for the library to refuse.
    """

    def __init__(self, nbytes_max: int) -> None:
        self._nbytes_max = nbytes_max
        # An incomplete head of a frame, or bytes that do not fill a multiple of the masking key.
        self._kept = b""
        self.taken = 0
        """How many bytes of the last :meth:`feed` were used. Feed the rest again."""
        self._left = 0
        """Bytes of the current frame that have not arrived yet."""
        self._is_cutting = False
        self.large_nbytes = 0
        """Size of the frame being cut, or of the last one that was."""
        self._first = 0
        """The first byte of the next fragment."""
        self._last = 0
        """The first byte of the last fragment."""
        self._key = b""

    def __repr__(self) -> str:
        state = "cutting" if self._is_cutting else "between frames" if self.is_between_frames else "passing"
        return f"<FrameCutter {state} left={self._left}>"

    @property
    def is_between_frames(self) -> bool:
        """Whether the last frame is complete and nothing of the next has arrived."""
        return not self._left and not self._kept

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to read in place of the part of ``data`` that was used (:attr:`taken`)."""
        self.taken = len(data)
        if self._left >= len(data) and not self._is_cutting:
            self._left -= len(data)
            return data
        out: list[bytes | memoryview] = []
        rest = memoryview(self._kept + data if self._kept else data)
        self._kept = b""
        frames = 0
        while rest:
            if self._is_cutting:
                rest = self._cut(rest, out)
            elif self._left:
                taken = rest[: self._left]
                out.append(taken)
                self._left -= len(taken)
                rest = rest[len(taken) :]
            elif frames == FRAMES_MAX:
                self.taken -= len(rest)
                break
            else:
                frames += 1
                nbytes = self._read_head(rest, out)
                if not nbytes:
                    self._kept = bytes(rest)
                    break
                rest = rest[nbytes:]
        return b"".join(out)

    def _read_head(self, head: memoryview, out: list[bytes | memoryview]) -> int:
        """Read a frame's head; return its size in bytes, or 0 if it is incomplete."""
        if len(head) < 2:
            return 0
        size, is_masked = head[1] & ~MASKED, bool(head[1] & MASKED)
        end = {126: 4, 127: 10}.get(size, 2)
        start = end + KEY_NBYTES * is_masked
        if len(head) < start:
            return 0
        nbytes = size if end == 2 else int.from_bytes(head[2:end], "big")
        opcode = head[0] & OPCODE
        self._left = nbytes
        if not is_masked or opcode >= CONTROL or not LARGE_NBYTES < nbytes <= self._nbytes_max:
            out.append(head[:start])
            return start
        self._is_cutting = True
        self.large_nbytes = nbytes
        self._key = bytes(head[end:start])
        self._first = head[0] & ~FINAL
        # The last fragment continues the message, and ends it if the frame did.
        self._last = head[0] & FINAL
        return start

    def _cut(self, rest: memoryview, out: list[bytes | memoryview]) -> memoryview:
        """Make a fragment of the bytes of a large frame that have arrived; return what follows it."""
        is_last = len(rest) >= self._left
        # The masking key repeats, and each fragment begins with its first byte.
        nbytes = self._left if is_last else len(rest) // KEY_NBYTES * KEY_NBYTES
        if not nbytes:
            self._kept = bytes(rest)
            return rest[:0]
        first = self._first
        if is_last:
            first |= self._last
            self._is_cutting = False
        out += (bytes((first, MASKED | 127)), nbytes.to_bytes(8, "big"), self._key, rest[:nbytes])
        self._first = 0  # The next fragment continues the message.
        self._left -= nbytes
        if not is_last and nbytes < len(rest):
            self._kept = bytes(rest[nbytes:])
            return rest[:0]
        return rest[nbytes:]
