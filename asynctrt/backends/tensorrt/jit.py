"""Kernels that TensorRT for RTX compiles when a plan is used, and the file that stores them.

The other packages compile when a plan is built, and need none of this.
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import read_regular, write_whole
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.errors import ExecutionError, OptionsError

CACHE_NBYTES_MAX: Final = 4 << 30

logger = logging.getLogger("asynctrt.tensorrt")


def check_options(flavour: Flavour, options: TensorRTOptions) -> None:
    """Check that a package supports the options."""
    for name, facility, packages in (
        ("refit_from", "OnnxParserRefitter", "tensorrt or tensorrt_rtx"),
        ("runtime_cache", "IRuntimeCache", "tensorrt_rtx"),
    ):
        if getattr(options, name) and not hasattr(flavour.module, facility):
            raise OptionsError(
                f"{name} is {getattr(options, name)!r}, and {flavour.title} does not support it. "
                f"Leave the option out, or install one that has it: a new {packages}"
            )


class KernelCache:
    """A runtime cache shared by contexts, which it outlives, with its file, which need not exist."""

    def __init__(self, path: str | os.PathLike[str], config: Any) -> None:
        self._path = Path(path)
        self._kept: bytes | None = None
        self.trt = None if config is None else config.create_runtime_cache()
        content = self._read()
        if content is None or self.trt is None:
            return
        try:
            is_taken = bool(content) and bool(self.trt.deserialize(content))
        except Exception as error:
            # The model does not need the file, whatever its content.
            logger.debug("the runtime cache %r was refused: %s", str(self._path), error)
            is_taken = False
        if is_taken:
            self._kept = _digest(content)
            return
        logger.warning(
            "%r is not used as a runtime cache: it is damaged, or was written by another version of TensorRT "
            "for RTX or for another GPU or driver. Kernels are compiled, and the file is replaced when the "
            "model is closed",
            str(self._path),
        )
        self.trt = config.create_runtime_cache()

    def __repr__(self) -> str:
        return f"<KernelCache {str(self._path)!r}>"

    def save(self) -> None:
        """Replace the file, if there are new kernels. Blocks. A failure is only logged."""
        try:
            memory = None if self.trt is None else self.trt.serialize()
            content = b"" if memory is None else bytes(memoryview(memory))
            if content and _digest(content) != self._kept:
                write_whole(self._path, content)
                self._kept = _digest(content)
        except Exception as error:
            # The model has done its work, and the next one does not need the file.
            logger.warning("the runtime cache %r was not written: %s", str(self._path), error)

    def _read(self) -> bytes | None:
        try:
            return read_regular(self._path, CACHE_NBYTES_MAX)
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("the runtime cache %r was not read: %s", str(self._path), error)
            return None


def create_config(engine: Any, flavour: Flavour) -> Any | None:
    """Return a runtime config for one context without enqueue memory; ``None`` if nothing is compiled."""
    module = flavour.module
    if not hasattr(module, "CudaGraphStrategy"):
        return None
    config = engine.create_runtime_config()
    if config is None:
        raise ExecutionError(f"{flavour.title} could not create a runtime config")
    config.set_execution_context_allocation_strategy(module.ExecutionContextAllocationStrategy.USER_MANAGED)
    # The engine captures batches itself, and captures cannot be nested.
    config.cuda_graph_strategy = module.CudaGraphStrategy.DISABLED
    # The bindings drop the setter's return value, so a failure is silent.
    if config.cuda_graph_strategy != module.CudaGraphStrategy.DISABLED:
        raise ExecutionError(
            f"cuda_graph_strategy is {config.cuda_graph_strategy}, and TensorRT did not accept DISABLED"
        )
    return config


def attach_cache(config: Any, cache: KernelCache) -> None:
    """Make the config's context use the cache. Without it, the context compiles its own kernels."""
    if cache.trt is None or not config.set_runtime_cache(cache.trt):
        logger.warning("%r is not used: TensorRT refused it", cache)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()
