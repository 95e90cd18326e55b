"""What a piece of Python launches on a stream: the kernels and their parameters, run or not.

The CUDA driver itself says it: work on a stream that captures is noted as a graph's nodes and not
run. So it does not matter who launches, Triton or our own CUDA C++.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from jetfire.core.errors import JetfireError

Three = tuple[int, int, int]
# CUstreamCaptureMode, CUgraphNodeType, CUgraphDependencyType, CUlaunchAttributeID and CUresult of
# the driver API.
_RELAXED = 2
_KERNEL_NODE = 0
_PROGRAMMATIC = 1
_COOPERATIVE, _CLUSTER_DIMENSION = 2, 4
_INVALID_VALUE = 1


class CaptureError(JetfireError):
    """The CUDA driver cannot say what was launched."""


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel function.

    Attributes:
        function: the CUfunction.
        cluster: blocks of a cluster along x, y and z; zeros where it has none.
        beside: it starts while the launch before it runs (programmatic dependent launch).
        starts: where each parameter begins in `parameters`, in bytes.
        parameters: as the function has them, padded to a multiple of eight bytes.
    """

    function: int
    grid: Three
    block: Three
    cluster: Three
    shared_bytes: int
    cooperative: bool
    beside: bool
    starts: tuple[int, ...]
    parameters: bytes


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("parameters", ctypes.POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("reserved", c_ubyte * 5),
    )


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(name)


class Capture:
    """Stream capture by a CUDA driver.

    Args:
        driver: the library's name.
    """

    def __init__(self, driver: str) -> None:
        self._driver = _library(driver)

    def launches(self, stream: int, work: Callable[[], object]) -> list[KernelLaunch]:
        """Return what `work` launches on a stream, in order; nothing of it is run.

        Args:
            stream: a CUstream that is not the legacy default stream.

        Raises:
            CaptureError: it does anything on the stream but launch kernels one after another.
        """
        graph = c_void_p()
        self._call("cuStreamBeginCapture_v2", c_void_p(stream), _RELAXED)
        try:
            work()
        finally:
            error = self._driver.cuStreamEndCapture(c_void_p(stream), byref(graph))
        if error:
            raise CaptureError(f"cuStreamEndCapture: error {error}")
        try:
            return [self._launched(node, beside) for node, beside in self._in_order(graph)]
        finally:
            self._call("cuGraphDestroy", graph)

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise CaptureError(f"{name}: error {error}")

    def _in_order(self, graph: c_void_p) -> Sequence[tuple[int, bool]]:
        """Return a graph's nodes, each after the only one that it depends on.

        Beside each stands whether it starts while that one runs.
        """
        nodes = self._nodes(graph)
        if not nodes:
            return []
        edges = self._edges(graph, len(nodes))
        following = {source: (target, beside) for source, target, beside in edges}
        (*first,) = set(nodes) - {target for _, target, _ in edges}
        if len(first) != 1 or len(edges) != len(nodes) - 1 or len(following) != len(edges):
            raise CaptureError(f"{len(nodes)} nodes, {len(edges)} edges: expected a chain")
        order = [(first[0], False)]
        while order[-1][0] in following:
            order.append(following[order[-1][0]])
        return order

    def _nodes(self, graph: c_void_p) -> list[int]:
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        if not count.value:  # driver 580 refuses arrays of nothing
            return []
        nodes = (c_void_p * count.value)()
        self._call("cuGraphGetNodes", graph, nodes, byref(count))
        return [node or 0 for node in nodes[: count.value]]

    def _edges(self, graph: c_void_p, most: int) -> list[tuple[int, int, bool]]:
        """Return the edges as from, to and whether the second starts beside the first.

        Args:
            most: of more edges only so many are returned.
        """
        count = c_size_t(most)
        sources, targets = ((c_void_p * most)() for _ in range(2))
        kinds = (_EdgeData * most)()
        self._call("cuGraphGetEdges_v2", graph, sources, targets, kinds, byref(count))
        found = zip(sources, targets, kinds, strict=True)
        edges = [(one or 0, to or 0, kind.type == _PROGRAMMATIC) for one, to, kind in found]
        return edges[: count.value]

    def _launched(self, node: int, beside: bool) -> KernelLaunch:
        kind = c_int()
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value != _KERNEL_NODE:
            raise CaptureError(f"a node of type {kind.value}: expected kernels alone")
        found = _KernelNode()
        self._call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(found))
        if not found.function or not found.parameters:
            raise CaptureError("a kernel without its function or its parameters")
        starts, content = self._parameters(found)
        (cooperative, *_), cluster = (
            self._attribute(node, name) for name in (_COOPERATIVE, _CLUSTER_DIMENSION)
        )
        return KernelLaunch(
            found.function,
            tuple(found.grid),
            tuple(found.block),
            cluster,
            found.shared_bytes,
            bool(cooperative),
            beside,
            starts,
            content,
        )

    def _attribute(self, node: int, name: int) -> Three:
        """Return the first words of a launch's attribute; of one that was not given, zeros."""
        value = (c_uint * 16)()  # a CUlaunchAttributeValue has 64 bytes
        self._call("cuGraphKernelNodeGetAttribute", c_void_p(node), name, byref(value))
        return value[0], value[1], value[2]

    def _parameters(self, node: _KernelNode) -> tuple[tuple[int, ...], bytes]:
        starts: list[int] = []
        content = bytearray()
        start, size = c_size_t(), c_size_t()
        where = byref(start), byref(size)
        while True:
            index = len(starts)
            function = c_void_p(node.function)
            error = self._driver.cuFuncGetParamInfo(function, c_size_t(index), *where)
            if error == _INVALID_VALUE:  # there is no such parameter
                break
            if error:
                raise CaptureError(f"cuFuncGetParamInfo: error {error}")
            starts.append(start.value)
            content.extend(bytes(start.value - len(content)))
            content.extend(ctypes.string_at(node.parameters[index], size.value))
        content.extend(bytes(-len(content) % 8))
        return tuple(starts), bytes(content)
