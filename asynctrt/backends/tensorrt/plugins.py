"""Plugin libraries: TensorRT has one plugin registry per process, and libraries stay in it."""

from collections.abc import Iterable

from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.messages import LogSubscription, TensorRTErrors, log_of
from asynctrt.errors import ModelError


def register_plugins(flavour: Flavour, paths: Iterable[str], log: LogSubscription) -> None:
    """Register TensorRT's own plugins, if the package has them, and those in the libraries at ``paths``."""
    of_all = log_of(flavour.module)
    initialise = getattr(flavour.module, "init_libnvinfer_plugins", None)
    if initialise is not None:
        initialise(of_all, "")
    for path in paths:
        # TensorRT refuses to load a library twice.
        with of_all.plugins_lock:
            if path in of_all.plugins:
                continue
            handle = flavour.module.get_plugin_registry().load_library(path)
            if handle is None:
                said = TensorRTErrors.logged(log.take())
                raise ModelError(
                    f"{flavour.title} cannot load the plugins of {path!r}: the library cannot be opened, is "
                    f"for another version, or has plugins that another library has registered. {said}"
                )
            of_all.plugins[path] = handle
