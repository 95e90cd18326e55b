"""Target `torch`: an operator and a pybind11 binding, built in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jetfire.core.tensors import Tensors
from jetfire.export import operator
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan
from jetfire.export.render import licence, render
from jetfire.export.samples import Sample
from jetfire.export.target import ExportTarget, cuda_home, program, run


def tools(library: Library) -> Sequence[str]:
    """Return what an extension is built with, CUDA's headers among it."""
    cuda_home()
    compilers = program("NVCC", "nvcc") if library.cuda_sources else program("CC", "cc")
    return compilers, program("CXX", "c++")


class TorchExtension(ExportTarget):
    """`csrc/`, a package around what is built of it, self-test, benchmark and README."""

    def tools(self, library: Library) -> Sequence[str]:
        return tools(library)

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        values = {**operator.values(plan, library, sample), "hub": False, "package": False}
        csrc = ("checks.h", "operator.cpp", "pybind.cpp")
        return {
            **{f"csrc/{name}": content for name, content in library.files.items()},
            **{f"csrc/{name}": render(f"torch/{name}.j2", **values) for name in csrc},
            f"{plan.name}/__init__.py": render("torch/init.py.j2", **values),
            **{
                name: render(f"torch/{name}.j2", **values)
                for name in ("setup.py", "selftest.py", "benchmark.py", "README.md")
            },
            **sample.files(),
            "LICENSE": licence(),
        }

    def build(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "setup.py", "build_ext", "--inplace"], folder, operator.environment())
        run([sys.executable, "-c", f"from {plan.name} import development, {plan.name}"], folder)

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "selftest.py"], folder)

    def call(self, plan: ExportPlan, folder: Path) -> Callable[[Any, Tensors, Tensors], Tensors]:
        module = operator.imported(plan.name, folder / plan.name / "__init__.py")
        return operator.caller(plan, getattr(module, plan.name))


TARGET: ExportTarget = TorchExtension()
