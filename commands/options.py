"""What the commands have in common: their options, and the parsers and completion of values.

An option of several commands is declared here, as a type; that of a single command stands there,
made by the same functions. A parameter is called as the field of the options class that it fills
(`collect`). Names from modules of upper floors are given by these modules' names: a module is
imported only when one of its names is parsed or completed, and none of them loads torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from jetfire import __version__
from jetfire.core import environment, terminal
from jetfire.core.errors import UsageError, unknown

if TYPE_CHECKING:
    from jetfire.measure.plan import Request

Names = Callable[[], Iterable[str]]
Options = TypeVar("Options")
MOST = 2**62
EVERY = "Options of every command"  # the help's heading


def collect(options: type[Options], given: Mapping[str, Any], **more: Any) -> Options:
    """Return an options class's value of a command's arguments.

    Args:
        given: the arguments by name, as `locals` has them. None leaves the field's default; what is
            no field's is passed over.
        more: fields that are not taken as they were given.
    """
    names = {field.name for field in dataclasses.fields(options)}  # type: ignore[arg-type]
    found = {name: given[name] for name in names & given.keys() if given[name] is not None}
    return options(**found | more)


def request(given: Mapping[str, Any], **more: Any) -> Request:
    """Return what a command's arguments, called as the parameters of `plan.parse`, ask for.

    Args:
        more: those that are taken otherwise than given.
    """
    from jetfire.measure import plan

    names = inspect.signature(plan.parse).parameters.keys() & given.keys()
    found = {name: given[name] for name in names if given[name] is not None}
    return plan.parse(**{"ops": (), **found, **more})


def alone(command: Callable[..., Any], named: str, given: Mapping[str, Any], *useful: str) -> None:
    """Refuse options that would have no effect beside one.

    Args:
        named: the one, as the error names it.
        given: the command's arguments by name, as `locals` has them.
        useful: parameters that have an effect.

    Raises:
        UsageError: another is given.
    """
    hints = get_type_hints(command, include_extras=True)
    lost = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in useful or given[name] in (parameter.default, None, []):
            continue
        # Its first flag is what Typer calls a declaration's default within Annotated.
        lost.append(hints[name].__metadata__[0].default)
    if lost:
        raise UsageError(f"{named}: leave out {', '.join(lost)}: no effect beside it")


# From a text to its value.


def parse_integer(option: str, least: int = -MOST) -> Callable[[str], int]:
    """Return a parser of one option's integer, whose error names the option and the text."""

    def parse(text: str) -> int:
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


def _device(text: str) -> str:
    """Return the name of a device, which need not be there."""
    from jetfire.core.device import check_name

    check_name(text)
    return text


def _distribution(text: str) -> str:
    """Return the name of a distribution, or of two."""
    from jetfire.measure.data import check

    check(text, f"--data {text}")
    return text


def shard(text: str | None) -> tuple[int, int]:
    """Return the index and the count of a shard such as ``0/4``."""
    found = re.fullmatch("([0-9]{1,9})/([0-9]{1,9})", text or "0/1")
    if not found or int(found[1]) >= int(found[2]):
        raise UsageError(f"--shard {text}: expected I/N with 0 ≤ I < N")
    return int(found[1]), int(found[2])


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
FORMATS = _of("report.output", "FORMATS")
STRATEGIES = _of("tuner.options", "STRATEGIES")
EFFORTS = _of("tuner.options", "EFFORTS")
BITS = _of("tuner.options", "BITS")
FOR_ALL = _of("tuner.options", "FOR_ALL")
OBJECTIVES = _of("tuner.trial", "OBJECTIVES")
TARGETS = _of("export.targets", "NAMES")
PRESETS = _of("gpt2.training.settings", "PRESETS")
CASES = _of("gpt2.bench.cases", "names")
MODELS = _of("models.sources", "names")
ADVISED = _of("models.options", "ADVISED")
RECIPES = _of("nn.recipes", "RECIPES")
MEASURED = _of("gpt2.bench.cases", "MEASURED")
STEP_PEERS = _of("gpt2.bench.cases", "PEERS", "none")
MODEL_PEERS = _of("models.cases", "PEERS")
LOGGERS = _of("gpt2.training.options", "LOGGERS")
CORPORA = _of("gpt2.data.corpora", "NAMED")
TOKENIZERS = _of("gpt2.data.tokenizers", "NAMES")
SANITIZERS = _of("fuzz.sanitize", "TOOLS")
ARCHITECTURES = _of("core.device", "ARCHITECTURES")
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

    words = ",".join(ctx.params.get("ops") or ()).replace("-", "_").split(",")
    chosen = [op for op in registry.names() if op in words] or registry.names()
    return _beginning(
        sorted({name for op in chosen for name in registry.kernel_names(op)}), incomplete
    )


def or_verb(names: Names) -> Callable[[typer.Context, str], list[str]]:
    """Return a function that completes a first word, which may be a verb instead of a name."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        group: Any = ctx.parent and ctx.parent.command
        return _beginning([*names(), *group.verbs], incomplete)

    return complete


# Declarations: what stands in `Annotated` beside a parameter's type.


def option(
    flags: str,
    metavar: str,
    help: str,
    *known: Names | Sequence[str],
    complete: Callable[..., list[str]] | None = None,
    parser: Callable[[str], Any] | None = None,
    callback: Callable[..., Any] | None = None,
) -> Any:
    """Return the declaration of an option that takes a value.

    Args:
        flags: its names, such as ``--output -o``.
        known: the names by which a shell completes the value; else `complete` finds them.
        parser: makes the value of its text; callback: of what was given, several times or not.
    """
    return typer.Option(
        *flags.split(),
        metavar=metavar,
        help=help,
        autocompletion=completing(*known) if known else complete,
        parser=parser,
        callback=callback,
    )


def argument(
    metavar: str,
    help: str,
    *known: Names | Sequence[str],
    complete: Callable[..., list[str]] | None = None,
) -> Any:
    """Return the declaration of a word without a flag; `known` and `complete` as in `option`."""
    complete = completing(*known) if known else complete
    return typer.Argument(metavar=metavar, help=help, autocompletion=complete)


def flag(name: str, help: str, callback: Callable[[bool], None] | None = None) -> Any:
    """Return the declaration of an option that is given or not."""
    return typer.Option(name, help=help, callback=callback)


def integer(name: str, help: str, least: int = -MOST, metavar: str = "INT") -> Any:
    """Return the declaration of an option that takes an integer."""
    return option(name, metavar, help, parser=parse_integer(name, least))


def number(name: str, metavar: str, help: str) -> Any:
    """Return the declaration of an option that takes a number, finite and not below 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise UsageError(f"{name} {text}: expected 0 or a positive number")
        return value

    return option(name, metavar, help, parser=parse)


def choice(name: str, metavar: str, help: str, known: Names | Sequence[str]) -> Any:
    """Return the declaration of an option that takes one of a few names."""

    def parse(text: str) -> str:
        names = list(known() if callable(known) else known)
        if text not in names:
            raise unknown(f"{name} {text}", text, names)
        return text

    return option(name, metavar, help, known, parser=parse)


def listed(
    name: str,
    metavar: str,
    help: str,
    *known: Names | Sequence[str],
    complete: Callable[..., list[str]] | None = None,
) -> Any:
    """Return the declaration of an option that takes names, several times or with commas."""

    def parse(texts: list[str] | None) -> list[str] | None:
        for text in texts or ():
            if not text.strip(" ,"):
                raise UsageError(f"{name} {text!r}: expected a name, or several with commas")
        parts = [part.strip() for text in texts or () for part in text.split(",")]
        return [part for part in dict.fromkeys(parts) if part] or None

    return option(name, metavar, help, *known, complete=complete, callback=parse)


# Options and arguments of several commands.


def _show_version(asked: bool) -> None:
    """Print the versions of ours and of what compiles kernels, none of which is imported."""
    if not asked:
        return
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in ("torch", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    python = ".".join(map(str, sys.version_info[:3]))
    others = ", ".join(f"{name} {at}" if at else f"no {name}" for name, at in found.items())
    terminal.result(
        {"jetfire": __version__, **found, "python": python},
        lambda: print(f"jetfire {__version__} ({others}, Python {python})"),
    )
    raise typer.Exit


def _be_strict(asked: bool) -> None:
    """Have a missing profile be an error, here and in the processes that are started.

    Raises:
        UsageError: it was not asked for, and the variable that asks for it is neither on nor off.
    """
    if asked:
        os.environ["JETFIRE_STRICT_PROFILE"] = "1"
    environment.switch("JETFIRE_STRICT_PROFILE", default=False)


def _load(ctx: typer.Context, files: list[Path] | None) -> list[Path] | None:
    """Have a command, and the processes that it starts, know the ops and kernels of files."""
    from jetfire.core import loaded

    before = os.environ.get(loaded.VARIABLE, "")
    ctx.call_on_close(lambda: os.environ.update({loaded.VARIABLE: before}))
    loaded.add(files or ())
    return files


# Types of options that may be left out: they are None then.
Text = str | None
Texts = list[str] | None
File = Path | None
Count = int | None
SIZE = "a size, a list 512,1024 or a sweep 1024:8192:1024"
Version = Annotated[
    bool,
    typer.Option("--version", is_eager=True, callback=_show_version, help="Show the versions."),
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show a traceback of an error.", rich_help_panel=EVERY),
]
StrictProfile = Annotated[
    bool,
    flag("--strict-profile", "Fail where no profile was tuned for a problem.", callback=_be_strict),
]
Load = Annotated[
    list[Path] | None,
    option(
        "--load",
        "FILE.py",
        "Run a Python file: its OP and its KERNELS are known beside ours.",
        callback=_load,
    ),
]
DryBench = Annotated[bool, flag("--dry-run", "Show what would be measured.")]
DryTune = Annotated[bool, flag("--dry-run", "Show what would be searched.")]
Ops = Annotated[Texts, argument("OP...", "Ops by name, or [b]all[/b].", OPS)]
M = Annotated[Texts, option("--m", "SIZES", f"As in bench: {SIZE}.")]
N = Annotated[Texts, option("--n", "SIZES", f"As in bench: {SIZE}.")]
K = Annotated[Texts, option("--k", "SIZES", f"As in bench: {SIZE}.")]
Workload = Annotated[Text, option("--workload", "NAME", "A model's shapes.", WORKLOADS)]
Blocks = Annotated[Texts, listed("--block", "B,...", "Block sizes.", ("32", "64", "128"))]
Mode = Annotated[str, option("--mode", "fwd|bwd", "Direction.", ("fwd", "bwd"))]
Setting = Annotated[Texts, option("--set", "FIELD=V,...", "Any other problem field.")]
Kernels = Annotated[
    Texts, listed("--kernel", "NAME", "Only these kernels.", complete=complete_kernel)
]
Peers = Annotated[Texts, listed("--peer", "NAME", "Only these peers; none for none.", PEERS)]
Data = Annotated[
    str,
    option(
        "--data", "NAME", "The inputs' distribution; list has them.", DATA, parser=_distribution
    ),
]
Device = Annotated[
    str,
    option(
        "--device",
        "NAME",
        "auto, cpu, cuda or cuda:N.",
        ("auto", "cpu", "cuda"),
        parser=_device,
    ),
]
Format = Annotated[Text, choice("--format", "NAME", "table, json, csv or md (table).", FORMATS)]
Rows = Annotated[File, option("--output -o", "FILE", "Save as .json/.csv/.md.")]
Append = Annotated[bool, flag("--append", "Add to -o FILE.json, replacing the same rows.")]
Seed = Annotated[int, integer("--seed", "Seed.")]
Profile = Annotated[
    Text,
    choice(
        "--profile",
        "ncu",
        "Run what was timed once more under Nsight Compute: its counters say why it is fast.",
        ("ncu",),
    ),
]
Trials = Annotated[
    Count,
    integer("--trials", "Configs a kernel and problem, those of earlier runs included (40).", 1),
]
Budget = Annotated[str, option("--budget", "TIME", "Wall-clock time in all: 90, 90s, 10m, 1h.")]
Missing = Annotated[bool, flag("--missing", "Only what has no profile yet, or a stale one.")]
Shard = Annotated[
    Text, option("--shard", "I/N", "Only every Nth problem, from the Ith (0/4 to 3/4).")
]
Strategy = Annotated[
    str, choice("--strategy", "NAME", "tpe, gp, random or exhaustive.", STRATEGIES)
]
Preset = Annotated[str, argument("PRESET", "As for training.", PRESETS)]
Steps = Annotated[Count, integer("--steps", "Optimizer steps.", 1)]
Run = Annotated[Path, argument("RUN", "A run's folder, or a checkpoint's.")]


# Options of every command, none of which it is given.


def of_every(name: str, help: str, metavar: str | None = None) -> Any:
    """Return the declaration of an option of every command."""
    return typer.Option(name, metavar=metavar, help=help, expose_value=False, rich_help_panel=EVERY)


def every_command(
    json: Annotated[bool, of_every("--json", "The result, or the error, as JSON.")] = False,
    quiet: Annotated[bool, of_every("--quiet", "Say errors alone beside the result.")] = False,
    verbose: Annotated[bool, of_every("--verbose", "Say what is decided, too.")] = False,
    options: Annotated[
        Path | None,
        of_every("--options", "Take options from a file; those given here win.", "FILE.toml"),
    ] = None,
) -> None:
    """Declare the options of every command; `terminal.speaking` and `Command` look at the words."""
