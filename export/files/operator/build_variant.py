"""Build the variant for this machine's CUDA, without Nix: writes build/torch-stable-abi….

`kernel-builder build` makes this and every other variant from build.toml.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import shutil
import tempfile
from pathlib import Path

from compiling import MANIFEST, MANIFEST_FILE, ROOT, link_operator, toolkit

PACKAGE = MANIFEST_FILE.parent
# In place of the header that kernel-builder generates: the entry point by which Python imports a
# shared object.
REGISTRATION = """\
#pragma once

#include <Python.h>

#define REGISTER_EXTENSION(name) REGISTER_EXPANDED(name)
#define REGISTER_EXPANDED(name)                                                    \\
  PyMODINIT_FUNC PyInit_##name(void) {                                             \\
    static PyModuleDef definition = {PyModuleDef_HEAD_INIT, #name, nullptr, 0, nullptr}; \\
    return PyModule_Create(&definition);                                           \\
  }
"""
OPS = """\
import torch

from . import {id}

ops = torch.ops.{id}


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{id}::{{op_name}}"
"""
# For versions of `kernels` that look for the package one folder down.
NESTED = """\
import importlib.util
import sys
from pathlib import Path

_name = "{id}"
if _name not in sys.modules:
    _file = Path(__file__).parents[1] / "__init__.py"
    _spec = importlib.util.spec_from_file_location(_name, _file)
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
__all__ = sys.modules[_name].__all__
globals().update({{name: getattr(sys.modules[_name], name) for name in __all__}})
"""


def identifier() -> str:
    """The operator's namespace, another for other sources: several may be loaded at once."""
    digest = hashlib.sha256()
    for folder in ("csrc", "torch-ext"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return f"_{PACKAGE.name}_cuda_{digest.hexdigest()[:7]}"


def variant_name() -> str:
    """Return the folder that `kernels` looks for: stable interface, CUDA's version, machine."""
    found = re.search(r"#define CUDA_VERSION (\d+)", (toolkit() / "include/cuda.h").read_text())
    assert found is not None
    version = int(found[1])
    cu = f"cu{version // 1000}{version % 1000 // 10}"
    torch = MANIFEST["torch"].replace(".", "")
    return f"torch-stable-abi{torch}-{cu}-{platform.machine()}-linux"


def metadata(name: str, folder: Path) -> dict[str, object]:
    """What `kernels` reads before it imports anything."""
    files = {
        str(file.relative_to(folder)): base64.b64encode(hashlib.sha256(file.read_bytes()).digest())
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return {
        "name": MANIFEST["hub_name"],
        "id": name,
        "version": MANIFEST["major"],
        "license": "mit",
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [MANIFEST["archs"]]},
        "digest": {
            "algorithm": "sha256",
            "files": {file: digest.decode() for file, digest in files.items()},
        },
    }


def main() -> None:
    name = identifier()
    variant = ROOT / "build" / variant_name()
    shutil.rmtree(variant, ignore_errors=True)
    shutil.copytree(PACKAGE, variant, ignore=shutil.ignore_patterns("__pycache__"))
    (variant / "_ops.py").write_text(OPS.format(id=name))
    nested = variant / PACKAGE.name / "__init__.py"
    nested.parent.mkdir()
    nested.write_text(NESTED.format(id=name))
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "registration.h").write_text(REGISTRATION)
        options = [f"-I{scratch}", f"-DTORCH_EXTENSION_NAME={name}"]
        made = variant / f"{name}.abi3.so"
        link_operator("torch-ext/torch_binding.cpp", made, Path(scratch), options)
    content = json.dumps(metadata(name, variant), indent=2) + "\n"
    (variant / "metadata.json").write_text(content)
    print(variant.relative_to(ROOT))


if __name__ == "__main__":
    main()
