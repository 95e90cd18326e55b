"""Targets `torch`, `wheel` and `hf`: one operator, its files in the place that each wants.

Inputs come in the function's order; sizes are read off their shapes, and one that no shape shows is
an argument; outputs are allocated and returned, updated tensors are not.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import jetfire
from jetfire.core.errors import UsageError
from jetfire.core.tensors import Tensors
from jetfire.export import manifest
from jetfire.export.c_text import capital
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan
from jetfire.export.readme import readme
from jetfire.export.render import licence, render, static
from jetfire.export.samples import Sample
from jetfire.export.target import ExportTarget, cuda_home, program, run

# The oldest PyTorch whose stable C++ interface has all that is used.
TORCH = "2.11"
INSTALLED = "installed"  # where a wheel is tried, away from its sources
_CLEAN = (sys.executable, "-B")  # a variant is shipped as it is: no bytecode in it


def caller(
    plan: ExportPlan, function: Callable[..., Any]
) -> Callable[[Any, Tensors, Tensors], Tensors]:
    """Return a call of the operator with a problem's tensors; it allocates what it returns."""
    signature = plan.signature
    updated = [p for p in signature.inputs if p.role == "updated"]

    def call(problem: Any, inputs: Tensors, outputs: Tensors) -> Tensors:
        tensors = [(inputs if p.role == "input" else outputs)[p.key] for p in signature.inputs]
        found = function(*tensors, *(getattr(problem, dim) for dim in signature.numbers))
        several = (found,) if len(signature.allocated) == 1 else found or ()
        returned = {p.key: tensor for p, tensor in zip(signature.allocated, several, strict=True)}
        return {**{p.key: outputs[p.key] for p in updated}, **returned}

    return call


def imported(name: str, file: Path) -> ModuleType:
    """A package's module from its `__init__.py`, wherever that is."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def environment() -> dict[str, str]:
    """Return this process's environment, with the CUDA toolkit that was found."""
    return {**os.environ, "CUDA_HOME": str(cuda_home())}


class OperatorTarget(ExportTarget):
    """A package that is built around a library, with its self-test.

    Attributes:
        form: the target's name.
        copied: static file → where it goes; ``{name}`` is the package's.
        package: its folder.
        samples: where the samples go.
    """

    form: ClassVar[str]
    copied: ClassVar[Mapping[str, str]]
    package = "{name}"
    samples = ""

    def tools(self, library: Library) -> Sequence[str]:
        """Return what an extension is built with, CUDA's headers among it."""
        cuda_home()
        compilers = program("NVCC", "nvcc") if library.cuda_sources else program("CC", "cc")
        return compilers, program("CXX", "c++")

    def more(self, plan: ExportPlan, library: Library) -> dict[str, Any]:
        """Return what its own templates and the manifest have beside what all have."""
        return {}

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        known = self.more(plan, library) | {
            "torch": TORCH,
            "version": manifest.version(library),
        }
        name = known.get("python_name", plan.name)
        package = self.package.format(name=name)
        copied = {
            "c/parameters.h": "csrc/parameters.h",
            "operator/checks.h": "csrc/checks.h",
            "operator/workspace.h": "csrc/workspace.h",
            "operator/compiling.py": "compiling.py",
            "operator/__init__.py": f"{package}/__init__.py",
            **{f"operator/{file}": place for file, place in self.copied.items()},
        }
        return {
            **{f"csrc/{file}": content for file, content in library.files.items()},
            "csrc/manifest.h": manifest.header(plan, library, sample),
            f"{package}/manifest.json": manifest.python(plan, library, sample, **known),
            **{place.format(name=name): static(file) for file, place in copied.items()},
            **{self.samples.format(name=name) + at: c for at, c in sample.files().items()},
            "README.md": readme(self.form, plan, library, sample, **known),
            "LICENSE": licence(),
        }

    def loaded(self, plan: ExportPlan, folder: Path) -> tuple[str, Path]:
        """Return the name that the built package is imported by, and its `__init__.py`."""
        return plan.name, folder / plan.name / "__init__.py"

    def call(self, plan: ExportPlan, folder: Path) -> Callable[[Any, Tensors, Tensors], Tensors]:
        module = imported(*self.loaded(plan, folder))
        return caller(plan, getattr(module, plan.name))


class TorchExtension(OperatorTarget):
    """Built in place, with a pybind11 binding."""

    form = "torch"
    copied: ClassVar = {
        "operator.cpp": "csrc/operator.cpp",
        "pybind.cpp": "csrc/pybind.cpp",
        "_ops.py": "{name}/_ops.py",
        "setup.py": "setup.py",
        "selftest.py": "selftest.py",
        "benchmark.py": "benchmark.py",
    }

    def build(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "setup.py", "build_ext", "--inplace"], folder, environment())
        run([sys.executable, "-c", f"from {plan.name} import development, {plan.name}"], folder)

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "selftest.py"], folder)


class Wheel(OperatorTarget):
    """A package to install, with the table of what it was tuned for, and the wheel in `dist/`."""

    form = "wheel"
    copied: ClassVar = {
        "operator.cpp": "csrc/operator.cpp",
        "_ops.py": "{name}/_ops.py",
        "setup.py": "setup.py",
        "selftest.py": "{name}/selftest.py",
        "benchmark.py": "{name}/benchmark.py",
    }
    samples = "{name}/"

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        project = render(
            "pyproject.toml.j2",
            plan=plan,
            summary=capital(plan.op.summary),
            version=manifest.version(library),
            capability="{}.{}".format(*plan.capability),
            torch=TORCH,
        )
        return {
            **super().files(plan, library, sample),
            "pyproject.toml": project,
            f"{plan.name}/profile.json": plan.profile(),
        }

    def build(self, plan: ExportPlan, folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        run(
            [*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", "dist", "."],
            folder,
            environment(),
        )
        (wheel,) = (folder / "dist").glob("*.whl")
        away = folder / INSTALLED
        away.mkdir()
        run([*pip, "install", "--no-deps", "--no-index", "--target", ".", str(wheel)], away)
        run([sys.executable, "-c", f"from {plan.name} import {plan.name}"], away)

    def products(self, folder: Path) -> Sequence[Path]:
        return [wheel.relative_to(folder) for wheel in (folder / "dist").glob("*.whl")]

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "-m", f"{plan.name}.selftest"], folder / INSTALLED)

    def loaded(self, plan: ExportPlan, folder: Path) -> tuple[str, Path]:
        return super().loaded(plan, folder / INSTALLED)


def hub_name(plan: ExportPlan) -> str:
    """Return a kernel's name as kernel-builder takes it; the module's has underscores.

    Raises:
        UsageError: the plan's cannot be turned into one.
    """
    name = plan.name.lower().replace("_", "-")
    if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
        raise UsageError(
            f"--name {plan.name}: for hf, expected a letter or digit at its end, and 2"
        )
    return name


def _as_cpp(library: Library) -> Library:
    """Give C sources the names under which kernel-builder, which knows no C, compiles them."""
    renamed = {name: f"{Path(name).stem}.c.cpp" for name in library.c_sources}
    return dataclasses.replace(
        library,
        files={renamed.get(name, name): content for name, content in library.files.items()},
        c_sources=tuple(renamed.values()),
    )


class HuggingFace(OperatorTarget):
    """The layout that Hugging Face's `kernels` loads and its kernel-builder builds.

    The variant for this machine is built in `build/`.
    """

    form = "hf"
    copied: ClassVar = {
        "operator.cpp": "torch-ext/torch_binding.cpp",
        "selftest.py": "selftest.py",
        "hub_test.py": "tests/test_{name}.py",
        "hub_benchmark.py": "benchmarks/benchmark.py",
        "build_variant.py": "build_variant.py",
        "flake.nix": "flake.nix",
    }
    package = "torch-ext/{name}"

    def more(self, plan: ExportPlan, library: Library) -> dict[str, Any]:
        name = hub_name(plan)
        return {
            "hub_name": name,
            "python_name": name.replace("-", "_"),
            "major": int(jetfire.__version__.split(".")[0]),
            # Of compiled code the name of the architecture it was compiled for.
            "archs": re.sub(r"(\d)(\D*)$", r".\1\2", library.architecture),
        }

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        library = _as_cpp(library)
        found = super().files(plan, library, sample)
        csrc = sorted(file for file in found if file.startswith("csrc/"))
        more = {"csrc": csrc, "c": bool(library.c_sources), "torch": TORCH}
        found["build.toml"] = render("build.toml.j2", **more, **self.more(plan, library))
        return found

    def build(self, plan: ExportPlan, folder: Path) -> None:
        run([*_CLEAN, "build_variant.py"], folder, environment())
        run([*_CLEAN, "-c", "import selftest"], folder)

    def products(self, folder: Path) -> Sequence[Path]:
        return [path.parent.relative_to(folder) for path in folder.glob("build/*/metadata.json")]

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run([*_CLEAN, "selftest.py"], folder)

    def loaded(self, plan: ExportPlan, folder: Path) -> tuple[str, Path]:
        (metadata,) = folder.glob("build/*/metadata.json")
        return json.loads(metadata.read_text())["id"], metadata.with_name("__init__.py")


TARGETS: dict[str, ExportTarget] = {t.form: t for t in (TorchExtension(), Wheel(), HuggingFace())}
