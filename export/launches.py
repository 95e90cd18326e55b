"""Recorded launches as C statements, for all problems whose launches differ in numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetfire.core.errors import UsageError
from jetfire.export.c_text import hang, unless
from jetfire.export.recording import Address, Argument, Call, LaunchRecording, TensorMap
from jetfire.export.table import ProblemTable

C_TYPES = {"i32": "int32_t", "i64": "int64_t", "fp32": "float"}
_MAP_TYPES = {"int8": "UINT8", "bfloat16": "BFLOAT16", "float16": "FLOAT16", "float32": "FLOAT32"}
# What the launcher's C names already.
_TAKEN = ("problem", "code", "none", "stream", "workspace", "driver", "launch", "map_matrix")


def structure(recording: LaunchRecording) -> tuple[Any, ...]:
    """Return what recordings have in common where their launches differ in numbers alone."""

    def of(argument: Argument) -> tuple[Any, ...]:
        value = argument.value
        if isinstance(value, Address):
            return argument.name, value.of
        if isinstance(value, TensorMap):
            return argument.name, value.address.of, value.dtype, value.box, value.swizzle
        return argument.name, argument.type

    return tuple((call.function, *map(of, call.arguments)) for call in recording.calls)


@dataclass(frozen=True)
class ProblemGroup:
    """Problems of one structure.

    Attributes:
        rows: of the table, one per problem.
        recordings: of these rows.
        places: of each recording's scratch memory, in bytes from the workspace's start.
    """

    rows: Sequence[int]
    recordings: Sequence[LaunchRecording]
    places: Sequence[Sequence[int]]


@dataclass
class LaunchCode:
    """One launch in C.

    Attributes:
        setup: declares what its arguments are that have no name yet.
    """

    setup: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    launch: list[str] = field(default_factory=list)


class Writer:
    """Writes a group's launches.

    Args:
        kernels: of each call, its number in the launcher.
        named: what the C function's parameters are called, sizes included.
        error: the code to return where CUDA refuses.
        indent: of the statements.
    """

    def __init__(
        self,
        table: ProblemTable,
        group: ProblemGroup,
        kernels: Mapping[Call, str],
        named: Sequence[str],
        error: str,
        indent: int,
    ) -> None:
        self.table = table
        self.group = group
        self.kernels = kernels
        self.error = error
        self.indent = indent
        self._variables: dict[str, str] = dict.fromkeys((*named, *_TAKEN), "")
        self._scratch = self._scratch_names()

    def launches(self) -> list[LaunchCode]:
        return [self._launch(calls) for calls in self._calls()]

    def _calls(self) -> list[tuple[Call, ...]]:
        """Return each launch, for all rows."""
        return list(zip(*(r.calls for r in self.group.recordings), strict=True))

    def _number(self, name: str, c_type: str, values: Sequence[int], about: str = "") -> str:
        return self.table.number(name, c_type, self.group.rows, values, about)

    def _unique(self, name: str) -> str:
        count, unique = 1, name
        while unique in self._variables:
            count += 1
            unique = f"{name}_{count}"
        return unique

    def _variable(self, launch: LaunchCode, name: str, c_type: str, value: str) -> str:
        """Return a variable of that type and value, which is declared where there is none."""
        text = f"{c_type} {{}} = {value};"
        count, unique = 1, name
        while self._variables.get(unique, text) != text:
            count += 1
            unique = f"{name}_{count}"
        if unique not in self._variables:
            self._variables[unique] = text
            launch.setup.append(text.format(unique))
        return unique

    def _launch(self, calls: tuple[Call, ...]) -> LaunchCode:
        launch = LaunchCode()
        arguments = [
            self._argument(launch, found)
            for found in zip(*(call.arguments for call in calls), strict=True)
        ]
        function = calls[0].function.removesuffix("_kernel")
        several = len(self._calls()) > 1
        kernel = self.table.choice(
            f"{function}_kernel" if several else "kernel",
            "int",
            self.group.rows,
            [self.kernels[call] for call in calls],
            "which of KERNELS",
        )
        grid = [
            self._number(
                (f"{function}_blocks" if several else "blocks") + ending,
                "unsigned",
                [call.grid[i] for call in calls],
            )
            for i, ending in enumerate(("", "_y", "_z"))
        ]
        array = self._unique(function if several else "arguments")
        self._variables[array] = ""
        launch.arguments = hang(
            f"void* {array}[] = {{", (*arguments, "&none", "&none"), "};", self.indent
        )
        launch.launch = unless(
            "launch(",
            (kernel, *grid, "stream", array),
            ") != CUDA_SUCCESS",
            self.error,
            self.indent,
        )
        return launch

    def _argument(self, launch: LaunchCode, found: tuple[Argument, ...]) -> str:
        """An element of the array of arguments: the address of one."""
        first = found[0]
        name = _stem(first.name)
        values: list[Any] = [argument.value for argument in found]
        if isinstance(first.value, Address):
            return f"&{self._pointer(launch, name, values)}"
        if isinstance(first.value, TensorMap):
            return f"&{self._map(launch, name, values)}"
        c_type = C_TYPES[first.type]
        if first.type == "fp32":
            texts = [_float(value) for value in values]
            text = self.table.choice(name, c_type, self.group.rows, texts)
        else:
            text = self._number(name, c_type, values)
        if first.type == "i32" and text in self.table.sizes[0]:
            return f"&{text}"
        return f"&{self._variable(launch, name, c_type, text)}"

    def _pointer(self, launch: LaunchCode, name: str, values: Sequence[Address]) -> str:
        of = values[0].of
        offsets = [value.offset for value in values]
        if isinstance(of, int):
            offsets = [p[of] + o for p, o in zip(self.group.places, offsets, strict=True)]
            name = self._scratch[of, tuple(v.offset for v in values)]
            text = self._number(name, "size_t", offsets, "bytes into the workspace")
            start = "(char*)workspace"
        elif not any(offsets):
            return of
        else:
            text = self._number(name, "size_t", offsets, f"bytes into {of}")
            start = f"(const char*){of}"
        c_type = start[1 : start.index(")")]
        return self._variable(launch, name, c_type, start if text == "0" else f"{start} + {text}")

    def _map(self, launch: LaunchCode, name: str, values: Sequence[TensorMap]) -> str:
        first = values[0]
        if len(first.sizes) != 2 or any(v.address.offset for v in values):
            raise UsageError(f"parameter {name} is a map of no whole matrix: cannot export")
        rows, columns = (
            self._number(f"{name}_{what}", "int64_t", [v.sizes[i] for v in values])
            for i, what in enumerate(("rows", "columns"))
        )
        pitch = self._number(
            f"{name}_row_bytes", "int64_t", [v.strides[0] * v.element_bytes for v in values]
        )
        swizzle = f"{first.swizzle}B" if first.swizzle else "NONE"
        unique = self._unique(name)
        self._variables[unique] = ""
        launch.setup.append(f"CUtensorMap {unique};")
        launch.setup += unless(
            "map_matrix(",
            (
                f"&{unique}",
                f"CU_TENSOR_MAP_DATA_TYPE_{_MAP_TYPES[first.dtype]}",
                str(first.address.of),
                rows,
                columns,
                pitch,
                *map(str, first.box),
                f"CU_TENSOR_MAP_SWIZZLE_{swizzle}",
            ),
            ") != CUDA_SUCCESS",
            self.error,
            self.indent,
        )
        return unique

    def _scratch_names(self) -> dict[tuple[int, tuple[int, ...]], str]:
        """A name for each address of scratch memory: what a kernel calls it, where that is free."""
        called: dict[tuple[int, tuple[int, ...]], list[str]] = {}
        for calls in self._calls():
            for found in zip(*(call.arguments for call in calls), strict=True):
                value = found[0].value
                if isinstance(value, Address) and isinstance(value.of, int):
                    offsets = tuple(a.value.offset for a in found)
                    called.setdefault((value.of, offsets), []).append(_stem(found[0].name))
        names: dict[tuple[int, tuple[int, ...]], str] = {}
        for key, stems in called.items():
            free = [s for s in stems if s not in self._variables and s not in names.values()]
            names[key] = free[0] if free else self._unique(f"{stems[0]}_scratch")
        return names


def _stem(parameter: str) -> str:
    """A C name for what a kernel calls its parameter."""
    return parameter.removesuffix("_ptr").lower()


def _float(value: float) -> str:
    """Write a float as C has it, exactly as Triton passes it."""
    text = str(np.float32(value))
    return text + ("f" if "." in text or "e" in text else ".0f")
