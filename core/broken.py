"""Errors of kernels that do not load or do not compile, with the place and the compiler's lines.

An error's first line names file, line, op, kernel and architecture. Its `details` are the lines of
the interpreter, Triton or NVRTC, with the caret where they have one.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from jetfire.core.errors import JetfireError, UsageError, WrongResultError

ROOT = Path(__file__).parent.parent
_NVRTC = re.compile(r"^(\S+)\((\d+)\): (?:catastrophic )?error: (.*)$", re.MULTILINE)


@contextmanager
def loading(what: str, folder: Path) -> Iterator[None]:
    """Name the line at which a kernel's module cannot be imported.

    Args:
        what: the module's owner, as the message names it.
        folder: the folder of the module and of its parts.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        yield
    except JetfireError:
        raise
    except SyntaxError as error:
        raise _unloadable(what, error, error.filename, error.lineno, _said(error)) from error
    except (Exception, SystemExit) as error:  # it may end its process, but not ours
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)]
        last = (inside or frames)[-1]
        details = "".join(traceback.format_list([last])) + _said(error)
        raise _unloadable(what, error, last.filename, last.lineno, details) from error


def _unloadable(
    what: str, error: BaseException, file: str | None, line: int | None, details: str
) -> UsageError:
    reason = str(error.msg if isinstance(error, SyntaxError) else error)
    place = "" if file is None else f"{file}:{line}: "
    made = UsageError(f"{place}{what} cannot be loaded: {type(error).__name__}: {reason}")
    made.details = details
    return made


def _said(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error))


@contextmanager
def compiling(op: str, kernel: str, where: str) -> Iterator[None]:
    """Name the kernel and the architecture where a compiler fails.

    Raises:
        WrongResultError: it does not compile.
    """
    try:
        yield
    except Exception as error:
        if found := explained(error, f"{op} {kernel} ({where})"):
            raise found from error
        raise


def explained(error: BaseException, what: str = "") -> WrongResultError | None:
    """Return a compiler's error with its place and its own lines; None for any other error.

    Args:
        what: op, kernel and architecture. Where empty, the name of the file's folder: the op.
    """
    inner = _innermost(error)
    kind = type(inner)
    if kind.__module__.startswith("triton."):
        file, line = _place(inner, error.__traceback__)
        lines = str(inner).strip().splitlines() or [kind.__name__]
        reason = f"{kind.__name__}: {lines[-1]}"
    elif (kind.__module__, kind.__name__) == ("jetfire.kernels_cuda.compile", "CompileError"):
        found = _NVRTC.search(str(inner))
        file, line = (_cuda_file(found[1], what), int(found[2])) if found else (None, 0)
        reason = f"CompileError: {found[3] if found else str(inner).splitlines()[0]}"
    else:
        return None
    place = f"{file}:{line}: " if file is not None else ""
    whose = what or (file.parent.name if file is not None else "a kernel")
    made = WrongResultError(f"{place}{whose} does not compile: {reason}")
    made.details = str(inner)
    return made


def _innermost(error: BaseException) -> BaseException:
    """Return the error of the function that is at fault, not those of its callers."""
    while error.__cause__ is not None and type(error.__cause__).__module__.startswith("triton."):
        error = error.__cause__
    return error


def _place(error: Any, trace: TracebackType | None) -> tuple[Path | None, int]:
    """Return the file and line of a Triton error, which holds its function's text but no file.

    Args:
        trace: the whole error's. It passes through the launch, and so through the kernel's file.
    """
    source, node = getattr(error, "src", None), getattr(error, "node", None)
    if not source or node is None or not hasattr(node, "lineno"):  # from the interpreter or ptxas
        frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
        ours = [frame for frame in frames if "site-packages" not in Path(frame.filename).parts]
        return (Path(ours[-1].filename), ours[-1].lineno or 0) if ours else (None, 0)
    head = source.splitlines()[0]
    for file in [*_python_files(trace), *sorted(ROOT.glob("kernels_triton/**/*.py"))]:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        for number, text in enumerate(lines):
            if text.strip() == head.strip():
                return file, number + node.lineno
    return None, 0


def _python_files(trace: TracebackType | None) -> list[Path]:
    """Return the files of the functions that were running, such as a kernel's launch."""
    files = dict.fromkeys(Path(frame.filename) for frame in traceback.extract_tb(trace))
    return [file for file in files if "site-packages" not in file.parts and file.is_file()]


def _cuda_file(name: str, what: str) -> Path | None:
    """Return the source file of a name; where several ops have one, that of the kernel's op.

    CUDA C++ in a Python file has that file's path for a name.
    """
    if Path(name).is_absolute():
        return Path(name)
    files = sorted(ROOT.glob(f"kernels_cuda/**/{Path(name).name}"))
    own = [file for file in files if file.parent.name == what.partition(" ")[0]]
    return next(iter(own or files), None)
