"""The folder of an export: what is in it, and that it is there whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jetfire.core import files as core_files
from jetfire.core.errors import UsageError
from jetfire.export import cuda, embedded, samples, targets
from jetfire.export.library import Library
from jetfire.export.plan import EMBEDDED, ExportPlan
from jetfire.export.render import stamped
from jetfire.export.target import ExportTarget, require
from jetfire.measure.results import Row


def implement(plan: ExportPlan, target_name: str) -> Library:
    """The C function of a plan: of a CUDA kernel as source, but for target ``cubin``.

    Raises:
        UsageError: the kernel has no such form.
    """
    if target_name == "cuda" and not cuda.takes(plan.kernel):
        raise UsageError(
            f"--target cuda: {plan.op.name}/{plan.kernel.name} is not exported as CUDA C++: "
            f"expected one of {', '.join(name for name in targets.NAMES if name != target_name)}"
        )
    if target_name != "cubin" and cuda.takes(plan.kernel):
        return cuda.library(plan)
    if isinstance(plan.kernel, EMBEDDED):
        return embedded.library(plan)
    return cuda.compiled_library(plan)


def default_target(plan: ExportPlan) -> str:
    return "cuda" if cuda.takes(plan.kernel) else "cubin"


def contents(plan: ExportPlan, target_name: str, *, check: bool = True) -> dict[str, bytes]:
    """All files of an export.

    Args:
        check: whatever builds and tests them must be here.

    Raises:
        UsageError: a program is missing, or the kernel has no such form.
    """
    target = targets.get(target_name)
    library = implement(plan, target_name)
    if check:
        require(target.tools(library))
    files = target.files(plan, library, samples.record(plan))
    return stamped({**files, "profile.json": plan.profile()})


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def export(plan: ExportPlan, target_name: str, folder: Path, *, check: bool = True) -> list[Row]:
    """Write an export; all of it, or nothing.

    It is made in a folder beside its own and takes its place at the end, once it has been built in
    a copy and, where there is a GPU of its architecture, has passed its self-test and been timed.

    Args:
        folder: new, or empty.
        check: build, test and time it.

    Returns:
        Its time beside the workbench's own launch of each problem; nothing without such a GPU.

    Raises:
        UsageError: the folder is not empty or cannot be written, a program is missing, or the
            kernel has no such form.
        WrongResultError: it does not build, fails its self-test or gives wrong results.
    """
    target = targets.get(target_name)
    rows: list[Row] = []
    with _scratch(folder) as scratch:
        files = contents(plan, target_name, check=check)
        whole, built = scratch / "whole", scratch / "built"
        with core_files.writing(folder):
            write(whole, files)
            if check:
                shutil.copytree(whole, built)
        if check:
            rows = _check(plan, target_name, built)
        with core_files.writing(folder):
            if check:
                _take(target, built, whole)
            for file in (*whole.rglob("*"), whole):
                core_files.sync(file)
            _place(whole, folder)
    return rows


def _check(plan: ExportPlan, target_name: str, built: Path) -> list[Row]:
    from jetfire.export import measure

    target = targets.get(target_name)
    target.build(plan, built)
    if not plan.runs_here:
        return []
    target.selftest(plan, built)
    return measure.measure(plan, target_name, built)


def _take(target: ExportTarget, built: Path, whole: Path) -> None:
    """Take what was built and belongs to the export."""
    for product in target.products(built):
        destination = whole / product
        destination.parent.mkdir(parents=True, exist_ok=True)
        if (built / product).is_dir():
            shutil.copytree(built / product, destination)
        else:
            shutil.copy2(built / product, destination)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder that goes away, on the file system where an export is to be.

    What an export to the same place left that was killed goes too.

    Raises:
        UsageError: the export's own is not empty, another is on its way there, or nothing can be
            written there.
    """
    place = folder.absolute()
    name, lock = place.name, f".{place.name}.lock"
    with core_files.writing(folder):
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    with core_files.locked(place / lock):
        core_files.check_new("-o", folder)
        core_files.tidy(place, name)
        with core_files.scratch(place, name) as scratch:
            yield scratch


def _place(whole: Path, folder: Path) -> None:
    """Rename a folder to its place; into that where there is one, perhaps somebody's current.

    Raises:
        UsageError: something has appeared there while it was made.
    """
    core_files.check_new("-o", folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(whole, folder)
        core_files.sync(folder.parent)
        return
    names = [path.name for path in whole.iterdir()]
    try:
        for name in names:
            os.replace(whole / name, folder / name)
        core_files.sync(folder)
    except BaseException:
        for name in names:
            if not os.path.lexists(whole / name):  # it was moved, so that what is there is ours
                shutil.rmtree(folder / name, ignore_errors=True)
                (folder / name).unlink(missing_ok=True)
        raise
