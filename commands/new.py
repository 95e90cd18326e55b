"""`jetfire new`."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jetfire
from jetfire.commands import options as o
from jetfire.core import registry, terminal
from jetfire.core.errors import UsageError
from jetfire.core.files import write

EPILOG = "Example: jetfire new softmax && jetfire bench softmax --load softmax.py --m 512"
EXAMPLES = Path(jetfire.__path__[0]) / "examples"


def run(
    name: Annotated[str, o.argument("NAME", "Of the op and of the file, NAME.py.")],
    triton: Annotated[
        bool, o.flag("--triton", "A Triton kernel: softmax and its gradient (this if none).")
    ] = False,
    cuda: Annotated[bool, o.flag("--cuda", "A CUDA C++ kernel: the norm of each row.")] = False,
    cpu: Annotated[bool, o.flag("--cpu", "A library's call: the logsumexp of each row.")] = False,
    debug: o.Debug = False,
) -> None:
    """Write a file with an op and a kernel of your own, which runs as it stands: see --load."""
    if triton + cuda + cpu > 1:
        raise UsageError("new: expected one of --triton, --cuda, --cpu")
    if not re.fullmatch("[a-z][a-z0-9_]{0,59}", name) or keyword.iskeyword(name):
        raise UsageError(f"new {name}: expected a name such as softmax or row_norm")
    if name in registry.names():
        raise UsageError(f"new {name}: there is such an op already: expected another name")
    file = Path(f"{name}.py")
    if file.exists():
        raise UsageError(f"new {name}: {file} is there already: expected another name")
    if find_spec(name) is not None:  # the file would be imported in its place, here
        raise UsageError(f"new {name}: there is a Python module {name} already: expected another")
    example = "row_norm" if cuda else "row_logsumexp" if cpu else "row_softmax"
    text = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8")
    write(file, renamed(text, example, name))
    use = f"jetfire bench {name} --load {file} --m 512"
    terminal.result({"file": file, "use": use}, lambda: print(f"{file}: {use}"))


def renamed(text: str, example: str, name: str) -> str:
    """Return an example's text with another name in place of its own, in both spellings."""
    for spelt in (str, camel):
        text = text.replace(spelt(example), spelt(name))
    return text


def camel(name: str) -> str:
    """Return ``RowNorm`` for ``row_norm``."""
    return "".join(part.capitalize() for part in name.split("_"))
