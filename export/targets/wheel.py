"""Target `wheel`: the operator as a package to install, with the table of what it was tuned for."""

from __future__ import annotations

import json
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
from jetfire.export.target import ExportTarget, run
from jetfire.export.targets.torch_extension import tools

INSTALLED = "installed"  # where the wheel is tried, away from its sources


class Wheel(ExportTarget):
    """`csrc/`, the package, pyproject.toml, and the wheel itself in `dist/`."""

    def tools(self, library: Library) -> Sequence[str]:
        return tools(library)

    def files(self, plan: ExportPlan, library: Library, sample: Sample) -> dict[str, bytes]:
        values = {**operator.values(plan, library, sample), "hub": False, "package": True}
        name = plan.name
        profile = json.dumps(plan.provenance(), indent=1) + "\n"
        csrc = ("checks.h", "operator.cpp")
        return {
            **{f"csrc/{file}": content for file, content in library.files.items()},
            **{f"csrc/{file}": render(f"torch/{file}.j2", **values) for file in csrc},
            f"{name}/__init__.py": render("torch/init.py.j2", **values),
            f"{name}/selftest.py": render("torch/selftest.py.j2", **values),
            f"{name}/benchmark.py": render("torch/benchmark.py.j2", **values),
            f"{name}/profile.json": profile.encode(),
            **{f"{name}/{file}": content for file, content in sample.files().items()},
            "setup.py": render("torch/setup.py.j2", **values),
            "pyproject.toml": render("wheel/pyproject.toml.j2", **values),
            "README.md": render("torch/README.md.j2", **values),
            "LICENSE": licence(),
        }

    def build(self, plan: ExportPlan, folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        run(
            [*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", "dist", "."],
            folder,
            operator.environment(),
        )
        (wheel,) = (folder / "dist").glob("*.whl")
        away = folder / INSTALLED
        away.mkdir()
        run([*pip, "install", "--no-deps", "--no-index", "--target", ".", str(wheel)], away)
        run([sys.executable, "-c", f"from {plan.name} import {plan.name}"], away)

    def products(self, plan: ExportPlan, folder: Path) -> Sequence[Path]:
        return [wheel.relative_to(folder) for wheel in (folder / "dist").glob("*.whl")]

    def selftest(self, plan: ExportPlan, folder: Path) -> None:
        run([sys.executable, "-m", f"{plan.name}.selftest"], folder / INSTALLED)

    def call(self, plan: ExportPlan, folder: Path) -> Callable[[Any, Tensors, Tensors], Tensors]:
        module = operator.imported(plan.name, folder / INSTALLED / plan.name / "__init__.py")
        return operator.caller(plan, getattr(module, plan.name))


TARGET: ExportTarget = Wheel()
