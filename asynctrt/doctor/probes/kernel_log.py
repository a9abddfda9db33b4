"""Read the faults that the NVIDIA driver has written to the kernel's log, each with a number (Xid)."""

import os
import re
from collections import Counter
from typing import Any, Final

XID: Final = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
LINES_MAX: Final = 20_000


def probe(path: str = "/dev/kmsg") -> dict[str, Any]:
    """Return how often each fault was logged for each GPU since the machine was started."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found: Counter[str] = Counter()
    for _ in range(LINES_MAX):
        try:
            line = os.read(descriptor, 8192)
        except BrokenPipeError:
            continue  # The record was overwritten meanwhile; read the next one.
        except BlockingIOError:
            break  # There are no more records.
        if not line:
            break
        found.update(f"{number} {gpu}" for gpu, number in XID.findall(line.decode(errors="replace")))
    os.close(descriptor)
    return {"xids": found}
