"""Targets `cuda` and `cubin`: the C function as a library that make or CMake builds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from jetfire.core.errors import WrongResultError
from jetfire.core.tensors import Tensors
from jetfire.export import manifest
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan
from jetfire.export.readme import readme
from jetfire.export.render import licence, static
from jetfire.export.samples import Sample, small_problem
from jetfire.export.target import ExportTarget, cuda_home, program, run

BAD_SIZE = 1  # the code, as the header has it
_FILES = ("CMakeLists.txt", "Makefile", "benchmark.c", "parameters.h", "program.h", "selftest.c")


class CLibrary(ExportTarget):
    """Sources, Makefile, CMakeLists.txt, self-test, benchmark and README."""

    def tools(self, library: Library) -> Sequence[str]:
        if library.cuda_sources:
            return "make", program("NVCC", "nvcc")
        cuda_home()
        return "make", program("CC", "cc")

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        return {
            **library.files,
            **sample.files(),
            **{name: static(f"c/{name}") for name in _FILES},
            "manifest.h": manifest.header(plan, library, sample),
            "manifest.mk": manifest.assignments(plan, library),
            "README.md": readme("c", plan, library, sample),
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
    """The argument that says where CUDA is, where it is not nvcc that knows."""
    if "ARCHITECTURE" in (folder / "manifest.mk").read_text():
        return []
    # Make would expand a `$` in it.
    return [f"CUDA_HOME={cuda_home()}".replace("$", "$$")]


class _Function:
    """The library's function, called through ctypes with a workspace for each size."""

    def __init__(self, plan: ExportPlan, file: Path) -> None:
        self.plan = plan
        self.library = ctypes.CDLL(str(file))
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
TARGETS = {"cuda": TARGET, "cubin": TARGET}
