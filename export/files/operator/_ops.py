"""The operator's namespace, as Hugging Face's builder gives it to packages that it builds."""

import json
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_NAME = json.loads((_HERE / "manifest.json").read_text())["name"]

torch.ops.load_library(_HERE / "_C.so")
ops = getattr(torch.ops, _NAME)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{_NAME}::{op_name}"
