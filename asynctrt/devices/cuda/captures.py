"""The contents of a capture: whether they can be launched repeatedly, and what they copy."""

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

from asynctrt.devices.cuda.bindings import driver
from asynctrt.devices.cuda.context import CudaContext
from asynctrt.devices.cuda.memory import PinnedBuffer
from asynctrt.errors import DeviceError

CAPTURING: Final = threading.RLock()
"""Held during a capture, and during calls that CUDA refuses while any thread captures and that would end the
capture: waiting for the whole GPU, as ONNX Runtime does when it loads a session."""

_OK: Final = driver.CUresult.CUDA_SUCCESS
_ACTIVE: Final = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
_KINDS: Final = driver.CUgraphNodeType
_HOST: Final = driver.CUmemorytype.CU_MEMORYTYPE_HOST
_DEVICE: Final = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
_ARRAY: Final = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY
_PREFIX: Final = "CU_GRAPH_NODE_TYPE_"

_REPEATABLE: Final = frozenset(
    {
        _KINDS.CU_GRAPH_NODE_TYPE_KERNEL,
        _KINDS.CU_GRAPH_NODE_TYPE_MEMSET,
        _KINDS.CU_GRAPH_NODE_TYPE_EMPTY,
        _KINDS.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
        _KINDS.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    }
)


def outside_of_capture(handle: int) -> str:
    """Return what was captured on a stream so far that cannot be launched repeatedly, or an empty string.

    These are host functions, such as those with which ONNX Runtime frees memory; copies to the host, because
    their result was only read during the capture; and memory that is allocated but not freed.
    """
    code, status, _, graph, *_ = driver.cuStreamGetCaptureInfo(handle)
    if code != _OK or status != _ACTIVE:
        return f"its capture has failed ({(status if code == _OK else code).name})"
    found: Counter[str] = Counter()
    for node, kind in _nodes(graph):
        if kind == _KINDS.CU_GRAPH_NODE_TYPE_MEMCPY:
            if not _is_on_device(*_target(_copy_of(node))):
                found["a copy to the host"] += 1
        elif kind not in _REPEATABLE:
            found[str(kind.name).removeprefix(_PREFIX).lower()] += 1
    if found["mem_alloc"] == found["mem_free"]:
        del found["mem_alloc"], found["mem_free"]
    return ", ".join(sorted(found))


def own_sources(context: CudaContext, graph: Any) -> PinnedBuffer | None:
    """Make a graph copy host data from memory that it owns; return that memory, or ``None`` if not needed.

    CUDA reads unpinned memory when the copy is enqueued, so the code that enqueued it may free or refill the
    memory once the call returns. A graph reads it at each launch.
    """
    copies = []
    for node, kind in _nodes(graph):
        if kind == _KINDS.CU_GRAPH_NODE_TYPE_MEMCPY:
            copy = _copy_of(node)
            if not _is_on_device(*_source(copy)):
                if max(copy.Height, 1) * max(copy.Depth, 1) != 1:
                    raise DeviceError(
                        "what a graph copies from the host is not consecutive: it cannot own that"
                    )
                copies.append((node, copy))
    if not copies:
        return None
    own = PinnedBuffer(context, sum(copy.WidthInBytes for _, copy in copies))
    at = own.address
    for node, copy in copies:
        _, address = _source(copy)
        ctypes.memmove(at, address + copy.srcXInBytes, copy.WidthInBytes)
        copy.srcMemoryType, copy.srcHost, copy.srcXInBytes = _HOST, at, 0
        code = driver.cuGraphMemcpyNodeSetParams(node, copy)[0]
        context.check(code, "giving a graph the memory that it copies from")
        at += copy.WidthInBytes
    return own


def _nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the nodes of a graph with their kinds."""
    code, _, count = driver.cuGraphGetNodes(graph, 0)
    if code == _OK and count:
        code, nodes, count = driver.cuGraphGetNodes(graph, count)
        if code == _OK:
            for node in list(nodes)[:count]:
                code, kind = driver.cuGraphNodeGetType(node)
                if code != _OK:
                    break
                yield node, kind
    if code != _OK:
        raise DeviceError(f"the nodes of a graph cannot be listed ({code.name})")


def _copy_of(node: Any) -> Any:
    code, copy = driver.cuGraphMemcpyNodeGetParams(node)
    if code != _OK:
        raise DeviceError(f"CUDA does not say what a graph copies ({code.name})")
    return copy


def _source(copy: Any) -> tuple[Any, int]:
    """Return the kind of memory that a copy reads, and the address."""
    return copy.srcMemoryType, int(copy.srcHost if copy.srcMemoryType == _HOST else copy.srcDevice)


def _target(copy: Any) -> tuple[Any, int]:
    return copy.dstMemoryType, int(copy.dstHost if copy.dstMemoryType == _HOST else copy.dstDevice)


def _is_on_device(kind: Any, address: int) -> bool:
    if kind in (_DEVICE, _ARRAY):
        return True
    if kind == _HOST:
        return False
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    code, memory = driver.cuPointerGetAttribute(attribute, address)
    return bool(code == _OK and int(memory) == int(_DEVICE))
