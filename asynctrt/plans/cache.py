"""``open("model.onnx", runtime="tensorrt")``: a plan is built once, and found in the plan cache afterwards.

An entry is a plan with its manifest, named by a digest of everything that the plan depends on. It is read and
written under a lock, so that several processes that open a model build it once. Entries are checked against
the recorded digests of plans built here; an entry that fails the check is built again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from asynctrt._util.clock import now_ns
from asynctrt._util.files import locked, make_private, open_regular
from asynctrt.backends.base import Model
from asynctrt.backends.build_options import BUILDERS, BuildOptions
from asynctrt.backends.onnx_objects import OnnxObject, shown
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.registry import ONNX, PLAN_SUFFIXES
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.backends.tensorrt.builder import BuildStep
from asynctrt.backends.tensorrt.manifest import manifest_path, read_manifest
from asynctrt.backends.tensorrt.plan import Plan, read_header
from asynctrt.backends.tensorrt.trust import is_recorded
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.core.loading import load_model
from asynctrt.devices.base import Device, mib
from asynctrt.errors import DeviceUnavailableError, MissingExtraError, ModelError, OptionsError, UsageError
from asynctrt.options import Options
from asynctrt.plans.building import OnnxContent, build_from, read_source, write_plan
from asynctrt.plans.plan_file import digest_of

NBYTES_MAX: Final = 10 << 30
"""The default limit of all plans in the cache together; the least recently used are evicted first."""

LOCKS: Final = 2
"""Hexadecimal digits of an entry's name that choose its lock, so that there are few lock files."""

FORMAT: Final = 1
"""A part of every entry's name: if plans are built or written differently, their entries differ."""

SUFFIXES: Final = ("", "-cu11", "-cu12", "-cu13")
"""The suffixes of package names: none, or the CUDA version that the package is built for."""

DRIVER: Final = Path("/sys/module/nvidia/version")

logger = logging.getLogger("asynctrt")
PROGRESS: Final = logging.getLogger("asynctrt.build")
"""The logger for the progress of builds."""


@dataclass(frozen=True, slots=True)
class CachedPlan:
    """A plan for a model, from the cache or newly built."""

    plan: Plan
    is_hit: bool
    """Whether it was in the cache."""


@dataclass(frozen=True, slots=True)
class PlanCache:
    """A folder of plans, which may take ``nbytes_max`` bytes together."""

    folder: Path
    nbytes_max: int = NBYTES_MAX

    @classmethod
    def of_user(cls, env: Mapping[str, str] = os.environ) -> "PlanCache":
        """Return this user's cache: ``asynctrt/plans`` in the user's cache folder."""
        cache = env.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        return cls(Path(cache) / "asynctrt" / "plans")

    def plan_for(self, model: Path, device: Device, flavour: str | None, options: BuildOptions) -> CachedPlan:
        """Return the plan for a model on a device, building it if necessary. Blocks, perhaps for long."""
        source = read_source(model)
        facts = _facts(source, device, flavour, options)
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{name}.plan"
        self._make_folder()

        def waiting() -> None:
            logger.info("waiting for another process that builds a plan from %r", str(model))

        with locked(self.folder / f"lock-{path.name[:LOCKS]}", waiting):
            plan, reason = self._find(path, source)
            if plan is not None:
                return CachedPlan(plan, is_hit=True)
            plan = self._build(source, device, facts, options, path, reason)
        self._shrink(path)
        return CachedPlan(plan, is_hit=False)

    def forget(self, found: CachedPlan, reason: str) -> None:
        """Evict a plan that turned out not to run, so that it is built again."""
        logger.warning("%s is removed from the plan cache: %s", found.plan.where, reason)
        path = found.plan.path
        assert path is not None, "it is a file of the cache"
        with locked(self.folder / f"lock-{path.name[:LOCKS]}"):
            _remove(path)

    def _make_folder(self) -> None:
        try:
            make_private(self.folder)
        except OSError as error:
            raise UsageError(
                f"the plan cache {str(self.folder)!r} cannot be made: {error.strerror}. Set XDG_CACHE_HOME "
                "to a folder that can be written, or build the plan with asynctrt build, and open that"
            ) from error

    def _find(self, path: Path, source: OnnxContent) -> tuple[Plan | None, str]:
        """Return an entry, or why it cannot be used."""
        try:
            with open_regular(path, follow=False) as file:
                content = file.read()
        except FileNotFoundError:
            return None, "it is not in the cache"
        except OSError as error:
            return None, f"the entry cannot be read: {error.strerror}"
        try:
            manifest = read_manifest(manifest_path(path))
            plan = _plan_of(path, source, content)
        except ModelError as error:
            return None, str(error)
        digest = hashlib.sha256(content).hexdigest()
        if manifest.plan_digest != digest or not is_recorded(digest):
            return None, "the entry is not what was built here: it was changed, or its record is gone"
        with suppress(OSError):
            os.utime(path)  # Record its last use, for eviction.
        return plan, ""

    def _build(
        self,
        source: OnnxContent,
        device: Device,
        facts: Mapping[str, Any],
        options: BuildOptions,
        path: Path,
        reason: str,
    ) -> Plan:
        where, start_ns = str(source.path), now_ns()
        PROGRESS.info("building a plan from %r for %s: %s", where, device.name, reason)

        def report(step: BuildStep) -> None:
            # Only top-level steps are worth a line in most logs.
            level = logging.INFO if step.parent is None else logging.DEBUG
            PROGRESS.log(level, "building %r: %s, %d of %d", where, step.phase, step.done, step.total)

        _remove(path)
        for left in self.folder.glob(f".{path.stem}.*"):  # By a process that was killed while it wrote.
            with suppress(OSError):
                left.unlink()
        built, manifest = build_from(source, facts["flavour"], options, device=device, report=report)
        write_plan(path, built.content, manifest)
        seconds = (now_ns() - start_ns) / 1e9
        PROGRESS.info("built a plan of %s from %r in %.1f s", mib(len(built.content)), where, seconds)
        return _plan_of(path, source, built.content)

    def _shrink(self, newest: Path) -> None:
        """Evict the least recently used plans until the rest fit, but never the newest one."""
        with locked(self.folder / "lock"):
            entries = []
            for path in self.folder.glob("*.plan"):
                with suppress(OSError):
                    status = path.stat()
                    entries.append((path == newest, status.st_mtime_ns, status.st_size, path))
            entries.sort()
            held = sum(nbytes for _, _, nbytes, _ in entries)
            for is_newest, _, nbytes, path in entries:
                if held <= self.nbytes_max or is_newest:
                    break
                _remove(path)
                held -= nbytes
                logger.info(
                    "removed %s from the plan cache, which has room for %s", path, mib(self.nbytes_max)
                )


def load_for(model: str | os.PathLike[str] | OnnxObject | Model, device: Device, options: Options) -> Model:
    """Return a model for the runtime that the options name. Blocks; a build may take long."""
    tensorrt, onnx = options.tensorrt, options.onnx
    assert tensorrt is None or isinstance(tensorrt, TensorRTOptions), "it was converted by its check"
    assert onnx is None or isinstance(onnx, OnnxOptions), "it was converted by its check"
    suffix = Path(model).suffix if isinstance(model, str | os.PathLike) else ""
    if options.runtime == "tensorrt" and isinstance(model, str | os.PathLike) and suffix in ONNX.suffixes:
        return _load_built(Path(model), device, options, tensorrt or TensorRTOptions())
    if options.runtime == "tensorrt" and suffix not in PLAN_SUFFIXES:
        raise OptionsError(
            f"runtime is 'tensorrt', and {shown(model)} is neither an .onnx file nor a plan. Leave "
            "runtime out"
        )
    if tensorrt is not None and tensorrt.build is not None:
        raise OptionsError(
            f"build says how a plan is built, and {shown(model)} needs none. It goes with an .onnx model and "
            "runtime='tensorrt'; leave it out"
        )
    return load_model(model, device, tensorrt, options.runtime, onnx)


def _load_built(model: Path, device: Device, options: Options, tensorrt: TensorRTOptions) -> Model:
    if device.name == "host":
        raise DeviceUnavailableError(
            f"TensorRT (runtime='tensorrt') needs a GPU to run {str(model)!r}: open it with device='cuda:0', "
            "or leave runtime out to run it on the host"
        )
    build = tensorrt.build or BuildOptions()
    assert isinstance(build, BuildOptions), "it was converted by its check"
    if options.max_rows is not None and not build.profiles and build.max_rows == BuildOptions().max_rows:
        # Unless the build options set profiles or rows, build for the engine's max_rows.
        build = replace(build, max_rows=options.max_rows)
    # A plan from the cache is run only if this user built it. The other kinds of trust are for plans from
    # elsewhere.
    trusted = replace(tensorrt, trust=("built-here",))
    cache = PlanCache.of_user()
    found = cache.plan_for(model, device, tensorrt.flavour, build)
    try:
        return TensorRTModel(found.plan, device=device, options=trusted)
    except ModelError as error:
        if not found.is_hit:
            raise
        # Something has changed that is not a part of the entry's name.
        cache.forget(found, str(error))
    again = cache.plan_for(model, device, tensorrt.flavour, build)
    return TensorRTModel(again.plan, device=device, options=trusted)


def _facts(source: OnnxContent, device: Device, flavour: str | None, options: BuildOptions) -> dict[str, Any]:
    """Return everything that a plan depends on."""
    chosen, version = _builder(flavour or options.flavour)
    settings = replace(options, flavour=chosen).as_json()
    # The plan does not depend on the options for the build's speed and logging.
    for name in ("timing_cache", "verbosity"):
        settings.pop(name)
    settings["plugins"] = {path: digest_of(Path(path)) for path in options.plugins}
    capability = device.compute_capability
    return {
        "model": source.digest,
        "external": source.external,
        "options": settings,
        "flavour": chosen,
        "version": version,
        "gpu": device.gpu,
        "compute_capability": None if capability is None else list(capability),
        "driver": _driver(),
        "format": FORMAT,
    }


def _builder(flavour: str | None) -> tuple[str, str]:
    """Return the package that builds, and its version, without importing it."""
    if flavour is not None and flavour not in BUILDERS:
        raise OptionsError(
            f"{flavour} runs plans, and cannot build them: give the plan, or flavour='tensorrt' or "
            "'tensorrt_rtx'"
        )
    installed = installed_builders()
    for name in BUILDERS if flavour is None else (flavour,):
        if name in installed:
            return name, installed[name]
    raise MissingExtraError(
        f"{flavour or 'no package that builds plans'} is {'not ' if flavour else ''}installed: pip install "
        "'asynctrt[tensorrt]' or 'asynctrt[rtx]'"
    )


def installed_builders() -> dict[str, str]:
    """Return the version of each installed package that builds plans, without importing any."""
    found = {}
    for package in BUILDERS:
        for suffix in SUFFIXES:
            with suppress(PackageNotFoundError):
                found[package] = version(package.replace("_", "-") + suffix)
    return found


def _driver() -> str | None:
    try:
        return DRIVER.read_text().strip()
    except OSError:
        return None


def _plan_of(path: Path, source: OnnxContent, content: bytes) -> Plan:
    """Return an entry; raise a ``ModelError`` if its header is damaged."""
    where = f"the plan of {str(source.path)!r} ({path})"
    return Plan(where, source.path.stem, content, read_header(content, where=where), path)


def _remove(path: Path) -> None:
    for one in (path, manifest_path(path)):
        with suppress(OSError):
            one.unlink(missing_ok=True)
