"""What a capture has collected so far: whether it can be launched again and again."""

from typing import Any, Final

from asynctrt.devices.base import Stream
from asynctrt.devices.cuda.bindings import driver

_OK: Final = driver.CUresult.CUDA_SUCCESS
_KINDS: Final = driver.CUgraphNodeType
_HOST: Final = driver.CUmemorytype.CU_MEMORYTYPE_HOST
_DEVICE: Final = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
_ARRAY: Final = driver.CUmemorytype.CU_MEMORYTYPE_ARRAY

_REPEATABLE: Final = frozenset(
    {
        _KINDS.CU_GRAPH_NODE_TYPE_KERNEL,
        _KINDS.CU_GRAPH_NODE_TYPE_MEMSET,
        _KINDS.CU_GRAPH_NODE_TYPE_EMPTY,
        _KINDS.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
        _KINDS.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    }
)


def outside_of_capture(stream: Stream) -> str:
    """Return what is in the graph that ``stream`` is capturing which cannot be launched again; '' if nothing.

    That is all that refers to host memory, which its owner may free or fill anew: functions of the host, and
    copies from or to it. And memory that the graph allocates.
    """
    status = driver.cuStreamGetCaptureInfo(stream.handle)
    if status[0] != _OK:
        return f"its capture has failed ({status[0].name})"
    graph = status[3]
    code, _, count = driver.cuGraphGetNodes(graph, 0)
    if code == _OK:
        code, nodes, _ = driver.cuGraphGetNodes(graph, count)
    if code != _OK:
        return f"its nodes cannot be listed ({code.name})"
    found: list[str] = []
    for node in list(nodes or ())[:count]:
        code, kind = driver.cuGraphNodeGetType(node)
        if kind == _KINDS.CU_GRAPH_NODE_TYPE_MEMCPY:
            if not _is_on_device(node):
                found.append("a copy from or to host memory")
        elif kind not in _REPEATABLE:
            found.append(str(kind.name).removeprefix("CU_GRAPH_NODE_TYPE_").lower())
    return ", ".join(sorted(set(found)))


def _is_on_device(node: Any) -> bool:
    """Return whether both sides of a copy are memory of the device."""
    code, copy = driver.cuGraphMemcpyNodeGetParams(node)
    if code != _OK:
        return False
    return _lies_on_device(copy.srcMemoryType, copy.srcDevice) and _lies_on_device(
        copy.dstMemoryType, copy.dstDevice
    )


def _lies_on_device(kind: Any, address: Any) -> bool:
    if kind in (_DEVICE, _ARRAY):
        return True
    if kind == _HOST:
        return False
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    code, memory = driver.cuPointerGetAttribute(attribute, address)
    return bool(code == _OK and int(memory) == int(_DEVICE))
