"""Options of the command line, with the parsers and the completion of their values.

Names from modules of upper floors are given by these modules' names: a
module is imported only when one of its names is parsed or completed, and none of them loads torch.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from jetfire import __version__
from jetfire.core.errors import UsageError, unknown

Names = Callable[[], Iterable[str]]
MOST = 2**62


def integer(option: str, least: int = -MOST) -> Callable[[str | int], int]:
    """Return a parser of one option's integer, whose error names the option and the text."""

    def parse(text: str | int) -> int:
        # int() also takes underscores and the digits of every script. Typer parses defaults too.
        if not re.fullmatch(r"[+-]?[0-9]{1,99}", str(text).strip()):
            raise UsageError(f"{option} {text}: expected an integer")
        number = int(text)
        if not -MOST <= number < MOST:
            raise UsageError(f"{option} {text}: expected an integer of at most 62 bits")
        if number < least:
            raise UsageError(f"{option} {text}: expected at least {least}")
        return number

    return parse


def choice(option: str, names: Names) -> Callable[[str], str]:
    """Return a parser of one option's name, whose error suggests the nearest known one."""

    def parse(text: str) -> str:
        if text not in (known := list(names())):
            raise unknown(f"{option} {text}", text, known)
        return text

    return parse


def number(option: str) -> Callable[[str], float]:
    """Return a parser of one option's number, finite and not below 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise UsageError(f"{option} {text}: expected 0 or a positive number")
        return value

    return parse


def some(option: str) -> Callable[[str], str]:
    """Return a parser of one option's list, which refuses an empty one."""

    def parse(text: str) -> str:
        if not text.strip(" ,"):
            raise UsageError(f"{option} {text!r}: expected a name, or several with commas")
        return text

    return parse


def duration(option: str, text: str) -> float:
    """Return the seconds of a time such as ``90``, ``90s``, ``10m`` or ``1h``."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{option} {text}: expected a time such as 90, 90s, 10m or 1h")
    return seconds


def shard(text: str | None) -> tuple[int, int]:
    """Return the index and the count of a shard such as ``0/4``."""
    found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text or "0/1")
    if not found or int(found[1]) >= int(found[2]):
        raise UsageError(f"--shard {text}: expected I/N with 0 ≤ I < N")
    return int(found[1]), int(found[2])


def joined(texts: Sequence[str] | None) -> str | None:
    """Return the values of a repeated option as one list; None where it was not given."""
    return ",".join(texts) if texts else None


# Names, and their completion. In a list that is the last name's: ``gemm,qu`` to ``gemm,quantize``.


def _of(module: str, attribute: str, *more: str) -> Names:
    """Return a function that imports a module and lists its names."""

    def names() -> list[str]:
        found = getattr(importlib.import_module(f"jetfire.{module}"), attribute)
        return [*(found() if callable(found) else found), *more]

    return names


OPS = _of("core.registry", "names", "all")
PEERS = _of("measure.peers", "NAMES", "none")
WORKLOADS = _of("core.workloads", "names")
DATA = _of("measure.data", "DISTRIBUTIONS")
SUITES = _of("bench.suite", "NAMES")
FORMATS = _of("bench.command", "FORMATS")
STRATEGIES = _of("tuner.options", "STRATEGIES")
EFFORTS = _of("tuner.options", "EFFORTS")
OBJECTIVES = _of("tuner.trial", "OBJECTIVES")
TARGETS = _of("export.targets", "NAMES")
PRESETS = _of("gpt2.settings", "PRESETS")
CASES = _of("gpt2.cases", "names")
MODELS = _of("models.sources", "names")
ADVISED = _of("models.options", "RECIPES")
RECIPES = _of("nn.recipes", "RECIPES")
MEASURED = _of("gpt2.cases", "MEASURED")
STEP_PEERS = _of("gpt2.cases", "PEERS", "reduce_overhead")
CORPORA = _of("gpt2.corpora", "NAMED")
TOKENIZERS = _of("gpt2.tokenizers", "NAMES")
# Copies, as the modules of these names load torch; a test compares them.
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
ARCHITECTURES = ("80", "86", "89", "90", "100")
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def completing(*sources: Names | Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes an option's value from some names."""

    def complete(incomplete: str) -> list[str]:
        names = [n for source in sources for n in (source() if callable(source) else source)]
        return _beginning(names, incomplete)

    return complete


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in names if name.startswith(last)]


def complete_kernel(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete the name of a kernel of the given ops, or of all ops where none is given."""
    from jetfire.core import registry

    words = ",".join(ctx.params.get("op") or ()).replace("-", "_").split(",")
    chosen = [op for op in registry.names() if op in words] or registry.names()
    return _beginning(
        sorted({name for op in chosen for name in registry.kernel_names(op)}), incomplete
    )


# Options and arguments of several commands.

SIZE = "a size, a list 512,1024 or a sweep 1024:8192:1024"
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback where something fails.")]
Ops = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OP...", help="Ops by name, or [b]all[/b].", autocompletion=completing(OPS)
    ),
]
Sizes = Annotated[list[str] | None, typer.Option(metavar="SIZES", help=f"As in bench: {SIZE}.")]
Blocks = Annotated[
    list[str] | None,
    typer.Option(
        parser=some("--block"),
        metavar="B,...",
        help="Block sizes.",
        autocompletion=completing(("32", "64", "128")),
    ),
]
Setting = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=V,...", help="Any other problem field.")
]
Workload = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A model's shapes.", autocompletion=completing(WORKLOADS)),
]
Mode = Annotated[
    str,
    typer.Option(metavar="fwd|bwd", help="Direction.", autocompletion=completing(("fwd", "bwd"))),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        parser=some("--kernel"),
        metavar="NAME",
        help="Only these kernels.",
        autocompletion=complete_kernel,
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        parser=some("--peer"),
        metavar="NAME",
        help="Only these peers; none for none.",
        autocompletion=completing(PEERS),
    ),
]
Data = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The inputs' distribution; list has them.",
        autocompletion=completing(DATA),
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N.",
        autocompletion=completing(("auto", "cpu", "cuda")),
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="table, json, csv or md (table).",
        autocompletion=completing(FORMATS),
    ),
]
Rows = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save as .json/.csv/.md.")
]
Append = Annotated[
    bool, typer.Option("--append", help="Add to -o FILE.json, replacing the same rows.")
]
Seed = Annotated[int, typer.Option(parser=integer("--seed"), metavar="INT", help="Seed.")]
Trials = Annotated[
    int | None,
    typer.Option(
        parser=integer("--trials", 1),
        metavar="INT",
        help="Configs a kernel and problem, those of earlier runs included (40).",
    ),
]
Budget = Annotated[
    str, typer.Option(metavar="TIME", help="Wall-clock time in all: 90, 90s, 10m, 1h.")
]
Missing = Annotated[
    bool, typer.Option("--missing", help="Only what has no profile yet, or a stale one.")
]
Shard = Annotated[
    str | None,
    typer.Option(metavar="I/N", help="Only every Nth problem, from the Ith (0/4 to 3/4)."),
]
Strategy = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="tpe, gp, random or exhaustive.", autocompletion=completing(STRATEGIES)
    ),
]
StrictProfile = Annotated[
    bool, typer.Option("--strict-profile", help="Fail where no profile was tuned for a problem.")
]
Preset = Annotated[
    str,
    typer.Argument(metavar="PRESET", help="As for training.", autocompletion=completing(PRESETS)),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint's.")]


def _show_version(asked: bool) -> None:
    """Print the versions of ours and of what compiles kernels, none of which is imported."""
    if not asked:
        return
    from importlib import metadata

    found = []
    for name in ("torch", "triton"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    python = ".".join(map(str, sys.version_info[:3]))
    print(f"jetfire {__version__} ({', '.join(found)}, Python {python})")
    raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_show_version, help="Show the versions."),
]


def strict(asked: bool) -> None:
    if asked:
        os.environ["JETFIRE_STRICT_PROFILE"] = "1"
