"""Build and load the C++ side of replays, once per source, torch and Python."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from jetfire.core import files
from jetfire.core.errors import UsageError
from jetfire.core.terminal import note

SOURCE = Path(__file__).parent / "replay.cpp"
MODULE = "replay"
# Of ATen's 2,700 headers of operators those that are needed: a tenth of the time less.
_LEAN = "-DAT_PER_OPERATOR_HEADERS"
_FLAGS = ("-O2", "-std=c++20", "-shared", "-fPIC", _LEAN, f"-DTORCH_EXTENSION_NAME={MODULE}")


@cache
def extension() -> Any:
    """Return the compiled module; the first call on a machine compiles it, in about half a minute.

    Raises:
        UsageError: there is no C++ compiler, it refuses, the cache cannot be written, or what was
            compiled cannot be loaded.
    """
    spec = importlib.util.spec_from_file_location(MODULE, library())
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
    except ImportError as error:
        raise UsageError(f"{spec.origin} cannot be loaded: {error}") from None
    spec.loader.exec_module(module)
    return module


def library() -> Path:
    """Return the compiled module's file, which is compiled where it is not there yet.

    Processes that want it at the same time wait for the first one's.
    """
    import torch

    compiler = _compiler()
    texts = (SOURCE.read_text(), torch.__version__, sysconfig.get_config_var("SOABI"), compiler)
    key = hashlib.sha256("\0".join((*texts, *_FLAGS)).encode()).hexdigest()
    file = files.cache() / "replay" / f"{MODULE}-{key[:32]}.so"
    if file.exists():
        return file
    with files.writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                _compile(compiler, file)
    return file


def _compiler() -> str:
    name = os.environ.get("CXX") or "c++"
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"no C++ compiler {name!r}: expected one on the PATH, or in CXX")
    return found


def _compile(compiler: str, file: Path) -> None:
    import torch
    from torch.utils import cpp_extension

    note("compiling the C++ side of launches, once, about half a minute")
    home = Path(torch.__file__).parent / "lib"
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = ("c10", "torch_cpu", "torch", "torch_python")
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        made = Path(folder) / file.name
        words = [
            compiler,
            *_FLAGS,
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        words += [*(f"-I{path}" for path in includes), str(SOURCE), "-o", str(made)]
        words += [f"-L{home}", f"-Wl,-rpath,{home}", *(f"-l{name}" for name in libraries)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            error = UsageError(
                f"{compiler} cannot compile {SOURCE.name} for torch {torch.__version__}"
            )
            error.details = done.stderr[-4000:]
            raise error
        os.replace(made, file)
