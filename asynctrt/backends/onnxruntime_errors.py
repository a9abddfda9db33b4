"""The interpretation of ONNX Runtime's errors on a GPU. It raises one type with a text for nearly
everything."""

import re
from typing import Final, NamedTuple

CUDA_FAILURE: Final = re.compile(r"CUDA (?:failure|error)[: ]+(?:\w+ )?(\d+)")
"""``CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; ...``."""

NO_MEMORY: Final = re.compile(
    r"Failed to allocate memory for requested buffer of size (\d+)"
    r"|Available memory of \d+ is smaller than requested bytes of (\d+)"
    r"|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED|out of memory",
)
OUT_OF_MEMORY: Final = 2
"""CUDA's error code."""


class Meaning(NamedTuple):
    """The interpretation of an error text."""

    is_memory: bool
    """Whether memory ran out: CUDA's, or the session's limit."""
    nbytes: int | None
    """The number of bytes requested, if the text gives it."""
    said: str
    """The text in one line, without ONNX Runtime's source locations."""


def meaning_of(text: str) -> Meaning:
    """Interpret the text of an error."""
    found = CUDA_FAILURE.search(text)
    code = int(found[1]) if found else None
    memory = NO_MEMORY.search(text)
    nbytes = next((int(number) for number in memory.groups() if number), None) if memory else None
    is_memory = code == OUT_OF_MEMORY or (memory is not None and code is None)
    return Meaning(is_memory, nbytes, _shortened(text))


def _shortened(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    # The prefix repeats the type of the error.
    said = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", lines[0])
    return re.sub(
        r"\s*/\S+\.(?:cc|h|cu|cuh|hpp):\d+ \S.*?(?= CUDA failure| CUDNN failure| CUBLAS failure|$)", "", said
    )
