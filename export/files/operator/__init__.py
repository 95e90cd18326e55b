"""A kernel of Jetfire as a PyTorch operator; `manifest.json` says which, and what it takes.

`torch.compile` can trace it, a CUDA graph capture it, and any thread call it; it has no gradient.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ._ops import add_op_namespace_prefix, ops

_MANIFEST: dict[str, Any] = json.loads(Path(__file__).with_name("manifest.json").read_text())
_NAME: str = _MANIFEST["name"]
_INPUTS = [t for t in _MANIFEST["tensors"] if t["role"] != "output"]
_RETURNED = [t for t in _MANIFEST["tensors"] if t["role"] == "output"]
__version__: str = _MANIFEST["version"]


def _shape(tensor: dict[str, Any], sizes: dict[int, Any]) -> list[Any]:
    """Return a tensor's sides at some sizes, by their numbers."""
    return [
        factor if dim < 0 else (factor * sizes[dim] + divisor - 1) // divisor
        for dim, factor, divisor in tensor["shape"]
    ]


@torch.library.register_fake(add_op_namespace_prefix(_NAME))
def _fake(*given: Any) -> Any:
    """Shapes and dtypes of what a call returns, for tracing."""
    names = _MANIFEST["sizes"]
    count = len(_INPUTS)
    numbers = zip(_MANIFEST["numbers"], given[count:], strict=True)
    sizes = {names.index(name): size for name, size in numbers}
    for tensor, content in zip(_INPUTS, given[:count], strict=True):
        for side, (dim, factor, divisor) in enumerate(tensor["shape"]):
            if dim >= 0 and factor == divisor == 1:
                sizes.setdefault(dim, content.shape[side])
    found = tuple(
        given[0].new_empty(_shape(t, sizes), dtype=getattr(torch, t["dtype"])) for t in _RETURNED
    )
    return found[0] if len(found) == 1 else found or None


def _documentation() -> str:
    """The function's docstring."""
    said = [
        f"{_MANIFEST['summary']}.",
        f"The kernel `{_MANIFEST['kernel']}` of Jetfire, for GPUs of compute capability "
        f"{_MANIFEST['capability']}. Tensors are contiguous, on one CUDA device, and begin at a "
        "multiple of 16 bytes.",
        f"Fixed: {_MANIFEST['fixed']}." if _MANIFEST["fixed"] else "",
        " ".join(_MANIFEST["contract"]),
    ]
    lines = "\n\n".join(textwrap.fill(text, 96) for text in said if text)
    lines += "\n\nArgs:\n"
    for t in _INPUTS:
        lines += (
            f"    {t['name']}: {t['shown']}{'; updated in place' * (t['role'] == 'updated')}.\n"
        )
    for name in _MANIFEST["numbers"]:
        lines += f"    {name}: a size that no tensor's shape shows.\n"
    if _RETURNED:
        lines += "\nReturns:\n" + "".join(f"    {t['name']}: {t['shown']}.\n" for t in _RETURNED)
    return f"{lines}\nRaises:\n    RuntimeError: a tensor is not as said, or the GPU is another.\n"


def _function() -> Callable[..., Any]:
    """The operator as a function with names and a docstring."""
    operator = getattr(ops, _NAME).default

    def function(*given: Any, **named: Any) -> Any:
        return operator(*given, **named)

    kinds = {t["name"]: "torch.Tensor" for t in _INPUTS} | dict.fromkeys(
        _MANIFEST["numbers"], "int"
    )
    returned = ", ".join(["torch.Tensor"] * len(_RETURNED))
    function.__name__ = function.__qualname__ = _NAME
    function.__doc__ = _documentation()
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for name, kind in kinds.items()
        ],
        return_annotation=f"tuple[{returned}]" if len(_RETURNED) > 1 else returned or "None",
    )
    return function


globals()[_NAME] = _function()
__all__ = [_NAME]

if Path(__file__).with_name("profile.json").exists():

    def profile() -> dict[str, Any]:
        """What the kernel was tuned for: `entries` of problem and config, and whence they come."""
        found: dict[str, Any] = json.loads(Path(__file__).with_name("profile.json").read_text())
        return found

    __all__ += ["profile"]
