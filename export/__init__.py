"""Ship a tuned kernel: sources or machine code that need neither this package nor its tools."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from jetfire.export import cuda, embedded, samples, targets
from jetfire.export.library import Library
from jetfire.export.plan import Plan
from jetfire.export.target import Target, require
from jetfire.ops.errors import UsageError


def implement(plan: Plan, target_name: str) -> Library:
    """The C function of a plan: of a CUDA kernel as source, but for target ``cubin``.

    Raises:
        UsageError: the kernel has no such form.
    """
    if target_name == "cuda" or (target_name != "cubin" and cuda.takes(plan.kernel)):
        return cuda.library(plan)
    return embedded.library(plan)


def default_target(plan: Plan) -> str:
    return "cuda" if cuda.takes(plan.kernel) else "cubin"


def _check_folder(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"-o {folder}: expected a new or empty folder")


def _write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def export(plan: Plan, target_name: str, folder: Path, *, check: bool = True) -> Path:
    """Write an export; all of it, or nothing.

    It is made beside the folder and takes its place at the end, once it has been built in a copy
    and, where there is a GPU of its architecture, has passed its self-test.

    Args:
        folder: new, or empty.
        check: build and test it.

    Raises:
        UsageError: the folder is not empty or cannot be written, a program is missing, or the
            kernel has no such form.
        WrongResultError: it does not build, or fails its self-test.
    """
    _check_folder(folder)
    target = targets.get(target_name)
    library = implement(plan, target_name)
    if check:
        require(target.tools(library))
    sample = samples.record(plan)
    files = {
        **target.files(plan, library, sample),
        "profile.json": (json.dumps(plan.provenance(), indent=1) + "\n").encode(),
    }
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.absolute().parent, prefix=".export-"
        ) as scratch:
            whole = Path(scratch) / "whole"
            _write(whole, files)
            if check:
                _check(plan, target, whole, Path(scratch) / "built")
            if folder.exists():
                folder.rmdir()
            os.replace(whole, folder)
    except OSError as error:
        raise UsageError(f"-o {folder}: {error.strerror}") from None
    return folder


def _check(plan: Plan, target: Target, whole: Path, built: Path) -> None:
    """Build in a copy, test it where that can run, and take what belongs to the export."""
    from jetfire.export.check import runs_here

    shutil.copytree(whole, built)
    target.build(plan, built)
    if runs_here(plan):
        target.selftest(plan, built)
    for product in target.products(plan, built):
        destination = whole / product
        destination.parent.mkdir(parents=True, exist_ok=True)
        if (built / product).is_dir():
            shutil.copytree(built / product, destination)
        else:
            shutil.copy2(built / product, destination)
