"""Target `hf`: the layout that Hugging Face's `kernels` loads and its kernel-builder builds."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jetfire
from jetfire.core.errors import UsageError
from jetfire.core.tensors import Tensors
from jetfire.export import operator
from jetfire.export.library import Library
from jetfire.export.plan import ExportPlan
from jetfire.export.render import licence, render
from jetfire.export.samples import Sample
from jetfire.export.target import ExportTarget, run
from jetfire.export.targets.torch_extension import tools

_CLEAN = (sys.executable, "-B")  # the variant is shipped as it is: no bytecode in it


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


def _as_cpp(library: Library) -> dict[str, str]:
    """Map C sources to the names under which kernel-builder, which knows no C, compiles them."""
    return {name: f"{Path(name).stem}.c.cpp" for name in library.c_sources}


class HuggingFace(ExportTarget):
    """build.toml, flake.nix, `csrc/`, `torch-ext/`, tests, and the built variant in `build/`."""

    def tools(self, library: Library) -> Sequence[str]:
        return tools(library)

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        name, renamed = hub_name(plan), _as_cpp(library)
        csrc = {renamed.get(file, file): content for file, content in library.files.items()}
        python_name = name.replace("-", "_")
        sources = [renamed.get(f, f) for f in (*library.cuda_sources, *library.c_sources)]
        values = {
            **operator.values(plan, library, sample),
            "hub": True,
            "package": False,
            "hub_name": name,
            "python_name": python_name,
            "hub_files": sorted(csrc),
            "major": int(jetfire.__version__.split(".")[0]),
            # Of compiled code the name of the architecture it was compiled for.
            "archs": re.sub(r"(\d)(\D*)$", r".\1\2", library.architecture),
            "class_name": "".join(part.capitalize() for part in name.split("-")),
            "quoted_sources": [f'"csrc/{source}"' for source in sources],
        }
        return {
            **{f"csrc/{file}": content for file, content in csrc.items()},
            "torch-ext/checks.h": render("torch/checks.h.j2", **values),
            "torch-ext/torch_binding.cpp": render("torch/operator.cpp.j2", **values),
            f"torch-ext/{python_name}/__init__.py": render("torch/init.py.j2", **values),
            "selftest.py": render("torch/selftest.py.j2", **values),
            f"tests/test_{python_name}.py": render("hf/test.py.j2", **values),
            "benchmarks/benchmark.py": render("hf/benchmark.py.j2", **values),
            **{
                file: render(f"hf/{file}.j2", **values)
                for file in ("build.toml", "flake.nix", "build_variant.py", "README.md")
            },
            **sample.files(),
            "LICENSE": licence(),
        }

    def build(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "build_variant.py"], folder, operator.environment())
        run([*_CLEAN, "-c", "import selftest"], folder)

    def products(self, plan: ExportPlan, folder: Path) -> Sequence[Path]:
        return [path.parent.relative_to(folder) for path in folder.glob("build/*/metadata.json")]

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run([*_CLEAN, "selftest.py"], folder)

    def call(self, plan: ExportPlan, folder: Path) -> Callable[[Any, Tensors, Tensors], Tensors]:
        (metadata,) = folder.glob("build/*/metadata.json")
        name = json.loads(metadata.read_text())["id"]
        module = operator.imported(name, metadata.with_name("__init__.py"))
        return operator.caller(plan, getattr(module, plan.name))


TARGET: ExportTarget = HuggingFace()
