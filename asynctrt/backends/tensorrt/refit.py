"""Load an engine's weights from an ONNX file, before it has contexts."""

import logging
import os
from typing import Any, Final

from asynctrt.backends.tensorrt.context import Loaded
from asynctrt.backends.tensorrt.messages import ERRORS_MAX, TensorRTErrors, keep_alive, log_of
from asynctrt.backends.tensorrt.plan import Plan
from asynctrt.devices.base import mib
from asynctrt.errors import ModelError, OptionsError

NAMES_MAX: Final = 5
"""The maximum number of missing weights that a message names."""

logger = logging.getLogger("asynctrt.tensorrt")


def refit(plan: Plan, loaded: Loaded) -> None:
    """Load weights from the file named in the options. Without a file, check that no weights are missing."""
    path = loaded.options.refit_from
    is_refittable = bool(loaded.engine.refittable)
    if path is None:
        _check_complete(plan, loaded, is_refittable=is_refittable)
        return
    if not is_refittable:
        raise OptionsError(
            f"refit_from is {os.fspath(path)!r}, but {plan.where} was not built to be refitted. Build it "
            "with BuilderFlag.STRIP_PLAN or BuilderFlag.REFIT, or leave the option out"
        )
    # The refitter and the parser end when this returns, because the engine must outlive both.
    _refit_from(os.fspath(path), plan, loaded)


def _check_complete(plan: Plan, loaded: Loaded, *, is_refittable: bool) -> None:
    stripped = loaded.abilities.stat(loaded.engine, loaded.flavour.module, "STRIPPED_WEIGHTS_SIZE")
    if stripped is None and is_refittable:
        logger.warning(
            "%s was built to be refitted, and %s does not tell whether it has its weights. If it was built "
            "with BuilderFlag.STRIP_PLAN, its answers are wrong: set TensorRTOptions(refit_from=path)",
            plan.where,
            loaded.flavour.title,
        )
    elif stripped is not None and stripped > 0:
        raise ModelError(
            f"{plan.where} was built without {mib(stripped)} of its weights (BuilderFlag.STRIP_PLAN), and "
            "would give wrong answers. Name the ONNX file that it was built from in "
            "TensorRTOptions(refit_from=path), or build the plan with its weights"
        )


def _refit_from(path: str, plan: Plan, loaded: Loaded) -> None:
    module, log = loaded.flavour.module, log_of(loaded.flavour.module)
    loaded.log.take()
    refitter = _create_refitter(plan, loaded, log)
    # With an error recorder, TensorRT's ONNX parsers crash when the object that they fill is destroyed.
    # Without one, errors are logged.
    refitter.error_recorder = None
    parser = module.OnnxParserRefitter(refitter, log)
    # The refitter reads the weights in the parser's memory.
    keep_alive(parser, refitter)
    if not parser.refit_from_file(path):
        raise ModelError(
            f"{plan.where} cannot be refitted from {path!r}. Name the ONNX file that it was built from, or "
            f"one with the same names and shapes. {_said(parser, loaded)}"
        )
    missing = list(refitter.get_missing_weights())
    if missing:
        more = f" and {len(missing) - NAMES_MAX} more" if len(missing) > NAMES_MAX else ""
        raise ModelError(
            f"{path!r} lacks {', '.join(map(repr, missing[:NAMES_MAX]))}{more}, which {plan.where} needs. "
            "Name the ONNX file that it was built from"
        )
    if not refitter.refit_cuda_engine():
        errors = loaded.recorder.take().joined(loaded.log.take())
        raise loaded.failed(f"refitting {plan.where} from {path!r}", errors)
    # New in 11. In earlier versions they are freed with the engine.
    release = getattr(refitter, "release_refit_resources", None)
    if release is not None and not release():
        logger.warning("%s was refitted, but %s keeps memory for it", plan.where, loaded.flavour.title)


def _create_refitter(plan: Plan, loaded: Loaded, log: Any) -> Any:
    """Create TensorRT's ``Refitter``. If that fails, TensorRT logs an error and raises an exception."""
    try:
        refitter = loaded.flavour.module.Refitter(loaded.engine, log)
    except (RuntimeError, TypeError) as error:
        said = loaded.recorder.take().joined((*loaded.log.take(), str(error)))
        raise loaded.failed(f"creating a refitter for {plan.where}", said) from error
    keep_alive(refitter, loaded.engine)
    return refitter


def _said(parser: Any, loaded: Loaded) -> TensorRTErrors:
    """Return the parser's errors, and errors logged in the meantime."""
    count = min(int(parser.num_errors), ERRORS_MAX)
    texts = (str(parser.get_error(index).desc()) for index in range(count))
    return TensorRTErrors.logged(texts).joined(loaded.log.take())
