"""The double's ``Refitter`` and ``OnnxParserRefitter``, which give an engine other weights."""

import json
import os
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np

from asynctrt.devices.base import aligned
from tests.doubles.tensorrt.core import Core, Reporter, checked
from tests.doubles.tensorrt.engine import ICudaEngine
from tests.doubles.tensorrt.names import ErrorCodeTRT, ILogger, require_initialised
from tests.doubles.tensorrt.spec import EngineSpec

WEIGHTS: Final = b"asynctrt weights "


def double_weights(spec: EngineSpec, *, without: tuple[str, ...] = ()) -> bytes:
    """Return a file of the engine's weights, ``without`` some of them, for the double's
    ``OnnxParserRefitter``."""
    weights = dict(zip(spec.weight_names, spec.coefficients.tolist(), strict=True))
    return (
        WEIGHTS + json.dumps({name: pair for name, pair in weights.items() if name not in without}).encode()
    )


def _note_orphan(refitter: "weakref.ref[Refitter]", core: Core) -> None:
    if refitter() is not None:
        core.monitor.note("an engine was destroyed before its refitter")


class Refitter(Reporter):
    """Replaces the weights of an engine, which has to outlive it."""

    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        require_initialised(logger, ILogger)
        super().__init__(Core(engine._core.library, logger), None)
        if not engine.refittable:
            why = "Cannot refit an engine that was not built to be refitted."
            self._report(ErrorCodeTRT.INVALID_ARGUMENT, "createInferRefitter", "API Usage Error", why)
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._engine = weakref.ref(engine)
        self._set: dict[str, tuple[int, int]] = {}
        self._owner: weakref.ref[OnnxParserRefitter] | None = None
        self._core.library.log.register(self, logger)
        weakref.finalize(engine, _note_orphan, weakref.ref(self), self._core).atexit = False

    @property
    def logger(self) -> ILogger:
        """The application's logger."""
        return self._core.logger

    def _living(self) -> ICudaEngine:
        engine = self._engine()
        if engine is None:
            raise self._core.monitor.found("a refitter was used after its engine was destroyed")
        return engine

    @checked
    def get_all_weights(self) -> list[str]:
        """Return the names of the weights that can be replaced."""
        return list(self._living()._spec.weight_names)

    @checked
    def get_missing_weights(self) -> list[str]:
        """Return the names of the weights that the engine lacks and that were not set."""
        if not self._living()._spec.stripped_weights_nbytes:
            return []
        return [name for name in self.get_all_weights() if name not in self._set]

    @checked
    def refit_cuda_engine(self) -> bool:
        """Replace the weights that were set; ``False``, and an error, if others are missing."""
        where, engine = "IRefitter::refitCudaEngine", self._living()
        if engine._is_busy():
            raise self._core.monitor.found("an engine was refitted while a batch ran")
        if self._owner is not None and self._owner() is None:
            raise self._core.monitor.found(
                "an engine was refitted with the weights of a parser that was destroyed before"
            )
        if self._report_loss(where):
            return False
        if missing := self.get_missing_weights():
            self._report_usage(where, f"condition: no weights are missing. Missing: {', '.join(missing)}")
            return False
        nbytes = aligned(engine._spec.weights_nbytes)
        engine._refit_scratch = engine._refit_scratch or engine._core.allocate(nbytes)
        if engine._refit_scratch is None:
            text = f"Requested size was {nbytes} bytes."
            self._report_memory(where, text)
            return False
        names = engine._spec.weight_names
        old = dict(zip(names, engine._coefficients.tolist(), strict=True))
        engine._coefficients = np.asarray([self._set.get(name, old[name]) for name in names], np.int64)
        engine._write_weights()
        return True

    @checked
    def release_refit_resources(self) -> bool:
        """Free the memory that the engine keeps for the next refit."""
        engine = self._living()
        scratch, engine._refit_scratch = engine._refit_scratch, None
        if scratch is not None:
            scratch.close()
        return True


class ParserError:
    """Why a file was refused."""

    def __init__(self, text: str, node: str = "") -> None:
        self._text = text
        self._node = node

    def __repr__(self) -> str:
        return f"In node {self._node!r}: {self._text}"

    def desc(self) -> str:
        """Return what is wrong."""
        return self._text

    def node_name(self) -> str:
        """Return the node that it is about; empty for none."""
        return self._node


class OnnxParserRefitter:
    """Reads weights from a file of :func:`double_weights` into a refitter, which uses them in place.

    :raises ViolationError: if the refitter has an error recorder, with which parsers have crashed.
    """

    def __init__(self, refitter: Refitter, logger: ILogger) -> None:
        require_initialised(logger, ILogger)
        self._core = refitter._core
        self._core.check()
        if refitter.error_recorder is not None:
            raise self._core.monitor.found("a parser was made for a refitter that has an error recorder")
        self._refitter = weakref.ref(refitter)
        self._logger = weakref.ref(logger)
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        """How many errors there are."""
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        """Return one error."""
        return self._errors[index]

    def refit_from_file(self, model: str) -> bool:
        """Take the weights in a file; ``False``, and errors, if it cannot be read or lacks any."""
        if not isinstance(model, str):
            raise TypeError("refit_from_file(): incompatible function arguments")
        refitter = self._refitter()
        if refitter is None:
            raise self._core.monitor.found("a parser was used after its refitter was destroyed")
        try:
            given: dict[str, Any] = json.loads(Path(os.fspath(model)).read_bytes().removeprefix(WEIGHTS))
        except (OSError, ValueError):
            return self._fail(f"Failed to parse ONNX model from file: {model}!")
        wanted = refitter.get_all_weights()
        found = [name for name in wanted if name in given]
        for name in found:
            refitter._set[name] = (int(given[name][0]), int(given[name][1]))
        refitter._owner = weakref.ref(self)
        if len(found) < len(wanted):
            return self._fail(f"Only successfully refitted {len(found)} out of {len(wanted)} weights.")
        return True

    def _fail(self, text: str) -> bool:
        self._errors.append(ParserError(text))
        self._core.say(ILogger.ERROR, text)
        return False
