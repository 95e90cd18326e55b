"""Targets `cuda` and `cubin`: the C function as a library that make or CMake builds."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetfire.core.errors import WrongResultError
from jetfire.core.tensors import Tensors
from jetfire.export.c_text import comment, fields
from jetfire.export.library import Library
from jetfire.export.operator import Origin, origin, recorded
from jetfire.export.plan import ExportPlan
from jetfire.export.render import licence, render
from jetfire.export.samples import UNWRITTEN, Sample, small_problem
from jetfire.export.signature import Extent, Parameter
from jetfire.export.target import ExportTarget, cuda_home, program, run

if TYPE_CHECKING:
    from ctypes import CDLL

BAD_SIZE = 1  # the code, as the header has it
# C of a function that reads an element as a double, for the dtypes whose outputs may differ.
_READERS = {
    torch.int8: (
        "int8",
        """static double int8(const void* tensor, size_t index) {
  return ((const int8_t*)tensor)[index];
}
""",
    ),
    torch.float32: (
        "fp32",
        """static double fp32(const void* tensor, size_t index) {
  return ((const float*)tensor)[index];
}
""",
    ),
    torch.bfloat16: (
        "bf16",
        """static double bf16(const void* tensor, size_t index) {
  uint32_t bits = (uint32_t)((const uint16_t*)tensor)[index] << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
""",
    ),
    torch.float16: (
        "fp16",
        """static double fp16(const void* tensor, size_t index) {
  uint16_t bits = ((const uint16_t*)tensor)[index];
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = exponent == 31 ? (fraction ? NAN : INFINITY)
                 : exponent > 0 ? ldexp(1024 + fraction, exponent - 25)
                                : ldexp(fraction, -24);
  return bits >> 15 ? -value : value;
}
""",
    ),
}


@dataclass(frozen=True)
class _Tensor:
    """A parameter as the self-test and the benchmark have it.

    Attributes:
        role: C flags.
        count: elements in the sample.
        size: bytes of an element.
        reader: C name of what reads an element; None where bits must be equal.
        tolerance: of the relative error, as C has it.
        count_code: C of the number of elements at any sizes.
        row: elements of a row in the sample.
        rows, columns: of it, from its beginning on, that a call must write; all of what is read.
    """

    name: str
    role: str
    count: int
    size: int
    reader: str | None
    tolerance: str
    count_code: str
    row: int
    rows: int
    columns: int

    @property
    def partial(self) -> bool:
        return self.rows * self.columns < self.count


_ROLES = {"input": "READ", "output": "WRITTEN", "updated": "READ | WRITTEN"}


def _tensor(parameter: Parameter, sample: Sample, written: tuple[int, ...]) -> _Tensor:
    """`written`: the shape of the part that a call must write."""
    name = parameter.name
    tensor = sample.inputs[name] if name in sample.inputs else sample.expected[name]
    tolerance = sample.tolerance.get(name, 0.0)
    return _Tensor(
        name,
        _ROLES[parameter.role],
        tensor.numel(),
        tensor.element_size(),
        _READERS[parameter.dtype][0] if tolerance else None,
        f"{tolerance:.9g}",
        _count_code(parameter.shape),
        tensor.shape[-1],
        math.prod(written[:-1]),
        written[-1],
    )


def _count_code(shape: Sequence[Extent]) -> str:
    """C of a product of extents, which an int may not hold: ``(size_t)m * ((n + 31) / 32)``."""
    factors = [f"({e.c()})" if e.divisor > 1 else e.c() for e in shape]
    return "(size_t)" + " * ".join(factors or ["1"])


def _flops_code(plan: ExportPlan) -> str | None:
    """C of the multiply-add operations, where they are so many for each product of the sizes."""
    if not plan.op.flops(plan.problem):
        return None
    factors = set()
    for problem in (
        *(t.problem for t in plan.tuned),
        plan.with_sizes(**dict(zip(plan.op.dims, (3072, 6144, 9216), strict=False))),
    ):
        product = 1
        for size in plan.sizes(problem).values():
            product *= size
        factors.add(plan.op.flops(problem) / product)
    if len(factors) > 1:
        return None
    sizes = [f"size[{i}]" for i in range(len(plan.op.dims))]
    return " * ".join([f"{factors.pop():.1f}", *sizes])


def _about_tuned(plan: ExportPlan, tuned: Sequence[Origin]) -> list[str]:
    """Lines of a comment on the benchmark's table of times."""
    nearest = any(each.microseconds is None for each in tuned)
    unknown = "; 0 where another size's config is used" if nearest else ""
    return comment(
        "Sizes that it was made for, and the microseconds that it took when it was tuned "
        f"{plan.tuned[0].where.comment()}{unknown}."
    )


class CLibrary(ExportTarget):
    """Sources, Makefile, CMakeLists.txt, self-test, benchmark and README."""

    def tools(self, library: Library) -> Sequence[str]:
        if library.cuda_sources:
            return "make", program("NVCC", "nvcc")
        cuda_home()
        return "make", program("CC", "cc")

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        tensors = [
            _tensor(p, sample, tensor.written)
            for p, tensor in zip(plan.signature.parameters, recorded(plan, sample), strict=True)
        ]
        used = [
            p.dtype for p, t in zip(plan.signature.parameters, tensors, strict=True) if t.reader
        ]
        sources = (*library.cuda_sources, *library.c_sources)
        known = (*sources, f"{plan.name}.h")
        written = [t for t in tensors if "WRITTEN" in t.role]
        tuned = [origin(plan, t) for t in plan.tuned]
        values = {
            "plan": plan,
            "library": library,
            "workspace": library.workspace,
            "zeros": library.zeros,
            "sm": "{}{}".format(*plan.capability),
            "sizes": plan.sizes(sample.problem),
            "tensors": tensors,
            "partial": any(t.partial for t in tensors),
            "exact": any(t.reader is None for t in written),
            "readers": list(dict.fromkeys(_READERS[d][0] for d in used)),
            "reader_code": dict(_READERS.values()),
            "unwritten": f"0x{UNWRITTEN:X}",
            "fixed": fields(plan.fixed),
            "tuned": tuned,
            "flops": _flops_code(plan),
            "rates": bool(plan.op.flops(plan.problem)),
            "size_arguments": ", ".join(f"size[{i}]" for i in range(len(plan.op.dims))),
            "about_tuned": _about_tuned(plan, tuned),
            "sources": sources,
            "objects": [f"{Path(file).stem}.o" for file in sources],
            "others": sorted(set(library.files) - set(known)),
        }
        made = ("selftest.c", "benchmark.c", "Makefile", "CMakeLists.txt", "README.md")
        return {
            **library.files,
            **sample.files(),
            **{name: render(f"c_library/{name}.j2", **values) for name in made},
            "LICENSE": licence(),
        }

    def build(self, plan: ExportPlan, folder: Path) -> None:
        jobs = f"-j{min(8, os.cpu_count() or 1)}"
        run(["make", jobs, *_home(folder), "all", "bin/selftest", "bin/benchmark"], folder)
        _Function(plan, folder / f"lib{plan.name}.so").check_loads()

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run(["make", *_home(folder), "selftest"], folder)

    def call(self, plan: ExportPlan, folder: Path) -> Callable[[Any, Tensors, Tensors], Tensors]:
        return _Function(plan, folder / f"lib{plan.name}.so")


def _home(folder: Path) -> list[str]:
    """The argument that says where CUDA is, where the Makefile asks."""
    asks = "CUDA_HOME" in (folder / "Makefile").read_text()
    # Make would expand a `$` in it.
    return [f"CUDA_HOME={cuda_home()}".replace("$", "$$")] if asks else []


class _Function:
    """The library's function, called through ctypes with a workspace for each size."""

    def __init__(self, plan: ExportPlan, file: Path) -> None:
        self.plan = plan
        self.library: CDLL = ctypes.CDLL(str(file))
        self.function = getattr(self.library, plan.name)
        self.describe = getattr(self.library, f"{plan.name}_error")
        self.describe.restype = ctypes.c_char_p
        self.workspaces: dict[tuple[int, ...], torch.Tensor] = {}

    def check_loads(self) -> None:
        """Check that it loads, and needs no GPU to refuse sizes of 0, but not the sample's.

        Raises:
            WrongResultError: it does otherwise.
        """
        # No multiple of 16: whatever the sizes are, nothing is launched.
        nowhere = [1] * len(self.plan.signature.parameters)
        sample = self.plan.sizes(small_problem(self.plan))
        for sizes, refused in ((dict.fromkeys(sample, 0), True), (sample, False)):
            code = self._code(nowhere, list(sizes.values()), None, 0)
            if (code == BAD_SIZE) != refused:
                raise WrongResultError(f"{self.plan.name}: sizes {sizes} give {self._text(code)!r}")

    def __call__(self, problem: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
        sizes = list(self.plan.sizes(problem).values())
        tensors = self.plan.signature.tensors(inputs, outputs)
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        device = next(iter(outputs.values())).device
        stream = torch.cuda.current_stream(device).cuda_stream
        code = self._code(addresses, sizes, device, stream)
        if code:
            raise WrongResultError(f"{self.plan.name}: {self._text(code)}")
        return outputs

    def _code(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        device: torch.device | None,
        stream: int,
    ) -> int:
        workspace = self._workspace(tuple(sizes), device)
        code: int = self.function(
            *map(ctypes.c_void_p, addresses),
            *map(ctypes.c_int, sizes),
            *map(ctypes.c_void_p, workspace),
            ctypes.c_void_p(stream),
        )
        return code

    def _text(self, code: int) -> str:
        text: bytes = self.describe(code)
        return text.decode()

    def _workspace(self, sizes: tuple[int, ...], device: torch.device | None) -> list[int]:
        """Return the workspace's address, if there is one; without a device none is allocated."""
        bytes_of = getattr(self.library, f"{self.plan.name}_workspace_bytes", None)
        if bytes_of is None:
            return []
        if device is None:
            return [0]
        if sizes not in self.workspaces:
            bytes_of.restype = ctypes.c_size_t
            size = bytes_of(*map(ctypes.c_int, sizes))
            self.workspaces[sizes] = torch.zeros(max(1, size), dtype=torch.uint8, device=device)
        return [self.workspaces[sizes].data_ptr()]


TARGET: ExportTarget = CLibrary()
